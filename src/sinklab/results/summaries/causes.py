"""``sinklab causes``: what a head does, by domain, and where the sink is."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from sinklab.results.summaries.shared import Difference, Refused

__all__ = [
    "Arrangement",
    "CausesSummary",
    "Effect",
    "ExaminedGroup",
    "ExaminedHead",
    "FoundSink",
    "Label",
    "Labelled",
    "MetricsSideBySide",
    "MinimalEffect",
    "SinkLocation",
    "Strongest",
    "Undecided",
]

Label = Literal["semantic", "constant", "dormant", "broadcast", "unneeded", "switch", "broadcast-switch", "mixed", "undecided"]
"""What a head is, or a group of heads."""


class Undecided(TypedDict):
    """Why a head has no label in a domain: the label that comes nearest, what is not shown, and texts that would show it."""

    nearest: str
    why: str
    texts: int | None


class Effect(TypedDict):
    """A mean change of the loss with its interval, and the p-value of what it is to show."""

    mean: float
    low: float
    high: float
    p: float


class Labelled(TypedDict):
    """What is known of a head, or of a group; effects and divergences by intervention and domain."""

    label: Label
    domains: dict[str, str]
    needs_sink: dict[str, str]
    undecided: dict[str, Undecided]
    sink_weight: float | None
    value_ratio: float | None
    sink_weights: dict[str, float | None]
    value_ratios: dict[str, float | None]
    effects: dict[str, dict[str, Effect]]
    divergence: dict[str, dict[str, float | None]]


class ExaminedHead(Labelled):
    """One head of ``sinklab causes``."""

    layer: int
    head: int
    module: str
    within: dict[str, dict[str, str]]


class ExaminedGroup(Labelled):
    """Heads of ``sinklab causes`` that were edited at once; numbers of the sink are means over its members.

    ``called`` is the layer or the label of a group that was not named by its heads. ``alone`` counts the labels of its members,
    and ``beyond_alone`` is, by intervention and domain, what the group costs less what its members cost one by one, summed.
    """

    name: str
    called: str
    members: list[str]
    alone: dict[str, int]
    beyond_alone: dict[str, dict[str, Difference]]


class MinimalEffect(TypedDict):
    """The minimal effect of ``sinklab causes`` and where it is from: ``auto``, or ``given``.

    ``worth`` is what all attention costs by domain, with outputs of ``zero`` and with those of another text (``resample``);
    ``domain`` the one that counts, ``null`` where none is shown to be worth enough, or nothing was measured.
    """

    value: float
    by: str
    heads: int
    domain: str | None
    worth: dict[str, dict[str, Difference]]
    text: str


class FoundSink(TypedDict):
    """Where the sink of a model is, what else was tried, and what every head gives to it."""

    place: int | str | None
    name: str
    tried: list[dict[str, int | str | float]]
    secondary: list[int]
    heads: dict[str, dict[str, float | None]]


class MetricsSideBySide(TypedDict):
    """Concentration, outliers and need of the sink: by head and by layer, each by its name, and how they correlate."""

    statement: str
    heads: dict[str, dict[str, float | None]]
    layers: dict[str, dict[str, float | None]]
    correlations: list[dict[str, object]]
    quiet: list[str]
    needy: list[str]
    threshold: float
    minimal_effect: float
    texts: int
    unit: str


class Strongest(TypedDict):
    """A position, or a token wherever it stands, and the head that gives it most."""

    weight: float
    head: str
    token: int | None
    position: int | None


class Arrangement(TypedDict):
    """The texts as they are, or changed so that the sink can move: shares by head, and the change of the loss."""

    name: str
    first_token_at: int | None
    at_place: list[float | None]
    at_first_token: list[float | None]
    strongest: list[Strongest]
    tokens: list[Strongest]
    loss: Difference | None
    scored: int


class SinkLocation(TypedDict):
    """Where the sink goes when it is hidden or its token moved, by condition."""

    statement: str
    place: int | str
    head: str
    heads: list[str]
    conditions: dict[str, Arrangement]
    left_out: dict[str, str]
    secondary: list[int]
    threshold: float
    texts: int
    unit: str
    follows: str | None


class CausesSummary(TypedDict):
    """``summary.json`` of ``sinklab causes``, and the entry ``causes`` of that of an audit.

    Experiments add sections, of which pages show two as tables: ``read_outs`` and ``location``; ``null`` where the budget has
    none.
    """

    heads: list[ExaminedHead]
    counts: dict[str, int]
    sink: FoundSink
    texts: int
    texts_needed: int | None
    mirrored: dict[str, int]
    domains: list[str]
    loss_of: NotRequired[str | None]
    unit: str
    clean_loss: dict[str, float]
    level: float
    minimal_effect: float
    minimal_effect_from: NotRequired[MinimalEffect]
    groups: NotRequired[list[ExaminedGroup]]
    budget: str
    variants: list[str]
    text: NotRequired[str]
    read_outs: NotRequired[MetricsSideBySide | Refused | None]
    location: NotRequired[SinkLocation | Refused | None]
