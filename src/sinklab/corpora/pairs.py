"""Pairs of texts, a source and its target: what an encoder–decoder reads; a TSV, CSV or JSONL file."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pandas as pd

from sinklab.corpora.base import Corpus, Encoder, Identity, lines_of
from sinklab.corpora.samples import Kind
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import corpora

_BETWEEN = {".tsv": "\t", ".csv": ",", ".jsonl": "", ".ndjson": ""}
"""What stands between the columns of a file, by its ending; nothing where a line is a JSON object."""


@corpora.register("pairs")
class Pairs(Corpus):
    """Source and target texts, in an order drawn from the seed; the encoder reads the one and the decoder the other.

    A TSV or CSV file has a row for each pair, below a row of names or, with two columns, without one; a JSONL file an object a
    line. Columns and keys are ``source`` and ``target`` unless others are named; a key inside a key has a dot before it
    (``translation.en``).

    Args:
        path: the file.
        source, target: columns or keys.

    Raises:
        InputError: the file is missing, empty, not UTF-8 or no such table, or a pair is incomplete; the message says which.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"pairs"})

    def __init__(self, path: str | Path, *, source: str = "source", target: str = "target") -> None:
        self.path, self.source, self.target = Path(path).expanduser(), source, target
        content = TextFile(self.path)
        self._identity = content.identity
        try:
            table = self._table(content.text)
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{self.path} cannot be read as a table of pairs, TSV, CSV or JSONL: {reason}") from None
        if not {source, target} <= {*table.columns}:
            listed = ", ".join(map(repr, table.columns))[:200]
            raise InputError(f"{self.path} has no {source!r} and {target!r} but {listed}; name them as source and target")
        self._pairs = list(zip(table[source], table[target], strict=True))
        if not self._pairs:
            raise InputError(f"{self.path} is empty: it holds no pair")
        for number, pair in enumerate(self._pairs, start=1):
            if not all(isinstance(text, str) and text.strip() for text in pair):
                raise InputError(f"{self.path} pair {number} is {pair}; a pair needs both texts")

    @property
    def label(self) -> str:
        return self.path.name

    @property
    def identity(self) -> Identity:
        return self._identity

    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        raise ConfigurationError(
            f"corpus {self.label!r} holds pairs of a source and a target, which encoder–decoders read; give a text"
        )

    def pairs(self, seed: int) -> Iterator[tuple[str, str]]:
        yield from random.Random(seed).sample(self._pairs, len(self._pairs))

    def _table(self, text: str) -> pd.DataFrame:
        """A row for each pair, under the names of the columns or, of two without names, ``source`` and ``target``."""
        between = _BETWEEN.get(self.path.suffix.lower())
        if between is None:
            raise ValueError(f"the ending is {self.path.suffix!r}")
        if not between:
            return pd.json_normalize([{**json.loads(line)} for line in lines_of(text) if line.strip()])
        # In a TSV a quotation mark is a letter like any other.
        quoting = csv.QUOTE_NONE if between == "\t" else csv.QUOTE_MINIMAL
        table = pd.read_csv(io.StringIO(text), sep=between, header=None, dtype=str, keep_default_na=False, quoting=quoting)
        names = table.iloc[0].astype(str).str.strip()  # some write a space behind the comma
        names = names if {self.source, self.target} <= {*names} else names.str.casefold()
        if len(names) == 2 and not {self.source, self.target} <= {*names}:
            return table.set_axis(["source", "target"], axis=1)
        return table.iloc[1:].set_axis(names, axis=1)
