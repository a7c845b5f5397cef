"""Files of a folder whose folders are classes: what pictures and recordings of one's own have in common."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from sinklab.corpora.base import Identity, MediaCorpus, hash_files
from sinklab.errors import InputError
from sinklab.results.naming import counted

__all__ = ["Files"]


class Files(MediaCorpus):
    """Files with certain endings below a folder, or one file; hidden ones and empty ones are left out.

    A file in a folder below has the name of the first of these folders as its class; one that lies at the top has none.

    Args:
        path: the folder, or the file.

    Raises:
        InputError: nothing there, or no such file in it.
    """

    suffixes: ClassVar[tuple[str, ...]]
    what: ClassVar[str]
    """What the files are, in words, in the plural."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise InputError(f"there is no folder or file {self.path}")
        root = self.path if self.path.is_dir() else self.path.parent
        entries = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        self._files = {
            entry.relative_to(root).as_posix(): entry
            for entry in entries
            if entry.suffix.lower() in self.suffixes
            and entry.is_file()
            and not any(part.startswith(".") for part in entry.relative_to(root).parts)
            and entry.stat().st_size
        }
        if not self._files:
            raise InputError(f"{self.path} holds no {self.what}: no file with an ending such as {', '.join(self.suffixes[:4])}")

    @property
    def label(self) -> str:
        return f"{self.path.name}/" if self.path.is_dir() else self.path.name

    @property
    def identity(self) -> Identity:
        root = self.path if self.path.is_dir() else self.path.parent
        files = f" ({counted(len(self._files), 'file')})" if self.path.is_dir() else ""
        return Identity(
            source=f"{self.label}{files}", revision=f"sha256-{hash_files(root, self._files.values())}", licence="the user's own"
        )

    def shuffled(self, seed: int) -> Sequence[tuple[str, Path, str | None]]:
        """Name below the folder, path and class of every file, once each, in the order of the seed."""
        names = sorted(self._files)
        random.Random(seed).shuffle(names)
        return [(name, self._files[name], name.split("/")[0] if "/" in name else None) for name in names]
