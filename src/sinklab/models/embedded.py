"""The embedded models: small decoders of two operations and three seeds that come with the package; no download is needed."""

from __future__ import annotations

import difflib
from pathlib import Path

from sinklab.errors import UnknownNameError

__all__ = ["FOLDER", "PREFIX", "SEEDS", "embedded_called", "embedded_names", "embedded_path"]

PREFIX = "embedded:"
SEEDS = (0, 1, 2)
"""From which each operation was trained."""
FOLDER = Path(__file__).parent / "embedded_checkpoints"


def embedded_called(operation: str, seed: int) -> str:
    """Name of the training of an operation from a seed: ``embedded:softmax`` from 0, ``embedded:softmax-1`` from 1."""
    return f"{PREFIX}{operation}-{seed}" if seed else f"{PREFIX}{operation}"


def embedded_names() -> list[str]:
    """Names as a user writes them, such as ``embedded:softmax``; sorted."""
    return sorted(PREFIX + path.parent.name for path in FOLDER.glob("*/config.json"))


def embedded_path(name: str) -> Path:
    """Directory of an embedded model.

    Raises:
        UnknownNameError: no such embedded model; the message lists those that are there.
    """
    names = embedded_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"no embedded model is called {name!r}.{hint} Known: {', '.join(names) or 'none'}")
    return FOLDER / name.removeprefix(PREFIX)
