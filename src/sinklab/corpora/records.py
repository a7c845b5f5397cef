"""Records: a UTF-8 file with one independent text per line: reactions, sequences, titles, questions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

from sinklab.corpora.base import Encoder, Identity, Split, TextCorpus, hash_order, held_out_keys, lines_of
from sinklab.corpora.text_file import TextFile
from sinklab.errors import InputError
from sinklab.registry import corpora


@corpora.register("records")
class Records(TextCorpus):
    """The lines of a file that are not blank, in an order drawn from the seed; white space around them is left out.

    A sample of a text file is read on past the end of a line, and may begin in one record and end in another. Here none does.
    `sinklab causes` reads every record whole, padded to the longest; what compares positions across samples, and so takes rows
    of one length, reads the beginnings of those that are long enough.

    For pre-training a record is a document, and one in twenty is held out, by the hash of its text.

    Args:
        path: the file, written ``records:path=reactions.txt``.

    Raises:
        InputError: the file is missing, empty, or not UTF-8.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = TextFile(path)
        self.path = self._file.path
        self._records = [line.strip() for line in lines_of(self._file.text) if line.strip()]

    @property
    def label(self) -> str:
        return self._file.label

    @property
    def identity(self) -> Identity:
        return self._file.identity

    @property
    def patience(self) -> float:
        return math.inf

    def passages(self, seed: int) -> Iterator[str]:
        yield from random.Random(seed).sample(self._records, len(self._records))

    def documents(self, split: Split) -> Iterator[str]:
        held_out = held_out_keys(self._records)
        if len(held_out) == len(set(self._records)):
            raise InputError(f"{self.path} holds one record, and training needs two or more: one part is held out")
        for record in hash_order(self._records):
            if (record in held_out) == (split == "held_out"):
                yield record

    def whole(self, encoder: Encoder, *, seq_len: int, samples: int, seed: int, bos: bool) -> list[list[int]]:
        """The first ``samples`` records that fit into ``seq_len`` tokens, each whole, of as many ids as it has.

        Args:
            seq_len: the most tokens of a record, with what the tokenizer puts in front and behind.
            bos: as of :meth:`~sinklab.corpora.base.Corpus.sample`.

        Raises:
            ConfigurationError: ``bos`` asked of a model without such a token.
            InputError: fewer records fit than asked for.
        """
        front, back = encoder.frame(bos)
        rows: list[list[int]] = []
        longer = 0
        for record in self.passages(seed):
            row = [*front, *encoder.behind(front).encode(record), *back]
            if len(row) > seq_len:
                longer += 1
                continue
            rows.append(row)
            if len(rows) == samples:
                return rows
        raise InputError(
            f"corpus {self.label!r} has {len(rows)} of {samples:,} records of at most {seq_len:,} tokens, and {longer} longer "
            f"ones; {'raise `seq_len`, or ' if longer else ''}ask for fewer `samples`, or give more records"
        )
