"""The embedded models: small decoders of two operations that come with the package; no download is needed.

A wheel has those trained from seed 0, a clone of the repository those of all :data:`SEEDS`. Others, made with
``make embedded SEEDS="3 4"``, go by the same names (``embedded:softmax-3``) where ``SINKLAB_EMBEDDED`` names their folder.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from sinklab.errors import InputError, UnknownNameError
from sinklab.models.gguf_file import in_repository

PREFIX = "embedded:"
SEEDS = (0, 1, 2)
"""From which each operation of the repository was trained."""
FOLDER = Path(__file__).parent / "embedded_checkpoints"
BUILD = Path("build/embedded")
"""Where trainings are made."""
TRAINED = "final"
"""Folder of the finished checkpoint in that of a training."""


def embedded_names() -> list[str]:
    """Names of those in the package as a user writes them, such as ``embedded:softmax``; sorted."""
    return sorted(PREFIX + path.parent.name for path in FOLDER.glob("*/config.json"))


def embedded_path(name: str) -> Path:
    """Directory of an embedded model: in the package, or of a further training below ``$SINKLAB_EMBEDDED``."""
    names = embedded_names()
    if name in names:
        return FOLDER / name.removeprefix(PREFIX)
    operation, _, seed = name.removeprefix(PREFIX).partition("-")
    if not (seed.isdecimal() and PREFIX + operation in names):
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"no embedded model is called {name!r}.{hint} Known: {', '.join(names) or 'none'}")
    trainings = Path(os.environ.get("SINKLAB_EMBEDDED") or BUILD).expanduser()
    folder = trainings / name.removeprefix(PREFIX) / TRAINED
    if not (folder / "config.json").is_file():
        raise UnknownNameError(
            f"{name}: this installation has {', '.join(names)}, and {trainings} has none from seed {seed}. A clone of sinklab "
            f"has seeds {SEEDS[0]} to {SEEDS[-1]}; `make embedded SEEDS={seed}` makes others there (half an hour each), and "
            "SINKLAB_EMBEDDED names the folder of such trainings"
        )
    return folder


def require_name(name: str) -> None:
    """Refuse what can name no model, without looking into it: nothing here, and no hub id."""
    if not name:
        raise InputError("the model's name is empty; give embedded:softmax, a directory or a hub id")
    if name.startswith(PREFIX):
        embedded_path(name)
    elif not (Path(name).expanduser().exists() or in_repository(name) or re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        known = f"models that need no download: {', '.join(embedded_names())}"
        raise InputError(f"there is no directory {name!r}, and a hub id looks like org/model or org/model/file.gguf; {known}")
