"""Sun et al. 2024 (arXiv 2402.17762): zeroing massive activations ruins a model, setting them to their mean does nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import LayerOutput
from sinklab.attention.intervention import HiddenIntervention, Intervention
from sinklab.attention.probe import Watcher
from sinklab.errors import DoesNotApply
from sinklab.models.losses import is_causal_lm
from sinklab.registry import claims
from sinklab.results.intervals import Interval
from sinklab.results.metric import Metric
from sinklab.studies.causes.effects import change, runs, text_losses
from sinklab.studies.causes.readout import readout_for
from sinklab.studies.causes.samples import Samples, masked_samples, token_samples
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part
from sinklab_claims.contract.effect import Value
from sinklab_claims.contract.trained import MeasuredModel, gives
from sinklab_claims.variants import Fields, of_paper

sun = of_paper("sun2024", "Sun et al. 2024 (arXiv 2402.17762)")

METRICS = (
    Metric("largest", "norm", "Mean over texts of the largest |x| of a layer, in the layer where it is largest."),
    Metric("times_median", "ratio", "Mean over texts of the largest over the median |x|, in the layer where it is largest."),
    Metric("massive", "count", "Pairs of a position and a channel that are massive by the published thresholds."),
    Metric(
        "deviation",
        "fraction",
        "Largest standard deviation over texts of one of them, by its size; 0 where the mean is no edit.",
    ),
    Metric("zero", "nats", "Change of the loss with all of them set to zero; absent where there are none."),
    Metric("mean", "nats", "Change of the loss with all of them set to their mean; absent where there are none."),
    Metric("control", "nats", "Change of the loss with as many other channels set to zero; absent where there are none."),
)

TEXTS, LENGTH = 32, 256
SUN = (100.0, 1000.0)
"""Size, and times the median of its hidden state, above which the paper calls a value massive."""
CRITERIA = (SUN, (0.0, 50.0))
"""Tried in this order: small models have none by the first."""
MOST = 10_000
"""Values of one text after one layer that may meet a criterion: more than a few are not what the word means."""

Seen = dict[tuple[int, int, int], dict[int, float]]
"""Text, position and channel to layer to value."""


@gives(*METRICS)
def edited(trained: MeasuredModel) -> dict[str, float]:
    """Massive activations by the published thresholds or, where there are none, by a ratio of 50 alone, and what editing costs.

    All are :data:`METRICS`.
    """
    massive = massive_activations(trained.loaded.model, _samples(trained))
    tops = {place: np.array(values) for place, values in massive.found.items()}
    numbers = {
        "largest": massive.largest,
        "times_median": massive.times_median,
        "massive": float(len(tops)) if massive.criterion == SUN else 0.0,
    }
    if tops:
        numbers["deviation"] = max(float(values.std()) / abs(float(values.mean())) for values in tops.values())
    return {**numbers, **{name: loss.mean for name, loss in massive.losses.items()}}


def _samples(trained: MeasuredModel) -> Samples:
    """Held-out rows; of a model that fills gaps, with gaps."""
    groups, loaded = [("held-out", trained.rows(TEXTS, LENGTH))], trained.loaded
    if is_causal_lm(loaded.model):
        return token_samples(groups)
    mask = None if loaded.tokenizer is None else loaded.tokenizer.mask_token_id
    if mask is None:
        raise DoesNotApply("its tokenizer has no token for a gap, so there is no loss to compare")
    return masked_samples(groups, mask)


@dataclasses.dataclass(frozen=True)
class Massive:
    """Massive activations by a criterion.

    Attributes:
        found: position and channel to the values there, of each text where it is largest, with its sign.
        largest, times_median: mean over texts of the largest value, and of that over the median, of the layer with most.
        losses: change of the loss over texts when they are all set, in the layer of their birth, to ``zero``; to their ``mean``
            over texts; and as a ``control``, when as many other channels of the same tokens are set to zero.
    """

    criterion: tuple[float, float]
    found: dict[tuple[int, int], list[float]]
    largest: float
    times_median: float
    losses: dict[str, Interval]


def massive_activations(model: nn.Module, samples: Samples, *, batch_size: int = 16, seed: int = 0) -> Massive:
    """Find massive activations by the first criterion that any value meets, and set them to zero and to their mean.

    Zero takes away two things at once, that the values are large and that they are constant, so the mean always stands beside
    it (Owen et al. 2025, arXiv 2503.22329).

    Raises:
        DoesNotApply: more than 10,000 values of a text meet a criterion, or no layer was seen.
    """
    readout = readout_for(model)
    for criterion in CRITERIA:
        made = functools.partial(_peaks, criterion)
        done = list(runs(model, samples, readout, probes=made, batch_size=batch_size))
        probes = [(run.start, probe) for run in done for probe in run.probes if isinstance(probe, _Peaks)]
        seen: Seen = defaultdict(dict)
        for start, probe in probes:
            for layer, text, position, channel, value in probe.hits:
                seen[start + text, position, channel][layer] = value
        if seen:
            break
    clean = torch.cat([run.losses.nanmean(1) for run in done]).numpy()
    largest: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for _, probe in probes:
        for layer, cases in probe.largest.items():
            largest[layer] += cases
    if not largest:
        raise DoesNotApply("no layer was seen that gives hidden states")
    losses = {}
    for name in ("zero", "mean", "control") if seen else ():
        points = _points(seen, name, len(samples), probes[0][1].width, torch.Generator().manual_seed(seed))
        edits = functools.partial(_set_points, points)
        edited = text_losses(model, samples, readout, edits, batch_size=batch_size)
        losses[name] = change(edited, clean, "massive activations")
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (_, position, channel), values in seen.items():
        found[position, channel].append(max(values.values(), key=abs))
    times = [np.mean([size / median for size, median in cases if median] or [0.0]) for cases in largest.values()]
    sizes = [np.mean([size for size, _ in cases]) for cases in largest.values()]
    return Massive(criterion, dict(found), float(max(sizes)), float(max(times)), losses)


class _Peaks(Watcher):
    """All values that meet a criterion, and by layer of each text the largest value and the median."""

    name, needs = "massive_peaks", frozenset({"hidden_states"})

    def __init__(self, criterion: tuple[float, float]) -> None:
        self.least, self.times_median = criterion
        self.hits: list[tuple[int, int, int, int, float]] = []
        self.largest: dict[int, list[tuple[float, float]]] = {}
        self.width = 0

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind != "layer":
            return
        layer, self.width = output.site.layer, output.hidden_states.shape[-1]
        for row, (hidden, positions) in enumerate(zip(output.hidden_states, output.positions, strict=True)):
            own, where = hidden[positions >= 0].double(), positions[positions >= 0]
            sizes = own.abs()
            median = float(sizes.median())
            self.largest.setdefault(layer, []).append((float(sizes.max()), median))
            hits = ((sizes > self.least) & (sizes >= self.times_median * median)).nonzero().tolist()
            if len(hits) > MOST:
                raise DoesNotApply(f"{output.site.module}: {len(hits):,} values of one text are massive, which are to be few")
            self.hits += [(layer, row, int(where[token]), channel, float(own[token, channel])) for token, channel in hits]


def _peaks(criterion: tuple[float, float], start: int, stop: int) -> list[_Peaks]:
    return [_Peaks(criterion)]


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


def _set_points(points: Mapping[int, Tensor], start: int, stop: int) -> list[Intervention]:
    """Sets the points of a batch, the samples ``start`` to ``stop``; by layer rows of sample, position, channel and value."""
    offset = torch.tensor([start, 0, 0, 0.0], dtype=torch.float64)
    return [
        _SetValues(layers=(layer,), points=inside - offset)
        for layer, of_layer in points.items()
        if len(inside := of_layer[(of_layer[:, 0] >= start) & (of_layer[:, 0] < stop)])
    ]


def _points(seen: Seen, name: str, texts: int, width: int, generator: torch.Generator) -> dict[int, Tensor]:
    """For each layer of birth what to set: float64 ``(n, 4)``, text, position, channel, value."""
    births = {key: min(layers) for key, layers in seen.items()}
    often = Counter((layer, position, channel) for (_, position, channel), layer in births.items())

    def group(layer: int, position: int, channel: int) -> tuple[int, int | None, int]:
        # A mean of one would be no edit: what stands where few texts have it is of one kind with the like of it elsewhere.
        return layer, position if 2 * often[layer, position, channel] >= texts else None, channel

    values: dict[tuple[int, int | None, int], list[float]] = defaultdict(list)
    for (text, position, channel), layer in births.items():
        values[group(layer, position, channel)].append(seen[text, position, channel][layer])
    points: dict[int, list[list[float]]] = defaultdict(list)
    used = defaultdict(set)
    for text, position, channel in seen:
        used[text, position].add(channel)
    for (text, position, channel), layer in births.items():
        value = float(np.mean(values[group(layer, position, channel)])) if name == "mean" else 0.0
        if name == "control":
            free = [other for other in range(width) if other not in used[text, position]]
            if not free:
                raise DoesNotApply("every channel of a token is massive, so there is none for a control")
            channel = free[int(torch.randint(len(free), (), generator=generator))]
            used[text, position].add(channel)
        points[layer].append([text, position, channel, value])
    return {layer: torch.tensor(rows, dtype=torch.float64) for layer, rows in points.items()}


@claims.register("massive_mean_against_zero")
@sun
def massive_mean_against_zero() -> Fields:
    """Setting massive activations to zero ruins predictions; setting them to their mean does not.

    Only where there are massive activations, and where their mean is an edit: behind a constant BOS it is none.
    """
    return dict(
        where="section 3",
        published="LLaMA2-7B: zeroing four activations ruins the perplexity; with their mean it stays at 5.47.",
        presupposes=(
            Part("there are massive activations", Value("massive", BASELINE), more_than=0.5),
            Part("they vary, so that the mean is an edit", Value("deviation", BASELINE), more_than=1e-4),
        ),
        parts=(
            Part("zero ruins", Value("zero", BASELINE), more_than=0.5),
            Part("the mean does not", Value("mean", BASELINE), less_than=0.02),
        ),
        costs={},
        checkpoint=OnCheckpoint(about="text", reads="context"),
        read_outs=(edited,),
    )
