"""Three metrics side by side: attention on the sink, size of outliers, and how much the loss needs the sink."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, LayerOutput, Site, Statistics, run_of
from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.probe import Watcher, documents_of
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.probes.outliers import LAYER_KURTOSIS
from sinklab.results.intervals import means_over_items
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes import experiment
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.found import Correlation, ThreeMetrics
from sinklab.studies.causes.samples import Samples

__all__ = ["rows", "three_metrics"]

BY_HEAD: dict[str, Metric] = {
    "concentration": Metric(
        "concentration",
        "fraction",
        "sink_share, over all texts: mean share of a row on the sink, over the queries that see it and do not stand on it.",
        range=FRACTION,
    ),
    "outliers": Metric("outliers", "ratio", "Mean over texts of the kurtosis of what the head writes to the residual stream."),
    "need of the sink": Metric("need_of_the_sink", "nats", "Mean over texts of the change of the loss from hiding the sink."),
    "use of the head": Metric("use_of_the_head", "nats", "The same from redirecting all weight of the head to the sink."),
}
BY_LAYER: dict[str, Metric] = {
    "concentration": Metric(
        "layer_concentration", "fraction", "Mean of concentration over the heads of the layer.", range=FRACTION
    ),
    "outliers": Metric("layer_outliers", "ratio", "Mean over texts of the largest |h| over the median |h| after the layer."),
    "need of the sink": Metric("layer_need_of_the_sink", "nats", "Mean of need_of_the_sink over the heads of the layer."),
    "use of the head": Metric("layer_use_of_the_head", "nats", "Mean of use_of_the_head over the heads of the layer."),
    "kurtosis": LAYER_KURTOSIS,
}
CORRELATION = Metric(
    "rank_correlation", "correlation", "Spearman's rank correlation of two of these numbers, or an end of its interval."
)
NEEDS = {"hide": "need of the sink", "redirect": "use of the head"}
"""Edit of the effects to the metric that it gives."""
KINDS = {"concentration": 0, "outliers": 1, "kurtosis": 1}
"""Metrics of one number are not correlated with each other; all others are uses."""

RESAMPLES = 2_000
LEAST_ITEMS = 8
"""Heads (layers) from which on a correlation has an interval. Of three unrelated numbers every third draw is in perfect order,
and resampled it stays so: such intervals leave out 0 for three items in 34 % of cases, for five in 10, from eight on in 3 to 5.
Where the correlation is 0.89, they hold it for six items in 84 % and for eight in 96."""


@torch.no_grad()
def three_metrics(
    model: nn.Module,
    samples: Samples,
    sinks: Sinks,
    effects: Effects,
    *,
    threshold: float = 0.3,
    minimal_effect: float = 0.01,
    batch_size: int = 16,
) -> ThreeMetrics:
    """Set concentration, outliers and usefulness side by side, with their rank correlations over heads and over layers.

    Weight concentration, activation outliers and functional usefulness are related and not the same: norms at the ends of
    sublayers bound outliers and leave sinks (Sun et al. 2026, arXiv 2603.05498), softmax plus one takes sinks away and leaves
    outliers (Kaul et al. 2024, arXiv 2410.17174), gates on values shrink activations and leave sinks (Qiu et al. 2025, arXiv
    2505.06708). The 95 % interval of a correlation resamples heads (layers), 2,000 times; of fewer than eight there is none.

    Args:
        samples: for the outliers.
        sinks: its ``weights`` are the concentration.
        effects: with the variants ``hide`` or ``redirect`` or both; means are taken over texts and domains.
        threshold: concentration from which on a head has its sink there.
        minimal_effect: change of the loss that counts as a need, in the unit of the effects.

    Raises:
        ConfigurationError: no sink, or effects with neither variant.
    """
    experiment.known_place(sinks, samples, "comparing metrics by head")
    needs = {name: variant for variant, name in NEEDS.items() if variant in effects.variants}
    if not needs:
        raise ConfigurationError(
            f"usefulness is the effect of 'hide' or 'redirect', and the effects have {', '.join(effects.variants) or 'none'}"
        )
    probe = _Outliers()
    with attend(model, [probe]):
        for _, part in samples.parts(batch_size):
            model(**lean_arguments(model, part.inputs))
    order = {head: index for index, head in enumerate(sinks.heads)}
    located = [sinks.heads[order[head]] for head in effects.heads]
    by_head = {
        "concentration": np.array([sinks.weights[order[head]] for head in effects.heads]),
        "outliers": np.array([probe.head(head) for head in located]),
        **{name: _mean(effects.of(variant), (1, 2)) for name, variant in needs.items()},
    }
    layers, by_layer = _by_layer(probe, located, by_head)
    quiet, needy = _off_expectation(effects, by_head["concentration"] >= threshold, minimal_effect)
    correlations = [*_correlations(by_head, "heads"), *_correlations(by_layer, "layers")]
    return ThreeMetrics(
        _items(effects.heads, by_head), _items(layers, by_layer), correlations, quiet, needy, threshold, minimal_effect,
        len(samples), effects.unit, {name: BY_HEAD[name].text for name in by_head},
    )  # fmt: skip


def rows(found: ThreeMetrics, heads: Mapping[str, Head]) -> Iterator[Row]:
    """Rows of the long table; ``heads`` by their names."""
    common: Coordinates = {"probe": "causes_read_outs", "count": found.texts}

    def metric(declared: Metric) -> Metric:
        return declared.of(found.unit) if declared.unit == "nats" else declared

    for name in BY_HEAD:
        own = {heads[head]: values[name] for head, values in found.heads.items() if name in values}
        yield from experiment.head_rows(metric(BY_HEAD[name]), own, own.values(), **common)
    for layer, values in found.layers.items():
        for name, value in values.items():
            if value is not None:
                yield {**common, "layer": int(layer), "metric": metric(BY_LAYER[name]), "value": value}
    for pair in found.correlations:
        both = f"{pair.first}_{pair.second}".replace(" ", "_")
        for bound, value in (("rho", pair.rho), ("low", pair.low), ("high", pair.high)):
            if value is not None:
                named = CORRELATION.named(f"{bound}_{both}_over_{pair.over}")
                yield {**common, "count": pair.items, "metric": named, "value": value}


def _items(items: Sequence[object], columns: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    return {
        str(item): {name: experiment.number(values[index]) for name, values in columns.items()}
        for index, item in enumerate(items)
    }


def _off_expectation(effects: Effects, has_sink: np.ndarray, minimal_effect: float) -> tuple[list[str], list[str]]:
    """Heads with a sink that they do not need, and heads without one that lose where it is hidden; none where it was not."""
    if "hide" not in effects.variants:
        return [], []
    by_text = _mean(effects.of("hide"), 2)  # a text counts by the mean over its domains
    intervals = means_over_items(by_text[:, ~np.isnan(by_text).any(0)])
    needs = list(zip(map(str, effects.heads), has_sink, intervals, strict=True))
    quiet = [head for head, sinks, need in needs if sinks and need.high < minimal_effect]
    return quiet, [head for head, sinks, need in needs if not sinks and need.low >= minimal_effect]


def _by_layer(
    probe: _Outliers, heads: Sequence[Head], by_head: Mapping[str, np.ndarray]
) -> tuple[list[int], dict[str, np.ndarray]]:
    """The layers that hold some heads, and their metrics: outliers after the layer, of others the mean over its heads."""
    inside = {
        site: [index for index, head in enumerate(heads) if head.module in layer.modules]
        for site, layer in probe.layers.items()
    }
    sites = [site for site, members in inside.items() if members]
    by_layer = {
        name: np.array([_mean(values[inside[site]], 0) for site in sites])
        for name, values in by_head.items()
        if name != "outliers"
    }
    by_layer["outliers"] = np.array([_mean(np.array(probe.layers[site].peaks), 0) for site in sites])
    by_layer["kurtosis"] = np.array([np.mean(probe.layers[site].kurtosis) for site in sites])
    return [site.layer for site in sites], by_layer


@dataclasses.dataclass
class _Layer:
    """Of each text largest over median size, and kurtosis, of the hidden states after a layer; names of the runs of attention
    modules inside it."""

    modules: set[str] = dataclasses.field(default_factory=set)
    peaks: list[float] = dataclasses.field(default_factory=list)
    kurtosis: list[float] = dataclasses.field(default_factory=list)


class _Outliers(Watcher):
    """Outliers of the hidden states after each layer, and of what each head adds to the residual stream."""

    name, needs = "outliers_by_head", frozenset({"hidden_states", "head_outputs", "gated_heads"})

    def __init__(self) -> None:
        self.layers: dict[Site, _Layer] = {}
        self.heads: dict[tuple[str, int], list[float]] = {}
        self._called: list[str] = []
        self._at_gate: dict[str, AttentionCall] = {}

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind == "heads":
            call = self._at_gate.pop(output.site.module, None)
            if call is not None and call.head_outputs is not None:
                self._write(call, output.hidden_states.reshape(call.head_outputs.shape))
        if output.kind != "layer" or output.site.layer < 0:
            return
        layer = self.layers.setdefault(output.site, _Layer())
        owner = f"{run_of(output.site.module)[0]}."
        # An attention module that layers share stands in the first of them by its name, and runs in the others too.
        layer.modules.update(name for name in self._called if name.startswith(owner) or run_of(name)[1])
        self._called.clear()
        for row, inside in documents_of(output):
            sizes = output.hidden_states[row][inside].double().abs()
            if median := float(sizes.median()):
                layer.peaks.append(float(sizes.max()) / median)
            layer.kurtosis.append(_kurtosis(output.hidden_states[row][inside]))

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self":
            return
        self._called.append(call.site.module)
        if call.site.gated:
            self._at_gate[call.site.module] = call
        elif call.head_outputs is not None:
            self._write(call, call.head_outputs)

    def _write(self, call: AttentionCall, outputs: Tensor) -> None:
        if call.projection is None:
            return
        maps = call.projection.unflatten(1, (call.num_heads, -1))
        for row, asked in enumerate(call.counted):
            for head in range(call.num_heads):
                written = outputs[row, asked, head] @ maps[:, head].T.to(outputs)
                self.heads.setdefault((call.site.module, head), []).append(_kurtosis(written))

    def head(self, head: Head) -> float:
        """Mean over texts of the kurtosis of what a head writes; NaN where its output map is not known."""
        return float(_mean(np.array(self.heads.get((head.module, head.head), [np.nan])), 0))


def _kurtosis(values: Tensor) -> float:
    """``E[(x - mean)^4] / variance^2`` of all numbers; NaN where they are all the same."""
    centred = values.double() - values.double().mean()
    variance = float(centred.square().mean())
    return float(centred.pow(4).mean()) / variance**2 if variance else float("nan")


def _correlations(values: dict[str, np.ndarray], over: str) -> list[Correlation]:
    """Of all pairs of metrics but those of one kind: the two of outliers, the two of usefulness."""
    import scipy.stats

    listed = []
    for first, second in itertools.combinations(values, 2):
        if KINDS.get(first, 2) == KINDS.get(second, 2):
            continue
        both = ~(np.isnan(values[first]) | np.isnan(values[second]))
        left, right = values[first][both], values[second][both]
        rho = low = high = float("nan")
        if len(left) > 2 and np.ptp(left) and np.ptp(right):
            rho = float(scipy.stats.spearmanr(left, right).statistic)
            if len(left) >= LEAST_ITEMS:
                low, high = np.nanquantile(_resampled(left, right), [0.025, 0.975])
        reading = "together" if low > 0 else "opposed" if high < 0 else "no clear relation"
        reading = reading if len(left) >= LEAST_ITEMS else "too few to tell"
        listed.append(
            Correlation(
                first, second, over, experiment.number(rho), experiment.number(low), experiment.number(high), len(left), reading
            )
        )
    return listed


def _resampled(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's correlation of each bootstrap resample, ``(resamples,)``; NaN where one of the two does not vary in it."""
    import scipy.stats

    items = len(first)
    counts = np.random.default_rng(0).multinomial(items, np.full(items, 1 / items), size=RESAMPLES)
    drawn = np.tile(np.arange(items), RESAMPLES).repeat(counts.ravel()).reshape(RESAMPLES, items)
    left, right = (scipy.stats.rankdata(values[drawn], axis=1) - (items + 1) / 2 for values in (first, second))
    size = np.sqrt((left**2).sum(1) * (right**2).sum(1))
    return np.where(size > 0, (left * right).sum(1) / np.where(size > 0, size, 1.0), np.nan)


def _mean(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Mean of the numbers that exist; NaN, without a warning, where none does."""
    counts = (~np.isnan(values)).sum(axis=axis)
    return np.asarray(np.where(counts > 0, np.nansum(values, axis=axis) / np.maximum(counts, 1), np.nan))
