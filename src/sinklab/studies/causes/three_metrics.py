"""Three metrics side by side: attention on the sink, size of outliers, and how much the loss needs the sink."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.accumulate import documents_of
from sinklab.attention.call import AttentionCall, LayerOutput, Site, Statistics, run_of
from sinklab.attention.forward_arguments import lean_arguments
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.probes.outliers import LAYER_KURTOSIS
from sinklab.results.intervals import Interval, means_over_items
from sinklab.results.metric import FRACTION, Coordinates, Metric, Row
from sinklab.results.naming import counted
from sinklab.sinks import Head, Sinks
from sinklab.studies.causes._runs import known_place
from sinklab.studies.causes.effects import Effects
from sinklab.studies.causes.finding import ExperimentResult, head_rows, number, plain
from sinklab.studies.causes.samples import Samples

__all__ = ["Correlation", "ThreeMetrics", "three_metrics"]

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

RESAMPLES = 2_000
LEAST_ITEMS = 8
"""Heads (layers) from which on a correlation has an interval. Of three unrelated numbers every third draw is in perfect order,
and resampled it stays so: such intervals leave out 0 for three items in 34 % of cases, for five in 10, from eight on in 3 to 5.
Where the correlation is 0.89, they hold it for six items in 84 % and for eight in 96."""


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of two metrics, with its bootstrap interval; NaN where one of them does not vary, and for
    fewer than three items. The ends of the interval are NaN for fewer than :data:`LEAST_ITEMS`, too.

    Attributes:
        over: ``heads`` or ``layers``.
        items: how many of them have both numbers.
    """

    first: str
    second: str
    over: str
    rho: float
    low: float
    high: float
    items: int

    @property
    def reading(self) -> str:
        """``together``, ``opposed``, ``no clear relation``, or ``too few to tell`` where there is no interval for that."""
        if self.items < LEAST_ITEMS:
            return "too few to tell"
        return "together" if self.low > 0 else "opposed" if self.high < 0 else "no clear relation"

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**plain(dataclasses.asdict(self)), "reading": self.reading}


