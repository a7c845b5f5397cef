"""From what a user writes after ``--corpus`` to a corpus: a registered name or the path of a text file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.errors import InputError
from sinklab.registry import corpora

if TYPE_CHECKING:
    from sinklab.corpora._corpus import Corpus

__all__ = ["resolve_corpus"]


def resolve_corpus(name: str) -> Corpus:
    """The corpus called ``name``, or the text file at that path; a registered name wins over a file of the same name.

    Raises:
        UnknownNameError: neither a name (did you mean …?) nor a path.
        InputError: a path at which there is no readable UTF-8 text.
    """
    if name in corpora:
        return corpora[name]()
    path = Path(name).expanduser()
    if path.is_dir():
        raise InputError(f"corpus {name!r} is a directory; give one text file")
    if path.exists():
        return corpora["text_file"](path)
    if path.suffix or len(path.parts) > 1:
        raise InputError(f"there is no text file {name!r}; corpora by name: {', '.join(corpora)}")
    corpora[name]  # raises, with the nearest name
    raise AssertionError("unreachable: the registry does not know the name")
