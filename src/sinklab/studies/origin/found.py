"""What ``sinklab origin`` found: where each sink is born, what writes it, and what goes when that is taken away."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from sinklab.results.intervals import Interval
from sinklab.results.metric import Coordinates, Metric, Row

__all__ = ["Channel", "Death", "Edited", "HeadWeight", "Norms", "Origin", "Origins", "Unit", "origin_rows"]

NORM_RATIO = Metric(
    "place_norm_ratio",
    "ratio",
    "Mean norm at a place over the mean norm of other tokens in what leaves the block (layer -1: what enters the first one).",
    range=(0.0, float("inf")),
)
WRITTEN = Metric(
    "unit_write",
    "norm",
    "What one unit, whose number ends the module's name, adds to the write at the sink, along the direction of the mean write.",
)
CHANNEL_WRITE = Metric(
    "channel_write", "norm", "Mean over samples of the write at the sink in one channel, whose number ends the module's name."
)
SPIKE = Metric(
    "spike_times_median",
    "ratio",
    "Mean over samples of largest over median size of the hidden state, at the block behind the origin where it is largest; "
    "other sinks and spikes are left out of the largest.",
    range=(0.0, float("inf")),
    version=2,  # of a place beside a larger spike it was that of the other place
)
PLACE_WEIGHT = Metric(
    "place_weight",
    "weight",
    "Mean over samples, and over the queries that see a place and stand on none, of the weight on all places of one origin "
    "together; with a head of that head, else over the heads behind the origin that give at least half as much as the "
    "strongest of them.",
    range=(0.0, 1.0),
)
ORIGIN_LOSS = Metric("origin_loss_change", "nats", "Mean over samples of the change of their mean loss under the edit.")


@dataclass(frozen=True)
class Unit:
    """What a neuron or head writes: along the mean write, in its own direction, into the first channel."""

    unit: int
    name: str
    along: float
    size: float
    in_channel: float


@dataclass(frozen=True)
class Channel:
    """One channel of the mean write: its value, its share of the squared norm, and the mean there of what leaves the block."""

    channel: int
    value: float
    share: float
    state: float


@dataclass(frozen=True)
class Edited:
    """What one edit does on ``units``, ``controls`` (random units, one draw a sample), ``write`` or ``channels``:
    change of the loss in nats, weight of its own heads, largest over median size, and shares kept of these two."""

    edit: str
    on: str
    what: str
    loss: Interval | None
    weight: float | None
    weight_kept: Interval | None
    spike: float
    spike_kept: Interval


@dataclass(frozen=True)
class Norms:
    """Mean norms of what enters the first block and of what leaves every block, at the place and at the other tokens."""

    place: list[float]
    others: list[float]


@dataclass(frozen=True)
class Death:
    """The write that takes half of the norm at the place away again: its block, what it is, the norm before and behind it."""

    block: int
    sublayer: str
    before: float
    after: float


@dataclass(frozen=True)
class HeadWeight:
    """What one head gives to the place: as the model is, if attention were uniform, and under edits by their names.

    ``own`` heads are those that give the place most. Of these ``kept`` is the share of what exceeds uniform attention that is
    left with the units silenced, where that was measured and something exceeds it.
    """

    layer: int
    head: int
    module: str
    own: bool
    weight: float | None
    uniform: float | None
    edited: dict[str, float | None]
    kept: Interval | None


@dataclass(frozen=True)
class Origin:
    """Where one sink, or a spike that is no sink of its own, is born, once or again; ``None`` where that is not known.

    Attributes:
        birth, births: which birth of the place this is, from 1, and of how many.
        last: block whose heads are the last to read what is born here, where the place is born again; ``None`` elsewhere.
        death: what writes it away again, up to the next birth.
        by: ``norm`` where it jumps at a write that those who look there read, or ``none``.
        before, after, peak: norm over that of other tokens, before and behind the write, and at most.
        norm, rest, error: of the write, of what no unit writes, and by how much the parts miss the sum.
        weight, uniform: of its own heads on it, and if attention were uniform.
        spiked: whether ``spike`` is one of the place: its norm jumps, and the largest value is there in half of the samples.
        verdict: the finding.
    """

    place: str
    kind: str
    positions: list[int]
    description: str
    birth: int
    births: int
    by: Literal["norm", "none"]
    stage: int | None
    block: int | None
    module: str | None
    sublayer: str | None
    last: int | None
    death: Death | None
    before: float
    after: float
    peak: float
    norms: Norms
    norm: float | None
    rest: float | None
    error: float | None
    not_split: str
    channels: list[Channel]
    unit_kind: str | None
    units: list[Unit]
    weight: float | None
    uniform: float | None
    spike: float
    spiked: bool
    edits: list[Edited]
    heads: list[HeadWeight]
    verdict: str = ""

    def edit(self, on: str, name: str) -> Edited | None:
        """What an edit of that name does; ``None`` where it was not made."""
        return next((edit for edit in self.edits if (edit.on, edit.edit) == (on, name)), None)


@dataclass(frozen=True)
class Origins:
    """``summary.json`` of ``sinklab origin`` besides what the model is, and the entry ``origin`` of that of an audit."""

    samples: int
    positions: int
    blocks: int
    loss: float | None
    controls: int
    seed: int
    origins: list[Origin]
    notes: list[str]
    text: str = ""


def origin_rows(origin: Origin, heads: Sequence[tuple[str, int, int, float]], samples: int) -> Iterator[Row]:
    """Rows of the long table about one place.

    Args:
        heads: module, layer, head and weight on the place of every head.
        samples: that have the place.
    """
    common: Coordinates = {"probe": "origin", "sink": origin.place, "count": samples}
    if origin.block is not None:
        # Units and channels are neither heads nor positions, whose columns others count.
        at: Coordinates = {**common, "layer": origin.block}
        for unit in origin.units:
            yield {**at, "metric": WRITTEN, "value": unit.along, "module": f"{origin.module}, unit {unit.unit}"}
        for channel in origin.channels:
            named = f"{origin.module}, channel {channel.channel}"
            yield {**at, "metric": CHANNEL_WRITE, "value": channel.value, "module": named}
    if origin.birth == 1:
        for number, (place, others) in enumerate(zip(origin.norms.place, origin.norms.others, strict=True)):
            if others and math.isfinite(place):
                yield {**common, "metric": NORM_RATIO, "value": place / others, "layer": number - 1}
        for module, layer, head, weight in heads:
            if math.isfinite(weight):
                cell: Coordinates = {**common, "module": module, "layer": layer, "head": head}
                yield {**cell, "metric": PLACE_WEIGHT, "value": weight}
    which = f"birth {origin.birth}: " if origin.births > 1 else ""
    yield {**common, **({"intervention": f"{which}as it is"} if which else {}), "metric": SPIKE, "value": origin.spike}
    for edit in origin.edits:
        edited: Coordinates = {**common, "intervention": f"{which}{edit.on}: {edit.edit}"}
        yield {**edited, "metric": SPIKE, "value": edit.spike}
        if edit.weight is not None:
            yield {**edited, "metric": PLACE_WEIGHT, "value": edit.weight}
        if edit.loss is not None:
            for metric, value in zip((ORIGIN_LOSS, *map(ORIGIN_LOSS.bound, ("low", "high"))), astuple(edit.loss), strict=True):
                yield {**edited, "metric": metric, "value": value}
