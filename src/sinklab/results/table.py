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
from sinklab.results.file import read_object, write_atomically
from sinklab.results.metric import Metric, Row, SingleRow

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
    "layer": (
        "Int64",
        "0-based number of the attention module among those of its kind, and for hidden states of the layer among all; these "
        "differ where not every layer attends; -1 is the embedding output",
    ),
    "head": ("Int64", "0-based query head (key-value head for key and value norms)"),
    "query_position": ("Int64", "0-based position of the query in its document"),
    "key_position": ("Int64", "0-based position of the key in its document"),
    "sink": ("string", "the sink that the number is about, in words; null for numbers about no sink"),
    "step": ("Int64", "training step; null elsewhere"),
    "seed": ("Int64", "seed of the sampling"),
    "value": ("Float64", "the number"),
    "count": ("Int64", "observations behind the number"),
    "unit": ("string", "unit: percent, fraction, nats, norm, degrees, …"),
    "tier": ("string", "where the weights come from; null where sinklab saw the attention itself"),
}
"""Column name to pandas dtype and meaning, in order."""


def make_table(rows: Iterable[Mapping[str, object]], **constants: object) -> pd.DataFrame:
    """A table from rows of a probe; ``constants`` fill the columns that are the same for all.

    Args:
        rows: one row each, or many at once: a value may be a one-dimensional array, and all arrays of a mapping are then of
            one length. ``metric`` is a :class:`~sinklab.results.metric.Metric`, which fills metric, unit and version; rows of
            a table that was read have these as they are.

    Raises:
        ResultError: a row with a column that the schema does not have, without value, metric or unit, or with a Metric and a
            unit or version of its own; arrays of a row that are not of one length; one metric in two versions.
    """
    blocks = [_named(row) for row in rows]
    lengths = [_length(block) for block in blocks]
    given = {name for block in blocks for name in block} | constants.keys()
    unknown = sorted(given - COLUMNS.keys())
    if unknown:
        raise ResultError(f"rows have columns that the schema does not have: {', '.join(unknown)}; known: {', '.join(COLUMNS)}")
    if blocks and not given >= {"metric", "value", "unit"}:
        raise ResultError("every row needs metric, value and unit")
    _require_one_version(blocks, constants)
    # A column at a time: a frame for every block of rows would cost a millisecond each.
    index = pd.RangeIndex(sum(lengths))
    block_of_row = np.repeat(np.arange(len(blocks)), lengths)
    columns: dict[str, pd.api.extensions.ExtensionArray] = {}
    for name, (dtype, _) in COLUMNS.items():
        if name in constants or name not in given:
            columns[name] = pd.array([constants.get(name, pd.NA)], dtype=dtype).take(np.zeros(len(index), np.intp))
        else:
            columns[name] = _column([block.get(name) for block in blocks], lengths, block_of_row, dtype)
    return pd.DataFrame(columns, index=index, copy=False)


def _length(block: Mapping[str, object]) -> int:
    """Rows that a mapping stands for."""
    sizes = {len(value) for value in block.values() if isinstance(value, np.ndarray)}
    if len(sizes) > 1:
        raise ResultError(
            f"the arrays of a row have {' and '.join(map(str, sorted(sizes)))} entries; they must be of one length"
        )
    return sizes.pop() if sizes else 1


def _column(
    values: Sequence[object], lengths: Sequence[int], block_of_row: np.ndarray, dtype: str
) -> pd.api.extensions.ExtensionArray:
    """One column from what every block has in it: an array of its length, a value for all of its rows, or ``None``."""
    if not any(isinstance(value, np.ndarray) for value in values):
        return pd.array(values, dtype=dtype).take(block_of_row)
    filler = "" if dtype == "string" else 0
    absent = [value is None or value is pd.NA for value in values]
    parts = [
        value if isinstance(value, np.ndarray) else np.full(length, filler if missing else value)
        for value, length, missing in zip(values, lengths, absent, strict=True)
    ]
    filled = pd.array(np.concatenate(parts), dtype=dtype)
    if any(absent):
        filled[np.asarray(absent)[block_of_row]] = pd.NA
    return filled


def _require_one_version(blocks: Iterable[Mapping[str, object]], constants: Mapping[str, object]) -> None:
    versions: dict[tuple[object, object], object] = {}
    for block in blocks:
        probe, metric, version = ({**block, **constants}.get(name) for name in ("probe", "metric", "version"))
        if isinstance(metric, str) and versions.setdefault((probe, metric), version) != version:
            raise _two_versions(probe, metric)


def _two_versions(*metric: object) -> ResultError:
    return ResultError(f"metric {'/'.join(map(str, metric))} occurs in two versions; measure again with one version")


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
        raise _two_versions(*mixed.index[0])
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
        raise InputError(f"{path} is not there; is {path.parent} the output directory of a finished run of sinklab?")
    try:
        table = pd.read_parquet(path)
    except Exception as error:
        raise ResultError(f"{path} is not a parquet table: {error}") from error
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
        if (folder / "sweep.json").is_file():
            raise InputError(f"{folder} holds a sweep, whose runs are in the folders below it; name those") from None
        raise InputError(f"{path} is not there; is {folder} the output directory of a finished run of sinklab?") from None
