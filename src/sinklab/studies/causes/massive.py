"""Massive activations: where they are born and die, and what zeroing them costs, against what their mean costs."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import LayerOutput
from sinklab.attention.intervention import HiddenIntervention, Intervention
from sinklab.attention.probe import Probe, Watcher
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.results.metric import Coordinates, Metric, Row
from sinklab.sinks import Head, Sinks, SinkWeights
from sinklab.studies.causes import experiment
from sinklab.studies.causes.found import Activation, Massive, MassiveEdit
from sinklab.studies.causes.readout import Readout, readout_for
from sinklab.studies.causes.samples import Samples

LARGEST_ACTIVATION = Metric("largest_activation", "norm", "Mean over texts of the largest |x| after the layer.")
LARGEST_TIMES_MEDIAN = Metric(
    "largest_times_median", "ratio", "Mean over texts of the largest over the median |x| after the layer."
)
BORN_VALUE = Metric(
    "massive_born_value", "norm", "Mean over texts, with its sign, of an activation that becomes massive in this layer."
)
BORN_CHANNEL = Metric("massive_born_channel", "index", "Coordinate of the hidden state that holds massive_born_value.")

SUN = (100.0, 1000.0)
"""Size, and times the median, above which Sun et al. 2024 (arXiv 2402.17762) call a value massive."""
CRITERIA = (SUN, (0.0, 50.0))
"""Tried in this order, if none is asked for."""
MOST = 10_000
"""Values of one text after one layer that may meet the criterion: more than a few are not what the word means."""


Seen = dict[tuple[int, int, int], dict[int, tuple[float, float]]]
"""Text, position and channel to layer to value and how many times the median it is."""


def massive_activations(
    model: nn.Module,
    samples: Samples,
    sinks: Sinks | None = None,
    *,
    readout: Readout | None = None,
    least: float | None = None,
    times_median: float | None = None,
    batch_size: int = 16,
    seed: int = 0,
) -> Massive:
    """Find massive activations, then set them to zero and to their mean in the layer of their birth.

    A value is massive if it is larger than ``least`` and at least ``times_median`` times the median size of its hidden
    state, all tokens of one text after one layer. The thresholds of Sun et al. 2024 (arXiv 2402.17762), 100 and 1000, are tried
    first; small models have none by these, and a ratio of 50 alone is tried next. The result names the criterion that it is by.
    Zeroing takes away two things at once, that the values are large and that they are constant, so their mean is always set
    beside it (Owen et al. 2025, arXiv 2503.22329), and as many other channels of the same tokens, drawn at random, set to zero.

    Args:
        samples: two texts or more.
        sinks: where the sink is, to see what becomes of it; ``None``, or a ``place`` of ``None``, to leave that out.
        readout: the loss; that of the model's task by default.
        least, times_median: your own criterion, instead of the two; one that is left out is that of Sun et al.

    Raises:
        ConfigurationError: thresholds that more than 10,000 values of a text meet, or fewer than two texts.
        UnsupportedModelError: no layer was seen.
    """
    own = SUN[0] if least is None else least, SUN[1] if times_median is None else times_median
    criteria = CRITERIA if least is None and times_median is None else (own,)
    readout = readout_for(model) if readout is None else readout
    for criterion in criteria:
        clean, weighed, peaks = _measured(model, samples, readout, experiment.no_edits, criterion, sinks, batch_size)
        layers = sorted({layer for _, probe in peaks for layer in probe.largest})
        if not layers:
            raise UnsupportedModelError(f"{type(model).__name__}: no layer was seen that gives hidden states")
        peaks_seen: Seen = defaultdict(dict)
        for start, probe in peaks:
            for layer, text, position, channel, value, times in probe.hits:
                peaks_seen[start + text, position, channel][layer] = value, times
        if peaks_seen:
            break
    tokens = samples.inputs.get("input_ids")
    ids = None if tokens is None else samples.ids_by_position(max(0, peaks[0][1].length - tokens.shape[1]))
    tests: dict[str, MassiveEdit] = {}
    if peaks_seen:
        width = peaks[0][1].width
        for name in ("zero", "mean", "control"):
            points = _points(peaks_seen, name, len(samples), width, torch.Generator().manual_seed(seed))
            edits = functools.partial(_set_points, points)
            losses, after, _ = _measured(model, samples, readout, edits, criterion, sinks, batch_size)
            loss = experiment.change(losses, clean, "massive activations")
            tests[name] = MassiveEdit(loss, None if after is None else experiment.numbers(after.weights))
    heads, weights = ([], None) if weighed is None else (list(map(str, weighed.heads)), experiment.numbers(weighed.weights))
    return Massive(
        _found(peaks_seen, layers, ids), [_peak(layer, [probe for _, probe in peaks]) for layer in layers], tests, heads,
        weights, float(np.nanmean(clean)), *criterion, len(samples), readout.unit,
    )  # fmt: skip


def rows(found: Massive, heads: Mapping[str, Head]) -> Iterator[Row]:
    """Rows of the long table; ``heads`` by their names."""
    common: Coordinates = {"probe": "causes_massive", "count": found.texts}
    at: Coordinates
    for peak in found.peaks:
        at = {**common, "layer": int(peak["layer"]), "key_position": int(peak["position"])}
        yield {**at, "metric": LARGEST_ACTIVATION, "value": peak["value"]}
        yield {**at, "metric": LARGEST_TIMES_MEDIAN, "value": peak["times_median"]}
    for activation in found.found:
        at = {**common, "layer": activation.birth, "key_position": activation.position, "count": activation.texts}
        yield {**at, "metric": BORN_VALUE, "value": activation.value}
        yield {**at, "metric": BORN_CHANNEL, "value": float(activation.channel)}
    own: list[Head] = [heads[head] for head in found.heads]
    weights: dict[str | None, list[float | None] | None] = {None: found.sink_weights}
    for name, edit in found.edits.items():
        edited = f"massive activations: {name}"
        at = {**common, "intervention": edited}
        yield from experiment.interval_rows(experiment.LOSS_CHANGE.of(found.unit), edit.loss, **at)
        weights[edited] = edit.sink_weights
    for intervention, values in weights.items():
        if values is not None:
            at = {**common, "intervention": intervention}
            yield from experiment.head_rows(experiment.SINK_SHARE, own, values, **at)


def _set_points(points: Mapping[int, Tensor], start: int, stop: int) -> list[Intervention]:
    """Sets the points of a batch, the samples ``start`` to ``stop``; by layer rows of sample, position, channel and value."""
    offset = torch.tensor([start, 0, 0, 0.0], dtype=torch.float64)
    return [
        _SetValues(layers=(layer,), points=inside - offset)
        for layer, of_layer in points.items()
        if len(inside := of_layer[(of_layer[:, 0] >= start) & (of_layer[:, 0] < stop)])
    ]


def _measured(
    model: nn.Module,
    samples: Samples,
    readout: Readout,
    edits: experiment.Edits,
    criterion: tuple[float, float],
    sinks: Sinks | None,
    batch_size: int,
) -> tuple[np.ndarray, Sinks | None, list[tuple[int, _MassivePeaks]]]:
    """Losses ``(samples,)``, the sinks with what every head gives to them now, and the peaks by first sample of the batch."""
    losses, peaks = [], []
    weights = None if sinks is None or sinks.main is None else SinkWeights(sinks)

    def probes(start: int, stop: int) -> list[Probe]:
        peaks.append((start, _MassivePeaks(*criterion)))
        return [peaks[-1][1], *([] if weights is None else [weights])]

    for run in experiment.runs(model, samples, readout, edits, probes=probes, batch_size=batch_size):
        losses.append(run.losses.nanmean(1).numpy())
    return np.concatenate(losses), None if weights is None else weights.completed(), peaks


class _MassivePeaks(Watcher):
    """All values that meet the criterion, and the largest of each layer."""

    name, needs = "massive_peaks", frozenset({"hidden_states"})

    def __init__(self, least: float, times_median: float) -> None:
        self.least, self.times_median = least, times_median
        self.hits: list[tuple[int, int, int, int, float, float]] = []
        self.largest: dict[int, list[tuple[float, float, int, int]]] = {}
        self.length = self.width = 0

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind != "layer":
            return
        layer, width = output.site.layer, output.hidden_states.shape[-1]
        self.length, self.width = output.hidden_states.shape[1:]
        for row, (hidden, positions) in enumerate(zip(output.hidden_states, output.positions, strict=True)):
            own, where = hidden[positions >= 0].double(), positions[positions >= 0]
            sizes = own.abs()
            median = float(sizes.median())
            peak = int(sizes.argmax())
            peak_at = int(where[peak // width]), peak % width
            self.largest.setdefault(layer, []).append((float(sizes.max()), median, *peak_at))
            hits = ((sizes > self.least) & (sizes >= self.times_median * median)).nonzero()
            if len(hits) > MOST:
                raise ConfigurationError(
                    f"{output.site.module}: {len(hits)} values of one text are above {self.least:g} and {self.times_median:g} "
                    f"times the median, and massive ones are few; raise the thresholds"
                )
            for token, channel in hits.tolist():
                value = float(own[token, channel])
                times = abs(value) / median if median else float("inf")
                self.hits.append((layer, row, int(where[token]), channel, value, times))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _SetValues(HiddenIntervention):
    """Set single numbers: ``points`` float64 ``(n, 4)``, row of the batch, position, channel, value."""

    name = "set_values"
    points: Tensor

    def edit_hidden(self, output: LayerOutput) -> Tensor:
        hidden = output.hidden_states.clone()
        rows, positions, channels = self.points[:, :3].long().to(hidden.device).unbind(1)
        tokens = (output.positions[rows] == positions[:, None]).int().argmax(1)
        hidden[rows, tokens, channels] = self.points[:, 3].to(hidden)
        return hidden


def _points(seen: Seen, name: str, texts: int, width: int, generator: torch.Generator) -> dict[int, Tensor]:
    """For each layer of birth what to set: float64 ``(n, 4)``, text, position, channel, value."""
    births = {key: min(layers) for key, layers in seen.items()}
    often = Counter((layer, position, channel) for (_, position, channel), layer in births.items())

    def group(layer: int, position: int, channel: int) -> tuple[int, int | None, int]:
        # A mean of one would be no edit: what stands where few texts have it is of one kind with the like of it elsewhere.
        return layer, position if 2 * often[layer, position, channel] >= texts else None, channel

    values: dict[tuple[int, int | None, int], list[float]] = defaultdict(list)
    for (text, position, channel), layer in births.items():
        values[group(layer, position, channel)].append(seen[text, position, channel][layer][0])
    points: dict[int, list[list[float]]] = defaultdict(list)
    used = defaultdict(set)
    for text, position, channel in seen:
        used[text, position].add(channel)
    for (text, position, channel), layer in births.items():
        value = float(np.mean(values[group(layer, position, channel)])) if name == "mean" else 0.0
        if name == "control":
            free = [other for other in range(width) if other not in used[text, position]]
            if not free:
                raise ConfigurationError(
                    "every channel of a token is massive, so there is none for a control; raise the thresholds"
                )
            channel = free[int(torch.randint(len(free), (), generator=generator))]
            used[text, position].add(channel)
        points[layer].append([text, position, channel, value])
    return {layer: torch.tensor(rows, dtype=torch.float64) for layer, rows in points.items()}


def _found(seen: Seen, layers: Sequence[int], ids: Tensor | None) -> list[Activation]:
    by_place: dict[tuple[int, int], list[tuple[int, dict[int, tuple[float, float]]]]] = defaultdict(list)
    for (text, position, channel), values in seen.items():
        by_place[position, channel].append((text, values))
    activations = []
    for (position, channel), cases in by_place.items():
        tops = np.array([max(values.values(), key=lambda pair: abs(pair[0])) for _, values in cases])
        last = Counter(max(values) for _, values in cases).most_common(1)[0][0]
        own = None if ids is None or position >= ids.shape[1] else ids[[text for text, _ in cases], position]
        activations.append(
            Activation(
                position, channel, birth=Counter(min(values) for _, values in cases).most_common(1)[0][0],
                death=None if last == layers[-1] else layers[layers.index(last) + 1], texts=len(cases),
                value=float(tops[:, 0].mean()), deviation=float(tops[:, 0].std()),
                times_median=experiment.number(tops[:, 1].mean()), token=None if own is None else experiment.most_frequent(own),
            )
        )  # fmt: skip
    return sorted(activations, key=lambda activation: (-activation.texts, -abs(activation.value)))


def _peak(layer: int, probes: Sequence[_MassivePeaks]) -> dict[str, int | float]:
    cases = [case for probe in probes for case in probe.largest.get(layer, ())]
    position, channel = Counter((position, channel) for _, _, position, channel in cases).most_common(1)[0][0]
    largest = float(np.mean([size for size, _, _, _ in cases]))
    times = float(np.mean([size / median for size, median, _, _ in cases if median] or [0.0]))
    return {"layer": layer, "value": largest, "times_median": times, "position": position, "channel": channel}
