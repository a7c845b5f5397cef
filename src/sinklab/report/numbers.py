"""Numbers of a table by probe, metric, head and position, as the parts of a page ask for them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sinklab.errors import InputError, ResultError
from sinklab.results.table import COLUMNS

ABSENT = -(2**62)
"""Stands for a null coordinate; -1 is taken by the embedding output."""

_WORDS = ("intervention", "policy", "corpus", "probe", "metric", "module", "part", "unit")
_INTEGERS = ("bos", "layer", "head", "key_position", "count")

_SHORT = {"encoder": "enc", "decoder": "dec", "cross-attention": "cross"}
"""Parts in the order in which they are shown, and what stands before the number of a layer."""
_KEY_VALUE_HEADS = frozenset({"key_norm", "value_norm"})


@dataclasses.dataclass(frozen=True)
class GridRow:
    """One attention module: a column of the sink map."""

    layer: int
    module: str
    label: str
    part: str = ""


class Numbers:
    """The numbers of ``table.parquet`` under its main condition, without intervention and without a cache policy.

    Attributes:
        grid: the attention modules in the order of their layers; ``num_heads`` is the largest number of query heads.
    """

    def __init__(self, source: Path | pa.Table, preferred: Mapping[str, Any], part: str = "") -> None:
        frame = _frame(source if isinstance(source, pa.Table) else _read(source))
        names = frame["module"].cat.categories
        frame["module"] = frame["module"].cat.codes.astype(np.int64)
        known = frame[["module", "part"]].drop_duplicates().dropna()
        self._part, self._parts = part, dict(zip(known["module"], known["part"], strict=True))
        self._module_names = {-1: "", **dict(enumerate(names))}
        frame = frame[frame["part"] == part] if part else frame
        self.max_position = int(frame["key_position"].max()) if len(frame) else -1
        frame = _main(frame, preferred)
        self._rows = dict(iter(frame.groupby(["probe", "metric"], observed=True)))
        of_heads = (frame["head"] != ABSENT) & (frame["layer"] != ABSENT) & ~frame["probe"].isin(_KEY_VALUE_HEADS)
        self.num_heads = int(frame["head"][of_heads].max()) + 1 if of_heads.any() else 0
        pairs = frame.loc[of_heads, ["layer", "module"]].drop_duplicates().itertuples(index=False, name=None)
        parts = self._parts
        ordered = sorted(pairs, key=lambda pair: (part_order(parts.get(pair[1], "")), pair[0]))
        self._place = {pair: number for number, pair in enumerate(ordered)}
        self.grid = labelled([(layer, self._module_names[module], parts.get(module, "")) for layer, module in ordered])
        # Attention modules are numbered among themselves, and blocks among themselves: in a part each begin somewhere.
        self._attention = [module for _, module in self._place]
        self._first = (0, 0)
        if part:
            attention = frame["module"].isin(self._attention)
            first, second = (frame["layer"][kind & (frame["layer"] >= 0)] for kind in (attention, ~attention))
            self._first = (int(first.min()) if len(first) else 0, int(second.min()) if len(second) else 0)
        self._held_in = self._layers_that_attend()

    def rows(self, probe: str, metric: str) -> pd.DataFrame | None:
        """The rows of a metric; ``None`` when it was not measured.

        Null coordinates are ``ABSENT``; ``module`` is the number of its name, -1 for null.
        """
        return self._rows.get((probe, metric))

    def whole(self, probe: str, metric: str, position: int | None = None) -> float | None:
        """One number for the whole model; with several key positions, the one at ``position``."""
        rows = self.rows(probe, metric)
        if rows is None:
            return None
        rows = rows[(rows["layer"] == ABSENT) & (rows["head"] == ABSENT)]
        if position is not None:
            rows = rows[rows["key_position"].isin([position, ABSENT])]
        value = _means(rows, np.zeros(len(rows), dtype=np.int64), 1)[0]
        return None if np.isnan(value) else float(value)

    def by_position(self, probe: str, metric: str, num_positions: int) -> NDArray[np.float64] | None:
        """The whole model's number at every key position, ``(num_positions,)``; NaN where there is none."""
        rows = self._part_of_rows(probe, metric, of_heads=False, at_positions=True)
        return None if rows is None else _means(rows, rows["key_position"].to_numpy(), num_positions)

    def by_head(self, probe: str, metric: str) -> NDArray[np.float64] | None:
        """``(modules, num_heads)``; NaN where there is none; ``None`` when it was not measured per head."""
        rows = self._part_of_rows(probe, metric, of_heads=True, at_positions=False)
        return None if rows is None else self._on_grid(rows, np.zeros(len(rows), dtype=np.int64), 1)[..., 0]

    def by_head_and_position(self, probe: str, metric: str, num_positions: int) -> NDArray[np.float64] | None:
        """``(modules, num_heads, num_positions)``; NaN where there is none; ``None`` when not measured so."""
        rows = self._part_of_rows(probe, metric, of_heads=True, at_positions=True)
        return None if rows is None else self._on_grid(rows, rows["key_position"].to_numpy(), num_positions)

    def _part_of_rows(self, probe: str, metric: str, *, of_heads: bool, at_positions: bool) -> pd.DataFrame | None:
        """Rows of heads or of the whole model, with a key position or without; ``None`` where there are none."""
        rows = self.rows(probe, metric)
        if rows is None:
            return None
        heads = rows["head"] != ABSENT if of_heads else (rows["layer"] == ABSENT) & (rows["head"] == ABSENT)
        rows = rows[heads & (rows["key_position"] >= 0 if at_positions else rows["key_position"] == ABSENT)]
        return rows if len(rows) else None

    def by_layer(
        self, probe: str, metric: str, positions: str = "none", sinks: Sequence[int] = (0,)
    ) -> dict[int, float] | None:
        """Layer to number, heads averaged; layers of a part of an encoder–decoder are counted in it, as in maps.

        What was measured of an attention module stands at the layer that holds it, where the table has hidden states of layers:
        attention modules are numbered among themselves. Of all parts at once, cross-attention is left out.

        Args:
            positions: ``"none"`` for rows without a key position, ``"sink"`` for those at ``sinks``, ``"rest"`` for the mean
                over all other key positions.
        """
        rows = self.rows(probe, metric)
        if rows is None:
            return None
        there = rows["key_position"].isin(sinks)
        chosen = {"none": rows["key_position"] == ABSENT, "sink": there}.get(
            positions, (rows["key_position"] != ABSENT) & ~there
        )
        if not self._part:
            chosen &= ~rows["module"].isin([module for module, part in self._parts.items() if part == "cross-attention"])
        rows = rows[chosen & (rows["layer"] != ABSENT)]
        if not len(rows):
            return None
        depths = self._counted_in_part(rows)
        for module, layer in self._held_in.items():
            depths[(rows["module"] == module).to_numpy()] = layer
        layers, index = np.unique(depths, return_inverse=True)
        means = _means(rows, index, len(layers))
        return {int(layer): float(mean) for layer, mean in zip(layers, means, strict=True) if np.isfinite(mean)}

    def mean_of_heads(self, probe: str, metric: str) -> float | None:
        """The whole model's number, or else the mean over all heads."""
        whole = self.whole(probe, metric)
        if whole is not None:
            return whole
        values = self.by_head(probe, metric)
        return None if values is None or np.isnan(values).all() else float(np.nanmean(values))

    def largest_by_layer(self, probe: str, metric: str) -> tuple[float, int] | None:
        """The largest per-layer number and its layer; the embedding output is left out."""
        values = {layer: value for layer, value in (self.by_layer(probe, metric) or {}).items() if layer >= 0}
        return max(((value, layer) for layer, value in values.items()), key=lambda entry: entry[0]) if values else None

    @property
    def head_metrics(self) -> list[tuple[str, str, str]]:
        """Probe, metric and unit of what was measured per head, at no single position."""
        return [
            (probe, metric, str(rows["unit"].iloc[0]))
            for (probe, metric), rows in self._rows.items()
            if ((rows["head"] != ABSENT) & (rows["key_position"] == ABSENT)).any()
        ]

    @property
    def skips_layers(self) -> bool:
        """Whether attention modules have other numbers than the layers that hold them."""
        numbers = {module: layer - self._first[0] for layer, module in self._place}
        return any(numbers[module] != layer for module, layer in self._held_in.items())

    def _on_grid(self, rows: pd.DataFrame, positions: NDArray[np.int64], count: int) -> NDArray[np.float64]:
        """Means by place in the sink map and by position, ``(modules, num_heads, count)``."""
        pairs = rows[["layer", "module"]]
        places = np.array([self._place[pair] for pair in pairs.drop_duplicates().itertuples(index=False, name=None)])
        cells = places[pairs.groupby(["layer", "module"], sort=False).ngroup()] * self.num_heads + rows["head"].to_numpy()
        shape = (len(self.grid), self.num_heads, count)
        return _means(rows, cells * count + positions, int(np.prod(shape))).reshape(shape)

    def _counted_in_part(self, rows: pd.DataFrame) -> NDArray[np.int64]:
        """Layers of the rows; those of a part from its first on: the table numbers a decoder's behind the encoder's."""
        first, layer = np.where(rows["module"].isin(self._attention), *self._first), rows["layer"].to_numpy()
        # What enters the first layer (-1) stays in front of it.
        return np.where(layer >= 0, layer - first, layer)

    def _layers_that_attend(self) -> dict[int, int]:
        """Attention module to the layer that holds it, counted in the part; none where that is not known of all."""
        rows = self.rows("hidden_norm", "hidden_norm")
        if rows is None:
            return {}
        rows = rows[(rows["layer"] >= 0) & (rows["module"] >= 0)].drop_duplicates("module")
        layers = {
            self._module_names[module]: int(layer)
            for module, layer in zip(rows["module"], self._counted_in_part(rows), strict=True)
        }
        held = {}
        for module in self._attention:
            name, call, run = self._module_names[module].partition("#")
            owners = itertools.accumulate(name.split("."), "{}.{}".format)
            inside = [layers[owner + call + run] for owner in owners if owner + call + run in layers]
            if not inside:
                return {}
            held[module] = inside[-1]
        return held


