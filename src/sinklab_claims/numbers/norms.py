"""How the first token stands out in a trained model: norms and angles."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from sinklab.attention.probe import Probe
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.key_norm import KeyNorm
from sinklab.probes.massive_activation import MassiveActivation
from sinklab.probes.query_key_angle import QueryKeyAngle
from sinklab.probes.value_norm import ValueNorm
from sinklab.registry import read_outs
from sinklab.results.intervals import just_above
from sinklab.results.metric import VALUE_RATIO, Metric
from sinklab.results.table import unpacked
from sinklab_claims.contract.trained import MeasuredModel, gives, once
from sinklab_claims.numbers.attention import THRESHOLD, FirstToken, first_rows, look

_OTHERS = "over the mean at all later positions"
_SINK_HEADS = f"heads whose first_attention exceeds {THRESHOLD}; absent without such heads"

NORMS = (
    Metric(
        "hidden_ratio",
        "ratio",
        f"Mean L2 norm of the hidden state of the first token {_OTHERS}; largest over layer outputs, the last before "
        "the final norm (Gu et al. 2024, arXiv 2410.10781).",
    ),
    Metric(
        "massive_ratio",
        "ratio",
        "Largest |x| over the median |x| of the hidden state of a row, mean over rows; largest over the outputs of the layers "
        "(Sun et al. 2024, arXiv 2402.17762).",
    ),
    Metric("key_ratio", "ratio", f"L2 norm of the key of the first token {_OTHERS}; mean over key-value heads."),
    VALUE_RATIO,
    Metric("key_ratio_sink", "ratio", f"key_ratio of the {_SINK_HEADS}."),
    Metric("value_ratio_sink", "ratio", f"value_ratio of the {_SINK_HEADS}."),
    Metric("cosine_first", "cosine", f"Mean cos(q, k) of the first key and the queries that see it, over the {_SINK_HEADS}."),
    Metric(
        "cosine_other", "cosine", f"Mean cos(q, k) of all later keys and the queries that see them, over the {_SINK_HEADS}."
    ),
)
"""Metrics. Keys and queries are those that the scores see, after rotary embedding and feature maps."""

Curves = dict[tuple[int, int], dict[int, tuple[float, int]]]
"""Layer and head to position to value and number of observations."""


@read_outs.register("norms")
@gives(*NORMS)
def norms(trained: MeasuredModel) -> dict[str, float]:
    """How the first token stands out in a trained model: large hidden states, small keys and values, and the angle.

    Numbers of :data:`NORMS` on 100 held-out rows of 64 tokens (fewer where there are not so many), as in training.

    Learned tokens that the model puts in front are neither the first token nor one of the others, but for ``massive_ratio``.
    """
    seen = _seen(trained)
    numbers = {"hidden_ratio": max(seen.ratios["hidden"].values()), "massive_ratio": seen.massive}
    sinks = _sink_heads(seen.weights)
    for name in ("key", "value"):
        ratios = seen.ratios[name]
        numbers[f"{name}_ratio"] = statistics.fmean(ratios.values())
        if sinks:
            groups = len(seen.weights[0]) // (1 + max(head for _, head in ratios))
            numbers[f"{name}_ratio_sink"] = statistics.fmean(ratios[layer, head // groups] for layer, head in sinks)
    if sinks:
        numbers["cosine_first"], numbers["cosine_other"] = (
            statistics.fmean(seen.cosines[cell][which] for cell in sinks) for which in (0, 1)
        )
    return numbers


def norms_by_layer(trained: MeasuredModel) -> dict[str, dict[str, float]]:
    """Of every layer the ratios, the angles and the weight of the first token, means over its heads: ``layer 3`` to numbers."""
    seen, layers = _seen(trained), dict[str, dict[str, float]]()
    for layer, weights in seen.weights.items():
        numbers = {"first_attention": float(weights.mean())}
        for name, ratios in seen.ratios.items():
            own = [ratio for (of_layer, _), ratio in ratios.items() if of_layer == layer]
            numbers |= {f"{name}_ratio": statistics.fmean(own)} if own else {}
        angles = [pair for (of_layer, _), pair in seen.cosines.items() if of_layer == layer]
        for which, name in enumerate(("cosine_first", "cosine_other")):
            numbers[name] = statistics.fmean(pair[which] for pair in angles)
        layers[f"layer {layer}"] = numbers
    return layers


class _Seen(NamedTuple):
    """Ratios by ``hidden``, ``key`` and ``value`` and by layer and head; cosines of the first key and of others; weights."""

    ratios: dict[str, dict[tuple[int, int], float]]
    massive: float
    cosines: dict[tuple[int, int], tuple[float, float]]
    weights: dict[int, Tensor]


@once
def _seen(trained: MeasuredModel) -> _Seen:
    front = trained.front
    hidden, massive, keys, values, angle = HiddenNorm(), MassiveActivation(), KeyNorm(), ValueNorm(), QueryKeyAngle()
    first = FirstToken(front)
    look(trained.loaded.model, first_rows(trained), (hidden, massive, keys, values, angle, first))
    ratios = {
        name: {cell: _first_to_others(curve, front) for cell, curve in _curves(probe, f"{name}_norm").items()}
        for name, probe in (("hidden", hidden), ("key", keys), ("value", values))
    }
    largest = max(row["value"] for row in unpacked(massive.rows()) if row["metric"] == "max_to_median" and row["layer"] >= 0)
    cosines = {cell: (curve[front][0], _mean_of_others(curve, front)) for cell, curve in _curves(angle, "cosine").items()}
    return _Seen(ratios, largest, cosines, first.by_head())


def _curves(probe: Probe, metric: str) -> Curves:
    """What a probe says of each position; head 0 where it knows of none; without the embeddings, layer -1."""
    curves: Curves = defaultdict(dict)
    for row in unpacked(probe.rows()):
        if row["metric"] == metric and row["layer"] >= 0:
            curves[row["layer"], row.get("head", 0)][row["key_position"]] = (row["value"], row["count"])
    return curves


def _first_to_others(curve: dict[int, tuple[float, int]], front: int) -> float:
    return curve[front][0] / _mean_of_others(curve, front)


def _mean_of_others(curve: dict[int, tuple[float, int]], front: int) -> float:
    return _weighted(entry for position, entry in curve.items() if position > front)


def _weighted(entries: Iterable[tuple[float, int]]) -> float:
    pairs = list(entries)
    return sum(value * count for value, count in pairs) / sum(count for _, count in pairs)


def _sink_heads(weights: dict[int, Tensor]) -> list[tuple[int, int]]:
    """Layer and query head whose mean weight on the first token exceeds the threshold."""
    return [
        (layer, head)
        for layer, of_layer in weights.items()
        for head, weight in enumerate(of_layer.tolist())
        if weight > just_above(THRESHOLD)
    ]
