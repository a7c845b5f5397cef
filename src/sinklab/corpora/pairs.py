"""Pairs of texts, a source and its target: what an encoder–decoder reads; a TSV, CSV or JSONL file, or a dataset."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from sinklab.corpora._reading import lines_of
from sinklab.corpora.base import Corpus, Encoder, Identity
from sinklab.corpora.hub_dataset import HubDataset
from sinklab.corpora.samples import Kind
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import corpora

__all__ = ["Pairs"]

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
        InputError: the file is missing, empty or not UTF-8, or a pair is incomplete; the message names the line.
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
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            raise InputError(f"there is no file of pairs {self.path}") from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read as a file of pairs: {error.strerror or error}") from None
        self._sha256 = hashlib.sha256(content).hexdigest()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path} is not UTF-8 text: byte {content[error.start]:#04x} at {error.start}") from None
        self._pairs = list(self._read(text, _FILES[self.path.suffix.lower()]))
        if not self._pairs:
            raise InputError(f"{self.path} is empty: it holds no pair in its {len(content)} bytes")

    @property
    def label(self) -> str:
        return self.path.name if self._dataset is None else self._dataset.label

    @property
    def identity(self) -> Identity:
        if self._dataset is not None:
            return self._dataset.identity
        return Identity(source=self.path.name, revision=f"sha256-{self._sha256}", licence="the user's own")

    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        raise ConfigurationError(
            f"corpus {self.label!r} holds pairs of a source and a target, which encoder–decoders read; give a text"
        )

    def pairs(self, seed: int) -> Iterator[tuple[str, str]]:
        """Sources with their targets, none of them empty, in an order drawn from the seed."""
        generator = random.Random(seed)
        if self._dataset is None:
            yield from generator.sample(self._pairs, len(self._pairs))
            return
        for number, row in enumerate(self._dataset.mixed(generator), start=1):
            yield self._pair(row, f"dataset {self.label}, pair {number}")

    def _read(self, text: str, between: str) -> Iterator[tuple[str, str]]:
        if not between:
            for number, line in enumerate(lines_of(text), start=1):
                if line.strip():
                    yield self._pair(self._object(line, number), f"{self.path} line {number}")
            return
        # In a TSV a quotation mark is a letter like any other.
        lines = io.StringIO(text, newline="")
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if between == "\t" else csv.reader(lines)
        names: list[str] | None = None
        try:
            for number, row in enumerate(reader, start=1):
                if not any(cell.strip() for cell in row):
                    continue
                if names is None:
                    header = self._header(row)
                    named = {self.source, self.target} <= set(header)
                    names = header if named else self._unnamed(row, number)
                    if named:
                        continue
                if len(row) != len(names):
                    raise InputError(f"{self.path} line {number} has {len(row)} columns; expected {len(names)}")
                yield self._pair(dict(zip(names, row, strict=True)), f"{self.path} line {number}")
        except csv.Error as error:
            raise InputError(f"{self.path} line {reader.line_num} cannot be read as a row: {error}") from None

    def _header(self, row: Sequence[str]) -> list[str]:
        """Names of columns; one that is spelt with other capitals is the one that is asked for, unless that is there too."""
        header = [cell.strip() for cell in row]  # some write a space behind the comma
        asked = {name.casefold(): name for name in (self.source, self.target) if name not in header}
        return [asked.get(name.casefold(), name) for name in header]

    def _unnamed(self, row: Sequence[str], number: int) -> list[str]:
        if len(row) != 2 or (self.source, self.target) != ("source", "target"):
            raise InputError(
                f"{self.path} line {number} has {len(row)} columns, {', '.join(row)[:80]!r}, and none named {self.source!r} "
                f"and {self.target!r}; give two columns, or their names as source and target of the corpus"
            )
        return ["source", "target"]

    def _object(self, line: str, number: int) -> dict[str, object]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InputError(f"{self.path} line {number} is not JSON: {str(error)[:100]}") from None
        if not isinstance(entry, dict):
            raise InputError(
                f"{self.path} line {number} is no JSON object; expected one with {self.source!r} and {self.target!r}"
            )
        return entry

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
