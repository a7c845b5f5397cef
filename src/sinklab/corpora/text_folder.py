"""Your own texts: a folder of UTF-8 files, .txt and .md, one document each."""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from sinklab.corpora.base import Identity, Split, TextCorpus, hash_files, hash_order, held_out_keys, visible_files
from sinklab.corpora.text_file import TextFile
from sinklab.errors import InputError
from sinklab.registry import corpora
from sinklab.results.blocks import counted

__all__ = ["TextFolder"]

OPEN_FILES = 64
"""Files that are kept while passages are drawn from them; one may be drawn a hundred times."""


@corpora.register("text_folder")
class TextFolder(TextCorpus):
    """Every ``.txt`` and ``.md`` file below a folder; hidden files and those without text are left out.

    A passage is the next one of a file that is drawn anew for each, as of a :class:`~sinklab.corpora.text_file.TextFile`: it
    starts at a paragraph, no two start at the same place, and a file that has no start left is drawn no more. For
    pre-training, one file in twenty is held out (at least one), by the hash of its path below the folder; files with the same
    content are on one side, that of the first of them.

    Args:
        path: the folder.

    Raises:
        InputError: no such folder, or no text in it; while reading, a file that is not UTF-8.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".md")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise InputError(f"there is no folder {self.path}")
        files = visible_files(self.path, self.suffixes)
        self._files: dict[str, Path] = {}
        for name, path in files.items():
            with path.open(
                encoding="utf-8-sig", errors="replace"
            ) as file:  # as a rule the first bytes say whether it holds text
                if any(piece.strip() for piece in iter(functools.partial(file.read, 4096), "")):
                    self._files[name] = path
        if not self._files:
            raise InputError(
                f"{self.path} holds no text: no file with the ending {' or '.join(self.suffixes)}, or only empty ones"
            )

    @property
    def label(self) -> str:
        return f"{self.path.name}/"

    @property
    def more(self) -> str:
        return "give more texts"

    @property
    def patience(self) -> float:
        return math.inf

    @property
    def identity(self) -> Identity:
        revision = f"sha256-{hash_files(self.path, self._files.values())}"
        copies = len(self._files) - len(set(self._texts.values()))
        # Said here because it also names the encoded text: another division of the files is another one.
        files = counted(len(self._files), "file") + (f", {copies} of them copies" if copies else "")
        return Identity(source=f"{self.path.name}/ ({files})", revision=revision, licence="the user's own")

    def passages(self, seed: int) -> Iterator[str]:
        generator = random.Random(seed)
        names, given = list(self._files), defaultdict[str, set[int]](set)
        opened = functools.lru_cache(maxsize=OPEN_FILES)(lambda name: TextFile(self._files[name]))
        while names:
            name = generator.choice(names)
            file, before = opened(name), given[self._texts[name]]
            start = next((start for start in file.starts(generator.getrandbits(32)) if start not in before), None)
            if start is None:
                names.remove(name)
                continue
            before.add(start)
            yield file.text[start:]

    def bodies(self) -> Iterator[str]:
        """Every text once, as :attr:`TextFile.body`, in the order of a hash of its path."""
        for name in hash_order(self._files):
            if self._texts[name] == name:
                yield TextFile(self._files[name]).body

    def documents(self, split: Split) -> Iterator[str]:
        held_out = held_out_keys(self._texts.values())
        if len(held_out) == len(set(self._texts.values())):
            raise InputError(
                f"{self.path} holds one text, and training needs two or more: one is held out; give the file itself, "
                f"{self.path / next(iter(self._files))}, whose paragraphs are then divided"
            )
        for name in hash_order(self._files):
            if (self._texts[name] in held_out) == (split == "held_out"):
                yield TextFile(self._files[name]).text

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        """Name of each file to that of the first file with the same content."""
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        alike = Counter(sizes.values())
        first: dict[tuple[int, str], str] = {}
        texts = {}
        for name, path in self._files.items():
            digest = ""
            if alike[sizes[name]] > 1:  # others differ, and a large folder is not read for it
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            texts[name] = first.setdefault((sizes[name], digest), name)
        return texts