def _main(frame: pd.DataFrame, preferred: Mapping[str, object]) -> pd.DataFrame:
    """Rows of the condition that the user asked for, else of the one with the most."""
    conditions = frame.groupby(["corpus", "bos"], observed=True, dropna=False)
    bos = preferred.get("bos")

    def rank(condition: tuple[object, int]) -> tuple[bool, bool, int]:
        asked = isinstance(bos, int) and condition[1] == bos
        return condition[0] == preferred.get("corpus"), asked, len(conditions.indices[condition])

    return conditions.get_group(max(conditions.indices, key=rank)) if len(frame) else frame


def _means(rows: pd.DataFrame, index: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """Means of the rows that share an ``index`` in ``[0, size)``, weighted by count; NaN where there is none."""
    value, count = rows["value"].to_numpy(), rows["count"].to_numpy()
    good = np.isfinite(value)
    # A null count says nothing about weights: such rows count once.
    weight = np.where(count > 0, count, 1)[good].astype(float)
    total = np.bincount(index[good], weights=value[good] * weight, minlength=size)
    weights = np.bincount(index[good], weights=weight, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(weights > 0, total / weights, np.nan)


def part_order(part: str) -> int:
    """Where the modules of a part of an encoder–decoder stand among the others."""
    known = [*_SHORT, ""]
    return known.index(part) if part in known else len(known)


def layer_name(part: str, layer: int) -> str:
    """What a page calls a layer: its number, of an encoder–decoder in its part and with it."""
    return f"{_SHORT[part]} {layer}" if part in _SHORT else str(layer)


def labelled(modules: Sequence[tuple[int, str, str]]) -> list[GridRow]:
    """Columns of a sink map from layers, names and parts of attention modules, in order."""
    layers, parts = [layer for layer, _, _ in modules], [part for _, _, part in modules]
    rows = []
    for number, (layer, module, part) in enumerate(modules):
        # Self- and cross-attention modules may share a number; then only the module's name tells them apart.
        label = str(layer) if layers.count(layer) == 1 or not module else module
        if part in _SHORT:
            label = layer_name(part, parts[:number].count(part))
        rows.append(GridRow(layer, module, label, part))
    return rows


def _read(path: Path) -> pa.Table:
    # Not results.table.read_table: that gives every column as pandas strings, which costs gigabytes for a long sequence.
    if not path.is_file():
        raise InputError(f"{path} is not there; is {path.parent} the output directory of an audit?")
    try:
        missing = COLUMNS.keys() - set(pq.read_schema(path).names)
        if missing:
            raise ResultError(f"{path} does not follow the schema: without {', '.join(sorted(missing))}; measure again")
        return pq.read_table(path, columns=[*_WORDS, *_INTEGERS, "value"], read_dictionary=_WORDS)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ResultError(f"{path} is not a parquet table: {error}") from error


def _frame(table: pa.Table) -> pd.DataFrame:
    """The rows without intervention and policy: words as categories, integers with ``ABSENT`` for null, NaN for no value."""
    is_null = pyarrow.compute.is_null
    table = table.select([*_WORDS, *_INTEGERS, "value"])
    frame = table.filter(pyarrow.compute.and_(is_null(table["intervention"]), is_null(table["policy"]))).to_pandas()
    return frame.fillna(dict.fromkeys(_INTEGERS, ABSENT)).astype(
        {**dict.fromkeys(_WORDS, "category"), **dict.fromkeys(_INTEGERS, np.int64), "value": float}
    )
