"""Pairs of texts, a source and its target: what an encoder–decoder reads; a TSV, CSV or JSONL file, or a dataset."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from sinklab.corpora.base import Corpus, Encoder, Identity, lines_of
from sinklab.corpora.hub_dataset import HubDataset
from sinklab.corpora.samples import Kind
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import corpora

_FILES = {".tsv": "\t", ".csv": ",", ".jsonl": "", ".ndjson": ""}
"""Suffixes of files that are read here, and what stands between their columns; a dataset is anything else."""


@corpora.register("pairs")
class Pairs(Corpus):
    """Source and target texts, in an order drawn from the seed; the encoder reads the one and the decoder the other.

    A TSV or CSV file has a row for each pair, below a row of names or, with two columns, without one; a JSONL file an object a
    line. Columns and keys are ``source`` and ``target`` unless others are named; a key inside a key has a dot before it
    (``translation.en``).

    Args:
        path: the file, a folder or data file of a dataset, or a dataset on the hub (``owner/name``).
        source, target: columns or keys.
        subset, revision, split: of a dataset.

    Raises:
        InputError: the file is missing, empty or not UTF-8, or a pair is incomplete; the message says which.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"pairs"})

    def __init__(
        self,
        path: str | Path,
        *,
        source: str = "source",
        target: str = "target",
        subset: str | None = None,
        revision: str | None = None,
        split: str = "train",
    ) -> None:
        self.path, self.source, self.target = Path(path).expanduser(), source, target
        self.subset, self.revision, self.split = subset, revision, split
        self._dataset: HubDataset | None = None
        if self.path.suffix.lower() not in _FILES:
            self._dataset = HubDataset(path, subset=subset, revision=revision, train_split=split)
            return
        content = TextFile(self.path)
        self._identity = content.identity
        self._pairs = list(self._read(content.text, _FILES[self.path.suffix.lower()]))
        if not self._pairs:
            raise InputError(f"{self.path} is empty: it holds no pair")

    @property
    def label(self) -> str:
        return self.path.name if self._dataset is None else self._dataset.label

    @property
    def identity(self) -> Identity:
        if self._dataset is not None:
            return self._dataset.identity
        return self._identity

    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        raise ConfigurationError(
            f"corpus {self.label!r} holds pairs of a source and a target, which encoder–decoders read; give a text"
        )

    def pairs(self, seed: int) -> Iterator[tuple[str, str]]:
        generator = random.Random(seed)
        if self._dataset is None:
            yield from generator.sample(self._pairs, len(self._pairs))
            return
        for number, row in enumerate(self._dataset.mixed(generator), start=1):
            yield self._pair(row, f"dataset {self.label}, pair {number}")

    def _read(self, text: str, between: str) -> Iterator[tuple[str, str]]:
        for number, row in enumerate(self._objects(text) if not between else self._table(text, between), start=1):
            yield self._pair(row, f"{self.path} pair {number}")

    def _objects(self, text: str) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines_of(text), start=1):
            if line.strip():
                try:
                    yield {**json.loads(line)}
                except (ValueError, TypeError) as error:
                    raise InputError(f"{self.path} line {number} is no JSON object: {str(error)[:100]}") from None

    def _table(self, text: str, between: str) -> list[dict[str, Any]]:
        """Rows by the names above them, or of two columns without names the source and the target."""
        # In a TSV a quotation mark is a letter like any other.
        quoting = csv.QUOTE_NONE if between == "\t" else csv.QUOTE_MINIMAL
        options: dict[str, Any] = {"sep": between, "header": None, "dtype": str, "keep_default_na": False, "quoting": quoting}
        try:
            table = pd.read_csv(io.StringIO(text), **options)
        except pd.errors.EmptyDataError:
            return []
        except pd.errors.ParserError as error:
            raise InputError(f"{self.path} cannot be read as a table: {str(error).strip()}") from None
        first = [str(cell).strip() for cell in table.iloc[0]]  # some write a space behind the comma
        asked = {name.casefold(): name for name in (self.source, self.target) if name not in first}
        header = [asked.get(name.casefold(), name) for name in first]
        named = {self.source, self.target} <= {*header}
        if not named and (len(header) != 2 or (self.source, self.target) != ("source", "target")):
            raise InputError(
                f"{self.path} has {len(header)} columns, {', '.join(first)[:80]!r}, and none named {self.source!r} and "
                f"{self.target!r}; give two columns, or their names as source and target of the corpus"
            )
        table.columns = pd.Index(header if named else ["source", "target"])
        return table.iloc[int(named) :].to_dict("records")

    def _pair(self, row: dict[str, object], where: str) -> tuple[str, str]:
        found = []
        for side, name in (("source", self.source), ("target", self.target)):
            value: object = row
            for key in name.split(".") if name not in row else [name]:
                value = value.get(key) if isinstance(value, dict) else None
            if value is None:
                raise InputError(
                    f"{where} has no {name!r}; it has {', '.join(map(repr, row))}: name the columns as source and target"
                )
            if not isinstance(value, str):
                raise InputError(f"{where}: {name!r} is {type(value).__name__}, not text")
            if not value.strip():
                raise InputError(f"{where}: the {side} is empty; a pair needs both texts")
            found.append(value)
        return found[0], found[1]
