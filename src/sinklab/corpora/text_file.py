"""Your own text: a UTF-8 file, read at random positions."""

from __future__ import annotations

import functools
import hashlib
import math
import random
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

from sinklab.corpora.base import Identity, Split, TextCorpus, held_out_keys
from sinklab.errors import InputError
from sinklab.registry import corpora

__all__ = ["TextFile"]

LONG_LINE = 1000
"""Characters from one start of a passage inside of a line to the next; a text without line breaks is one line."""
WORD = re.compile(r"(?<=\s)\S")
BOOK = re.compile(
    r"\*\*\* ?START OF TH[A-Z]+ PROJECT GUTENBERG.*?\*\*\*(.*?)(?:\*\*\* ?END OF TH[A-Z]+ PROJECT GUTENBERG|\Z)", re.DOTALL
)
FIRST_PROSE = re.compile(r"\n\s*\n(?=(?:\S[^\n]{50,}\n){5})")
"""Before the first paragraph of five full lines: behind a title and a table of contents."""


@corpora.register("text_file")
class TextFile(TextCorpus):
    """Passages of one file.

    A passage starts at the beginning of a paragraph, in an order drawn from the seed; when the paragraphs are used up, at the
    beginnings of the other lines, and then inside of long lines, behind every thousand characters. No two samples start at the
    same place, but in a short text they may overlap.

    For pre-training, one paragraph in twenty is held out, by the hash of its text, so that a repeated paragraph is on one side
    only. A document is a run of paragraphs between two of the other side: what belongs together stays together.

    Args:
        path: the file.

    Attributes:
        text: all of it, without a byte-order mark.

    Raises:
        InputError: the file is missing, empty, or not UTF-8.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            raise InputError(f"there is no text file {self.path}") from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read as a text file: {error.strerror or error}") from None
        try:
            self.text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path} is not UTF-8 text: byte {content[error.start]:#04x} at offset {error.start}; if it is text in "
                f"another encoding, convert it: iconv -f LATIN1 (or UTF-16) -t UTF-8 {self.path.name} > utf8.txt"
            ) from None
        if not self.text.strip():
            raise InputError(f"{self.path} is empty: it holds no text in its {len(content)} bytes")
        self._sha256 = hashlib.sha256(content).hexdigest()

    @functools.cached_property
    def body(self) -> str:
        """The text; of a book of Project Gutenberg from its first paragraph of prose to its end."""
        book = BOOK.search(self.text)
        if book is None:
            return self.text
        begins = FIRST_PROSE.search(book[1])
        return book[1][begins.end() if begins else 0 :]

    @property
    def label(self) -> str:
        return self.path.name

    @property
    def identity(self) -> Identity:
        return Identity(source=self.path.name, revision=f"sha256-{self._sha256}", licence="the user's own")

    @property
    def patience(self) -> float:
        return math.inf

    @property
    def more(self) -> str:
        if any(len(line) > LONG_LINE for line in self.text.splitlines()):
            return f"give a longer text, or one in more lines: a long line gives one sample for each {LONG_LINE:,} characters"
        return super().more

    def passages(self, seed: int) -> Iterator[str]:
        return (self.text[start:] for start in self.starts(seed))

    def starts(self, seed: int) -> Iterator[int]:
        """Offsets at which passages begin, each once, in the order of the seed."""
        generator = random.Random(seed)
        for starts in self._starts:
            generator.shuffle(shuffled := [*starts])
            yield from shuffled

    def documents(self, split: Split) -> Iterator[str]:
        starts, *_ = self._starts
        paragraphs = [self.text[start:stop] for start, stop in pairwise([*starts, len(self.text)])]
        held_out = held_out_keys(paragraph.strip() for paragraph in paragraphs)
        sides = [paragraph.strip() in held_out for paragraph in paragraphs]
        if all(sides):
            raise InputError(f"{self.path} holds one paragraph, and training needs two or more, with blank lines between them")
        for side, run in groupby(zip(paragraphs, sides, strict=True), key=lambda item: item[1]):
            if side == (split == "held_out"):
                yield "".join(paragraph for paragraph, _ in run).rstrip()

    @functools.cached_property
    def _starts(self) -> tuple[list[int], list[int], list[int]]:
        """Offsets of the first lines of paragraphs, of other lines that are not blank, and of words inside of long lines."""
        paragraphs: list[int] = []
        others: list[int] = []
        inside: list[int] = []
        offset, after_blank = 0, True
        for line in self.text.splitlines(keepends=True):
            if line.strip():
                (paragraphs if after_blank else others).append(offset)
                for place in range(LONG_LINE, len(line), LONG_LINE):
                    word = WORD.search(line, place, place + LONG_LINE)  # none in scripts without blanks
                    inside.append(offset + (place if word is None else word.start()))
            after_blank = not line.strip()
            offset += len(line)
        return paragraphs, others, inside
