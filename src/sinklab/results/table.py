"""The long table: one row is one number; absent coordinates are null; ``count`` makes means mergeable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from sinklab.errors import InputError, ResultError
from sinklab.results.file import write_atomically
from sinklab.results.metric import Metric, Row, SingleRow
from sinklab.results.reading import read_object

__all__ = [
    "COLUMNS",
    "LATER",
    "append",
    "finite",
    "make_table",
    "read_run",
    "read_table",
    "unpacked",
    "write_json",
    "write_table",
    "write_text",
]

COLUMNS: dict[str, tuple[str, str]] = {
    "run_id": ("string", "identity of the run that produced the number"),
    "model": ("string", "name or path of the model"),
    "revision": ("string", "hash of the weights"),
    "operation": ("string", "attention operation: softmax, sigmoid, …"),
    "intervention": ("string", "what was changed while measuring; null when nothing was"),
    "policy": ("string", "cache policy; null without a cache"),
    "corpus": ("string", "corpus the tokens came from"),
    "bos": ("Int64", "how many beginning-of-sequence tokens each sample starts with"),
    "probe": ("string", "probe that measured"),
    "metric": ("string", "name of the number; one name has one definition"),
    "version": ("Int64", "version of the metric's definition; different versions are never merged"),
    "module": ("string", "qualified name of the attention module or layer"),
    "part": ("string", "of an encoder–decoder: encoder, decoder or cross-attention; null in other models"),
    "layer": ("Int64", "0-based number of the layer; -1 is the embedding output"),
    "head": ("Int64", "0-based query head (key-value head for key and value norms)"),
    "query_position": ("Int64", "0-based position of the query in its document"),
    "key_position": ("Int64", "0-based position of the key in its document"),
    "sink": ("string", "the sink that the number is about, in words; null for numbers about no sink"),
    "step": ("Int64", "training step; null outside training"),
    "seed": ("Int64", "seed of the sampling"),
    "value": ("Float64", "the number"),
    "count": ("Int64", "observations behind the number"),
    "unit": ("string", "unit: percent, fraction, nats, norm, degrees, …"),
    "tier": ("string", "where the weights come from; null where sinklab saw the attention itself"),
}
"""Column name to pandas dtype and meaning, in order."""

LATER = ("part", "sink", "tier")
"""Columns that tables lack which were written before there were such columns; null there."""


def make_table(rows: Iterable[Mapping[str, object]], **constants: object) -> pd.DataFrame:
    """A table from rows of a probe; ``constants`` fill the columns that are the same for all.

    Args:
        rows: one row each, or many at once: a value may be a one-dimensional array, and all arrays of a mapping are then of
            one length. ``metric`` is a :class:`~sinklab.results.metric.Metric`, which fills metric, unit and version; rows of
            a table that was read have these as they are.

    Raises:
        ResultError: a row with a column that the schema does not have, without value, metric or unit, or with a Metric and a
            unit or version of its own.
    """
    frames = [pd.DataFrame(block) for block in _blocks(rows)]
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    for name, value in constants.items():
        frame[name] = value
    unknown = sorted(set(frame.columns) - set(COLUMNS))
    if unknown:
        raise ResultError(f"rows have columns that the schema does not have: {', '.join(unknown)}; known: {', '.join(COLUMNS)}")
    if len(frame) and frame[[c for c in ("metric", "value", "unit") if c in frame]].shape[1] < 3:
        raise ResultError("every row needs metric, value and unit")
    for name, (dtype, _) in COLUMNS.items():
        if name not in frame:
            frame[name] = pd.Series(pd.NA, index=frame.index, dtype=dtype)  # made null at once, not converted row by row
    return frame[list(COLUMNS)].astype({name: dtype for name, (dtype, _) in COLUMNS.items()})


def unpacked(rows: Iterable[Row]) -> Iterator[SingleRow]:
    """Rows one by one, with Python numbers and names of metrics, of what a probe may have given many at once."""
    for row in map(_named, rows):
        arrays = {name: value.tolist() for name, value in row.items() if isinstance(value, np.ndarray)}
        for values in zip(*arrays.values(), strict=True) if arrays else [()]:
            # The columns of a Row, whose arrays give way to their entries: no type says that of a dictionary.
            yield cast(SingleRow, {**row, **dict(zip(arrays, values, strict=True))})


def _named(row: Mapping[str, object]) -> Mapping[str, object]:
    """The row with what its Metric declares in place of it."""
    metric = row.get("metric")
    if not isinstance(metric, Metric):
        return row
    own = {"unit", "version"} & row.keys()
    if own:
        raise ResultError(f"a row of {metric.name} states its own {' and '.join(sorted(own))}, which its Metric declares")
    return {**row, "metric": metric.name, "unit": metric.unit, "version": metric.version}


def _blocks(rows: Iterable[Mapping[str, object]]) -> Iterator[Mapping[str, object] | Sequence[Mapping[str, object]]]:
    """Rows that came together as they are, and runs of single rows gathered, in the same order."""
    singles: list[Mapping[str, object]] = []
    for row in map(_named, rows):
        if any(isinstance(value, np.ndarray) for value in row.values()):
            if singles:
                yield singles
                singles = []
            yield dict(row)
        else:
            singles.append(row)
    if singles:
        yield singles


def append(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below the other.

    Raises:
        ResultError: one metric in two versions.
    """
    frames = [table for table in tables if len(table)]
    if not frames:
        return make_table([])
    frame = pd.concat(frames, ignore_index=True)
    versions = frame.groupby(["probe", "metric"], dropna=False)["version"].nunique()
    mixed = versions[versions > 1]
    if len(mixed):
        raise ResultError(f"metric {'/'.join(map(str, mixed.index[0]))} occurs in two versions; measure again with one version")
    return frame


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write parquet, whole or not at all."""
    write_atomically(path, lambda temporary: table.to_parquet(temporary, index=False, compression="zstd"))


def read_table(path: Path) -> pd.DataFrame:
    """Read a table and check its columns.

    Raises:
        InputError: no such file.
        ResultError: the file does not follow the schema.
    """
    if not path.is_file():
        raise InputError(f"{path} is not there; is {path.parent} the output directory of an audit?")
    try:
        table = pd.read_parquet(path)
    except Exception as error:
        raise ResultError(f"{path} is not a parquet table: {error}") from error
    for name in LATER:
        if name not in table and set(table.columns) >= COLUMNS.keys() - set(LATER):
            table.insert(list(COLUMNS).index(name), name, None)
    if list(table.columns) != list(COLUMNS):
        raise ResultError(f"{path} does not follow the schema; its columns: {', '.join(map(str, table.columns))}")
    for name, (dtype, _) in COLUMNS.items():
        try:
            table[name] = table[name].astype(dtype)
        except (ValueError, TypeError) as error:
            raise ResultError(
                f"{path} does not follow the schema: column {name} is {table[name].dtype}, not {dtype}"
            ) from error
    return table


def finite(value: float) -> float | None:
    """The number, or ``None`` where it is not finite: JSON has no word for it."""
    return value if math.isfinite(value) else None


def write_json(record: Mapping[str, object], path: Path) -> None:
    """Write JSON, whole or not at all."""
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(text, path)


def write_text(text: str, path: Path) -> None:
    """Write UTF-8 text, whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_run(folder: Path, name: str = "run.json") -> dict[str, Any]:
    """Read ``run.json`` (or ``summary.json``) of an output directory.

    Raises:
        InputError: it is not there or is not a JSON object.
    """
    path = folder / name
    try:
        return read_object(path)
    except FileNotFoundError:
        raise InputError(f"{path} is not there; is {folder} the output directory of an audit?") from None