@dataclasses.dataclass(frozen=True)
class ThreeMetrics(ExperimentResult):
    """What :func:`three_metrics` found. All arrays are float64; NaN where a number does not exist.

    Attributes:
        by_head: ``(heads,)`` each: ``concentration``, mean share of a row on the sink; ``outliers``, kurtosis of what the head
            writes to the residual stream; ``need of the sink``, loss change from hiding it; ``use of the head``, loss change
            from redirecting the head to it; only those that were measured.
        by_layer: ``(layers,)`` each: ``concentration`` and the needs as means over the heads of the layer; ``outliers``,
            largest |h| over median |h| after the layer; ``kurtosis`` of the same hidden state.
        layers: the layers that hold these heads.
        quiet: heads with their sink there that do not need it: concentration of the threshold or more, and a need whose 95 %
            interval over texts lies below the minimal effect; their concentration is high and their need is not.
        needy: the other way round.
    """

    heads: list[Head]
    by_head: dict[str, np.ndarray]
    layers: list[int]
    by_layer: dict[str, np.ndarray]
    correlations: list[Correlation]
    quiet: list[Head]
    needy: list[Head]
    threshold: float
    minimal_effect: float
    texts: int
    unit: str

    @property
    def statement(self) -> str:
        """Which metrics correlate over heads, and which heads differ in them, in words."""
        parts = []
        for pair in self.correlations:
            if pair.over == "heads":
                result = f"rho {pair.rho:+z.2f} [{pair.low:+z.2f}, {pair.high:+z.2f}], {pair.reading}"
                if pair.items < 3:
                    result = "too few for a correlation"
                elif pair.rho != pair.rho:
                    result = "one of them does not vary"
                elif pair.items < LEAST_ITEMS:
                    result = f"rho {pair.rho:+z.2f}, {pair.reading}"
                parts.append(f"{pair.first} and {pair.second} over {counted(pair.items, 'head')}: {result}")
        if self.quiet:
            words = (
                f"give the sink {self.threshold:g} or more and lose less than {self.minimal_effect:g} {self.unit} without it"
            )
            parts.append(f"heads that {words}: {', '.join(map(str, self.quiet))}")
        if self.needy:
            words = (
                f"give the sink less than {self.threshold:g} and lose {self.minimal_effect:g} {self.unit} or more without it"
            )
            parts.append(f"heads that {words}: {', '.join(map(str, self.needy))}")
        return "; ".join(parts) + "."

    def to_dict(self) -> dict[str, object]:
        def by(items: Sequence[object], columns: dict[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
            return {
                str(item): {name: number(values[index]) for name, values in columns.items()} for index, item in enumerate(items)
            }

        fields = {name: value for name, value in super().to_dict().items() if name not in ("by_head", "by_layer")}
        correlations = [correlation.to_dict() for correlation in self.correlations]
        heads, layers = by(self.heads, self.by_head), by(self.layers, self.by_layer)
        return {**fields, "heads": heads, "layers": layers, "correlations": correlations}

    def rows(self) -> Iterator[Row]:
        """Rows of the long table."""
        common: Coordinates = {"probe": "causes_read_outs", "count": self.texts}
        for name, values in self.by_head.items():
            yield from head_rows(self._metric(BY_HEAD[name]), self.heads, values, **common)
        for name, values in self.by_layer.items():
            for layer, value in zip(self.layers, values.tolist(), strict=True):
                if number(value) is not None:
                    yield {**common, "layer": layer, "metric": self._metric(BY_LAYER[name]), "value": value}
        for pair in self.correlations:
            for bound in ("rho", "low", "high"):
                value = getattr(pair, bound)
                if number(value) is not None:
                    both = f"{pair.first}_{pair.second}".replace(" ", "_")
                    metric = CORRELATION.named(f"{bound}_{both}_over_{pair.over}")
                    yield {**common, "count": pair.items, "metric": metric, "value": value}

    def _metric(self, metric: Metric) -> Metric:
        return metric.of(self.unit) if metric.unit == "nats" else metric


NEEDS = {"hide": "need of the sink", "redirect": "use of the head"}
"""Edit of the effects to the metric that it gives."""


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
        ConfigurationError: no sink, effects with neither variant, or of a head that the sink was not measured in.
    """
    known_place(sinks, samples, "comparing metrics by head")
    needs = {name: variant for variant, name in NEEDS.items() if variant in effects.variants}
    if not needs:
        raise ConfigurationError(
            f"usefulness is the effect of 'hide' or 'redirect', and the effects have {', '.join(effects.variants) or 'none'}"
        )
    order = {head: index for index, head in enumerate(sinks.heads)}
    strangers = [head for head in effects.heads if head not in order]
    if strangers:
        raise ConfigurationError(f"effects were measured in head {strangers[0]}, which the sink was not looked for in")
    probe = _Outliers()
    with attend(model, [probe]):
        for _, part in samples.parts(batch_size):
            model(**lean_arguments(model, part.inputs))
    located = [sinks.heads[order[head]] for head in effects.heads]
    by_head = {
        "concentration": np.array([sinks.weights[order[head]] for head in effects.heads]),
        "outliers": np.array([probe.head(head) for head in located]),
        **{name: _mean(effects.of(variant), (1, 2)) for name, variant in needs.items()},
    }
    layers, by_layer = _by_layer(probe, located, by_head)
    quiet, needy = _off_expectation(effects, by_head["concentration"] >= threshold, minimal_effect)
    return ThreeMetrics(
        heads=list(effects.heads),
        by_head=by_head,
        layers=layers,
        by_layer=by_layer,
        correlations=[*_correlations(by_head, "heads"), *_correlations(by_layer, "layers")],
        quiet=quiet,
        needy=needy,
        threshold=threshold,
        minimal_effect=minimal_effect,
        texts=len(samples),
        unit=effects.unit,
    )


def _off_expectation(effects: Effects, has_sink: np.ndarray, minimal_effect: float) -> tuple[list[Head], list[Head]]:
    """Heads with a sink that they do not need, and heads without one that lose where it is hidden.

    Both are empty where it was not hidden.
    """
    if "hide" not in effects.variants:
        return [], []
    needs = list(zip(effects.heads, has_sink, _intervals(effects), strict=True))
    quiet = [head for head, sinks, need in needs if sinks and need.high < minimal_effect]
    needy = [head for head, sinks, need in needs if not sinks and need.low >= minimal_effect]
    return quiet, needy


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


def _intervals(effects: Effects) -> list[Interval]:
    """What hiding the sink costs each head, with its interval over texts; a text counts by the mean over its domains."""
    by_text = _mean(effects.of("hide"), 2)
    return means_over_items(by_text[:, ~np.isnan(by_text).any(0)])


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

    kinds = {"concentration": 0, "outliers": 1, "kurtosis": 1}
    listed = []
    for first, second in itertools.combinations(values, 2):
        if kinds.get(first, 2) == kinds.get(second, 2):
            continue
        both = ~(np.isnan(values[first]) | np.isnan(values[second]))
        left, right = values[first][both], values[second][both]
        rho = low = high = float("nan")
        if len(left) > 2 and np.ptp(left) and np.ptp(right):
            rho = float(scipy.stats.spearmanr(left, right).statistic)
            if len(left) >= LEAST_ITEMS:
                low, high = np.nanquantile(_resampled(left, right), [0.025, 0.975])
        listed.append(Correlation(first, second, over, rho, float(low), float(high), len(left)))
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
