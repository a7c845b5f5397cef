"""Numbers of a table by probe, metric, head and position, as the parts of a page ask for them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sinklab.errors import InputError, ResultError
from sinklab.results.table import COLUMNS

CorpusAndBos = tuple[str, int | None]
"""Corpus and how many beginning-of-sequence tokens each sample starts with."""

ABSENT = np.int64(-(2**62))
"""Stands for a null coordinate; -1 is taken by the embedding output."""

_WORDS = ("intervention", "policy", "corpus", "probe", "metric", "module", "unit")
_INTEGERS = ("bos", "layer", "head", "key_position", "count")

CROSS = "cross-attention"
PART = "part"
"""Column that names the part of an encoder–decoder."""

_SHORT = {"encoder": "enc", "decoder": "dec", "cross-attention": "cross"}
"""Parts in the order in which they are shown, and what stands before the number of a layer."""
_KEY_VALUE_HEADS = frozenset({"key_norm", "value_norm"})


@dataclasses.dataclass(frozen=True)
class MetricRows:
    """The rows of one metric under one condition; null coordinates are ``ABSENT``.

    Attributes:
        layer, head, position, count: int64 ``(n,)``.
        module: int64 ``(n,)``: number of the module's name, -1 for null.
        value: float64 ``(n,)``.
        unit: the unit of the first row.
    """

    layer: NDArray[np.int64]
    head: NDArray[np.int64]
    position: NDArray[np.int64]
    count: NDArray[np.int64]
    module: NDArray[np.int64]
    value: NDArray[np.float64]
    unit: str

    def where(self, keep: NDArray[np.bool_]) -> MetricRows:
        """The rows for which ``keep`` is true."""
        integers = {name: getattr(self, name)[keep] for name in ("layer", "head", "position", "count", "module")}
        return MetricRows(**integers, value=self.value[keep], unit=self.unit)

    def mean(self, index: NDArray[np.int64], size: int) -> NDArray[np.float64]:
        """Means of the rows that share an ``index`` in ``[0, size)``, weighted by count; NaN where there is none."""
        good = np.isfinite(self.value)
        # A null count says nothing about weights: such rows count once.
        weight = np.where(self.count > 0, self.count, 1)[good].astype(float)
        total = np.bincount(index[good], weights=self.value[good] * weight, minlength=size)
        weights = np.bincount(index[good], weights=weight, minlength=size)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(weights > 0, total / weights, np.nan)


@dataclasses.dataclass(frozen=True)
class GridRow:
    """One attention module: a column of the sink map."""

    layer: int
    module: str
    label: str
    part: str = ""


class Numbers:
    """The numbers of ``table.parquet`` that were measured without intervention and without a cache policy.

    Args:
        source: path of the table, or the table itself.
        preferred: settings of the run, which name the main condition.
        part: of an encoder–decoder, whose numbers to take; those of all parts where it is empty.

    Raises:
        InputError: no such file.
        ResultError: the file is not a table of the schema.
    """

    def __init__(self, source: Path | pa.Table, preferred: Mapping[str, Any], part: str = "") -> None:
        table = source if isinstance(source, pa.Table) else _read(source)
        words = {name: _codes(table[name]) for name in (*_WORDS, PART)}
        natural = (words["intervention"][0] < 0) & (words["policy"][0] < 0)
        codes, names = words[PART]
        if part:
            natural &= codes == (names.index(part) if part in names else len(names))
        self._parts = dict(zip(words["module"][0].tolist(), codes.tolist(), strict=True)) if names else {}
        self._part, self._part_names = part, names
        integers = {name: _integers(table[name]) for name in _INTEGERS}
        value = table["value"].combine_chunks().cast(pa.float64()).fill_null(math.nan).to_numpy(zero_copy_only=False)

        # One sort by condition, probe and metric makes every question below a slice, also with ten million rows.
        keys = [words["corpus"], _codes(table["bos"]), words["probe"], words["metric"]]
        key = np.zeros(table.num_rows, dtype=np.int64)
        for codes, names in keys:
            key *= len(names) + 1
            key += codes
            key += 1
        chosen = np.flatnonzero(natural)
        occurring = np.flatnonzero(np.bincount(key[chosen]))
        dense = np.zeros(int(occurring.max(initial=0)) + 1, dtype=np.int16)
        dense[occurring] = np.arange(len(occurring))
        # Stable and of 16 bits, numpy's sort is a radix sort: linear, and rows of one metric keep their order.
        short = dense[key[chosen]]
        order = chosen[np.argsort(short, kind="stable")]
        starts = np.r_[0, np.cumsum(np.bincount(short, minlength=len(occurring)))]
        self._columns = (integers["layer"], integers["head"], integers["key_position"], integers["count"])
        self._value, self._unit = value, words["unit"]
        self._module, self._module_names = words["module"]
        self._slices: dict[tuple[CorpusAndBos, str, str], NDArray[np.int64]] = {}
        for start, stop in itertools.pairwise(starts):
            if start == stop:
                continue
            first = order[start]
            bos = int(integers["bos"][first])
            condition = (_word(words["corpus"], first), None if bos == ABSENT else bos)
            self._slices[condition, _word(words["probe"], first), _word(words["metric"], first)] = order[start:stop]
        self.conditions: list[CorpusAndBos] = list(dict.fromkeys(key[0] for key in self._slices))
        self.main: CorpusAndBos | None = self._choose_main(preferred)
        self.grid: list[GridRow] = []
        self.num_heads = 0
        self._lay_grid()
        # Attention modules are numbered among themselves, and blocks among themselves: in a part each begin somewhere.
        self._attention = [module for _, module in self._place]
        self._first = (0, 0)
        if part:
            layer, attention = integers["layer"][chosen], np.isin(self._module[chosen], self._attention)
            first, second = (layer[kind & (layer >= 0)] for kind in (attention, ~attention))
            self._first = int(first.min(initial=2**16)), int(second.min(initial=2**16))
        self._held_in = self._layers_that_attend()

    def rows(self, probe: str, metric: str, condition: CorpusAndBos | None = None) -> MetricRows | None:
        """The rows of a metric, by default under the main condition; ``None`` when it was not measured."""
        condition = condition or self.main
        index = self._slices.get((condition, probe, metric)) if condition else None
        if index is None:
            return None
        layer, head, position, count = (column[index] for column in self._columns)
        return MetricRows(layer, head, position, count, self._module[index], self._value[index], _word(self._unit, index[0]))

    def whole(
        self, probe: str, metric: str, position: int | None = None, condition: CorpusAndBos | None = None
    ) -> float | None:
        """One number for the whole model; with several key positions, the one at ``position``."""
        rows = self.rows(probe, metric, condition)
        if rows is None:
            return None
        keep = (rows.layer == ABSENT) & (rows.head == ABSENT)
        if position is not None:
            keep &= (rows.position == position) | (rows.position == ABSENT)
        value = rows.where(keep).mean(np.zeros(int(keep.sum()), dtype=np.int64), 1)[0]
        return None if np.isnan(value) else float(value)

    def by_position(self, probe: str, metric: str, num_positions: int) -> NDArray[np.float64] | None:
        """The whole model's number at every key position, ``(num_positions,)``; NaN where there is none."""
        rows = self.rows(probe, metric)
        if rows is None:
            return None
        rows = rows.where((rows.layer == ABSENT) & (rows.head == ABSENT) & (rows.position >= 0))
        return rows.mean(rows.position, num_positions) if rows.value.size else None

    def by_head(self, probe: str, metric: str) -> NDArray[np.float64] | None:
        """``(modules, num_heads)``; NaN where there is none; ``None`` when it was not measured per head."""
        rows = self.rows(probe, metric)
        if rows is None:
            return None
        rows = rows.where((rows.head != ABSENT) & (rows.position == ABSENT))
        if not rows.value.size:
            return None
        return rows.mean(self._cells(rows), self.num_cells).reshape(len(self.grid), self.num_heads)

    def by_head_and_position(self, probe: str, metric: str, num_positions: int) -> NDArray[np.float64] | None:
        """``(modules, num_heads, num_positions)``; NaN where there is none; ``None`` when not measured so."""
        rows = self.rows(probe, metric)
        if rows is None:
            return None
        rows = rows.where((rows.head != ABSENT) & (rows.position >= 0))
        if not rows.value.size:
            return None
        index = self._cells(rows) * num_positions + rows.position
        return rows.mean(index, self.num_cells * num_positions).reshape(len(self.grid), self.num_heads, num_positions)

    def by_layer(
        self, probe: str, metric: str, positions: str = "none", sinks: Sequence[int] = (0,)
    ) -> dict[int, float] | None:
        """Layer to number, heads averaged; layers of a part of an encoder–decoder are counted in it, as in maps.

        What was measured of an attention module stands at the layer that holds it, where the table has hidden states of layers:
        not every layer attends, and attention modules are numbered among themselves.

        Of all parts at once it is that of self-attention and of layers: cross-attention is counted by itself, so that a number
        of its layers is that of others, too.

        Args:
            probe, metric: what was measured.
            positions: ``"none"`` for rows without a key position, ``"sink"`` for those at ``sinks``, ``"rest"`` for the mean
                over all other key positions.
            sinks: key positions.
        """
        rows = self.rows(probe, metric)
        if rows is None:
            return None
        there = np.isin(rows.position, sinks)
        chosen = {"none": rows.position == ABSENT, "sink": there}.get(positions, (rows.position != ABSENT) & ~there)
        if not self._part:
            crossing = [module for module in self._parts if module >= 0 and self._part_of(module) == CROSS]
            chosen &= ~np.isin(rows.module, crossing)
        rows = rows.where(chosen & (rows.layer != ABSENT))
        if not rows.value.size:
            return None
        layers, index = np.unique(self._depth(rows), return_inverse=True)
        means = rows.mean(index, len(layers))
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
        """Probe, metric and unit of what was measured per head, at no single position, under the main condition."""
        metrics = []
        for condition, probe, metric in self._slices:
            rows = self.rows(probe, metric) if condition == self.main else None
            if rows is not None and ((rows.head != ABSENT) & (rows.position == ABSENT)).any():
                metrics.append((probe, metric, rows.unit))
        return metrics

    @property
    def num_cells(self) -> int:
        """Number of modules times number of heads."""
        return len(self.grid) * self.num_heads

    @property
    def max_position(self) -> int:
        """The largest key position in the table; -1 when there is none."""
        positions = self._columns[2]
        return int(positions.max(initial=-1))

    def _cells(self, rows: MetricRows) -> NDArray[np.int64]:
        """Index of each row's (module, head) in the sink map, flattened."""
        pairs, inverse = _unique_pairs(rows.layer, rows.module)
        numbers = np.array([self._place[pair] for pair in pairs], dtype=np.int64)
        return numbers[inverse] * self.num_heads + rows.head

    def _choose_main(self, preferred: Mapping[str, object]) -> CorpusAndBos | None:
        """The condition the user asked for, else the one with the most rows."""
        if not self.conditions:
            return None
        sizes = {condition: 0 for condition in self.conditions}
        for key, index in self._slices.items():
            sizes[key[0]] += index.size
        corpus, bos = str(preferred.get("corpus", "")), preferred.get("bos")
        wanted_bos = int(bos) if isinstance(bos, (bool, int)) else None

        def rank(condition: CorpusAndBos) -> tuple[bool, bool, int]:
            same = condition[0] == corpus or (bool(corpus) and Path(condition[0]).name == Path(corpus).name)
            return same, wanted_bos is not None and condition[1] == wanted_bos, sizes[condition]

        return max(self.conditions, key=rank)

    def _lay_grid(self) -> None:
        """The attention modules in the order of their layers, and the largest number of query heads."""
        pairs: dict[tuple[int, int], None] = {}
        for condition, probe, metric in self._slices:
            if condition != self.main or probe in _KEY_VALUE_HEADS:
                continue
            rows = self.rows(probe, metric)
            assert rows is not None
            rows = rows.where((rows.head != ABSENT) & (rows.layer != ABSENT))
            if rows.value.size:
                self.num_heads = max(self.num_heads, int(rows.head.max()) + 1)
                pairs.update(dict.fromkeys(_unique_pairs(rows.layer, rows.module)[0]))
        of = {pair: self._part_of(pair[1]) for pair in pairs}
        ordered = sorted(pairs, key=lambda pair: (part_order(of[pair]), pair[0]))
        self._place = {pair: number for number, pair in enumerate(ordered)}
        names = {pair: self._module_names[pair[1]] if pair[1] >= 0 else "" for pair in ordered}
        self.grid = labelled([(pair[0], names[pair], of[pair]) for pair in ordered])

    def _counted_in_part(self, rows: MetricRows) -> NDArray[np.int64]:
        """Layers of the rows; those of a part from its first on: the table numbers a decoder's behind the encoder's."""
        first = np.where(np.isin(rows.module, self._attention), *self._first)
        # What enters the first layer (-1) stays in front of it.
        return np.where(rows.layer >= 0, rows.layer - first, rows.layer)

    def _depth(self, rows: MetricRows) -> NDArray[np.int64]:
        """Where the rows stand over depth; see :meth:`by_layer`."""
        depths = self._counted_in_part(rows)
        for module, layer in self._held_in.items():
            depths[rows.module == module] = layer
        return depths

    @property
    def skips_layers(self) -> bool:
        """Whether attention modules have other numbers than the layers that hold them."""
        numbers = {module: layer - self._first[0] for layer, module in self._place}
        return any(numbers[module] != layer for module, layer in self._held_in.items())

    def _layers_that_attend(self) -> dict[int, int]:
        """Attention module to the layer that holds it, counted in the part; none where that is not known of all."""
        rows = self.rows("hidden_norm", "hidden_norm")
        if rows is None:
            return {}
        rows = rows.where((rows.layer >= 0) & (rows.module >= 0))
        modules, at = np.unique(rows.module, return_index=True)
        layers = {
            self._module_names[module]: int(layer)
            for module, layer in zip(modules.tolist(), self._counted_in_part(rows)[at].tolist(), strict=True)
        }
        held = {}
        for module in self._attention:
            name, call, run = (self._module_names[module] if module >= 0 else "").partition("#")
            owners = itertools.accumulate(name.split("."), "{}.{}".format)
            inside = [layers[owner + call + run] for owner in owners if owner + call + run in layers]
            if not inside:
                return {}
            held[module] = inside[-1]
        return held

    def _part_of(self, module: int) -> str:
        code = self._parts.get(module, -1)
        return self._part_names[code] if code >= 0 else ""


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
        table = pq.read_table(path, columns=[*_WORDS, PART, *_INTEGERS, "value"], read_dictionary=[*_WORDS, PART])
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ResultError(f"{path} is not a parquet table: {error}") from error
    return table


def _codes(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """A column as numbers into a list of its different values; -1 for null."""
    if column.null_count == len(column):
        return np.full(len(column), -1, dtype=np.int32), []
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    array = column.unify_dictionaries().combine_chunks()
    return _filled(array.indices, -1), [str(word) for word in array.dictionary.to_pylist()]


def _word(column: tuple[NDArray[np.int64], list[str]], row: int) -> str:
    codes, names = column
    return names[codes[row]] if codes[row] >= 0 else ""


def _integers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    if column.null_count == len(column):
        return np.full(len(column), ABSENT)
    return _filled(column.combine_chunks(), int(ABSENT))


def _filled(array: pa.Array, null: int) -> NDArray[Any]:
    # Filling copies; with ten million rows most columns have nothing to fill.
    return (array.fill_null(null) if array.null_count else array).to_numpy(zero_copy_only=False)


def _unique_pairs(layers: NDArray[np.int64], modules: NDArray[np.int64]) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
    """The different (layer, module) pairs in the order of their first appearance, and each row's place among them."""
    keys = layers * (modules.max(initial=0) + 2) + modules
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return [(int(layers[i]), int(modules[i])) for i in first[order]], rank[inverse]
