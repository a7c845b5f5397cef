"""Corpora, one file each: where texts or tokens come from, with their identity. See CONTRIBUTING, "Add a corpus"."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import ConfigurationError, InputError, UnknownNameError
from sinklab.registry import corpora

if TYPE_CHECKING:
    from sinklab.corpora.base import Corpus

__all__ = ["PICTURES", "SOUNDS", "kind_of_spec", "resolve_corpus"]

DATA_FILE = re.compile(r"\.(parquet|arrow|jsonl|ndjson|json|csv|tsv)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
TEXTS = (".txt", ".md")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Endings of the files that count as pictures."""
SOUNDS = (".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus", ".aac", ".wma", ".aiff")
"""Endings of the files that count as sound; wav is read, the others are refused by name."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_corpus(spec: str | os.PathLike[str] | Mapping[str, object] | Corpus, **dataset: str | None) -> Corpus:
    """The corpus of that name, or the texts or dataset at that path, or the dataset of that name on the hub, in this order.

    A folder is what most of its files are: a dataset, texts (``.txt``, ``.md``), pictures or recordings; in a draw, the
    first of these.

    Args:
        spec: a registered name, a path, or ``owner/name``, each with settings if need be (``owner/name:subset=small``), as
            :meth:`~sinklab.registry.Registry.make` takes them; or a corpus, which is given back.
        dataset: settings of :class:`~sinklab.corpora.hub_dataset.HubDataset`; ``None`` is not given.

    Raises:
        UnknownNameError: neither a name (did you mean …?) nor a path.
        InputError: a path at which there is nothing readable, or something that is neither a name nor a corpus.
        ConfigurationError: settings of a dataset for something else, or settings that the corpus does not take.
    """
    if isinstance(spec, os.PathLike):
        spec = os.fspath(spec)
    if not isinstance(spec, (str, Mapping)):
        from sinklab.corpora.base import Corpus

        if not isinstance(spec, Corpus):
            raise InputError(
                f"`corpus` is a {type(spec).__name__}; expected a name, a path or a Corpus. Texts in memory go into a file, "
                "one a line for records:path=FILE"
            )
        return spec
    written = isinstance(spec, Mapping) or not Path(spec).expanduser().exists()  # a path may hold a colon
    fields: dict[str, Any] = corpora.read(spec, kind_of_spec) if written else {"name": spec}
    name: str = fields["name"]
    kind = kind_of_spec(name)
    settings = {key: value for key, value in dataset.items() if value is not None}
    if settings and (kind or name) != "hub_dataset":
        raise ConfigurationError(f"{', '.join(settings)}: only datasets have these settings, and corpus {name!r} is none")
    of_path = {} if kind is None else {"name": kind, "path": name}
    return corpora.make({**settings, **fields, **of_path})


def kind_of_spec(name: str) -> str | None:
    """The registered corpus that reads the path or dataset ``name``; ``None`` if ``name`` is itself a registered name."""
    if name in corpora:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        names = [
            file.name for file in path.rglob("*") if not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        kinds = [_kind_of_file(name) for name in names]
        counts = {kind: kinds.count(kind) for kind in ("hub_dataset", "text_folder", "image_folder", "audio_folder")}
        return max(counts, key=counts.__getitem__) if any(counts.values()) else "text_folder"
    if path.is_file() and _holds_pairs(path):
        return "pairs"
    if path.exists():
        return (_kind_of_file(path.name) or "text_file").replace("text_folder", "text_file")
    if HUB_NAME.fullmatch(name) and _kind_of_file(name) is None:
        return "hub_dataset"
    if path.suffix or len(path.parts) > 1:
        what = {"hub_dataset": "data", "image_folder": "picture", "audio_folder": "audio"}.get(
            _kind_of_file(name) or "", "text"
        )
        raise InputError(f"there is no {what} file {name!r}; corpora by name: {', '.join(corpora)}")
    try:
        corpora[name]
    except UnknownNameError as error:
        raise UnknownNameError(f"{error}; a dataset of the hub is given as owner/name") from None
    raise AssertionError("unreachable: the registry does not know the name")


def _holds_pairs(path: Path) -> bool:
    """Whether a file has a source and a target in each row: every TSV, and a CSV or JSONL file whose first row names both."""
    suffix = path.suffix.lower()
    if suffix == ".tsv":
        return True
    if suffix not in (".csv", ".jsonl", ".ndjson"):
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(1 << 20)
    if suffix == ".csv":
        return {"source", "target"} <= {name.strip().casefold() for name in next(csv.reader([first]), [])}
    try:
        entry = json.loads(first)
    except ValueError:
        return False
    return isinstance(entry, dict) and {"source", "target"} <= entry.keys()


def _kind_of_file(name: str) -> str | None:
    """The corpus that reads a folder of files with such an ending; ``None`` for an ending that says nothing."""
    if DATA_FILE.search(name):
        return "hub_dataset"
    endings = {"text_folder": TEXTS, "image_folder": PICTURES, "audio_folder": SOUNDS}
    return next((kind for kind, those in endings.items() if name.lower().endswith(those)), None)
