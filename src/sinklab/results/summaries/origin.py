"""``sinklab origin``: where a sink's norm is written, and what edits of the writer do."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from sinklab.results.summaries.shared import Difference

__all__ = [
    "OriginEdit",
    "OriginFound",
    "OriginHead",
    "OriginNorms",
    "OriginRegisters",
    "OriginSummary",
    "OriginUnit",
    "OriginWeight",
]


class OriginUnit(TypedDict):
    """One neuron, head or neuron of an expert that writes a sink's norm."""

    unit: int
    name: str
    along: float
    size: float
    in_channel: float


class OriginEdit(TypedDict):
    """What one edit does, on ``units``, ``controls`` (random units, mean over draws), the ``write``, ``channels``, or moving
    units to ``registers``."""

    edit: str
    on: str
    what: str
    loss: Difference | None
    weight: float | None
    weight_kept: Difference | None
    spike: float
    spike_kept: Difference


class OriginNorms(TypedDict):
    """Mean norms of what enters the first block and of what leaves every block, at the place and at the other tokens."""

    place: list[float]
    others: list[float]


class OriginWeight(TypedDict):
    """A part of a parameter behind a unit: its norm, absolute and over the median, and its largest entry."""

    unit: int
    parameter: str
    part: str
    role: str
    norm: float
    times_median: float
    channel: int
    value: float
    rank: int


class OriginHead(TypedDict):
    """What one head gives to the place: as the model is, if attention were uniform, and under edits by their names.

    ``kept`` is the share of what exceeds uniform attention that is left with the units silenced, over samples; ``null`` of
    heads that are not the place's own, where it was not measured, and where nothing exceeds it.
    """

    layer: int
    head: int
    module: str
    own: bool
    weight: float | None
    uniform: float | None
    edited: dict[str, float | None]
    kept: Difference | None


class OriginRegisters(TypedDict):
    """What moving the neurons' activations to added tokens does to heads and outputs; the rest is the edit ``moved``."""

    number: int
    weight: float | None
    divergence: Difference | None
    silenced: Difference | None


class OriginFound(TypedDict):
    """Where one sink, or a spike that is no sink of its own, is born; ``null`` where that is not known.

    ``spiked`` says whether ``spike`` is one of the place: its norm jumps, and the largest value stands there in half of the
    samples or more.
    """

    place: str
    kind: str
    positions: list[int]
    description: str
    by: str
    stage: int | None
    block: int | None
    module: str | None
    sublayer: str | None
    before: float
    after: float
    peak: float
    pull: float | None
    pull_lost: Difference | None
    norms: OriginNorms
    norm: float | None
    rest: float | None
    error: float | None
    against_others: bool
    not_split: str
    channels: list[dict[str, float]]
    unit_kind: str | None
    num_units: int | None
    units: list[OriginUnit]
    weights: list[OriginWeight]
    weight: float | None
    uniform: float | None
    weight_by_block: list[float | None]
    spike: float
    spiked: bool
    edits: list[OriginEdit]
    heads: list[OriginHead]
    registers: NotRequired[OriginRegisters | None]
    verdict: str


class OriginSummary(TypedDict):
    """``summary.json`` of ``sinklab origin`` besides what the model is, and the entry ``origin`` of that of an audit."""

    samples: int
    positions: int
    blocks: int
    loss: float | None
    controls: int
    seed: int
    origins: list[OriginFound]
    notes: list[str]
    text: NotRequired[str]
