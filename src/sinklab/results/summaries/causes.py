"""``sinklab causes``: what a head does, by domain, and where the sink is."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from sinklab.results.summaries.shared import Difference

__all__ = [
    "CausesSummary",
    "ExaminedGroup",
    "ExaminedHead",
    "FoundSink",
    "Labelled",
    "MinimalEffect",
    "Undecided",
]


class Undecided(TypedDict):
    """Why a head has no label in a domain: the label that comes nearest, what is not shown, and texts that would show it."""

    nearest: str
    why: str
    texts: int | None


class Labelled(TypedDict):
    """What is known of a head, or of a group; effects and divergences by intervention and domain."""

    label: str
    domains: dict[str, str]
    needs_sink: dict[str, str]
    undecided: dict[str, Undecided]
    sink_weight: float | None
    value_ratio: float | None
    sink_weights: dict[str, float | None]
    value_ratios: dict[str, float | None]
    effects: dict[str, dict[str, dict[str, float]]]
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


class CausesSummary(TypedDict):
    """``summary.json`` of ``sinklab causes``, and the entry ``causes`` of that of an audit; experiments add sections."""

    heads: list[ExaminedHead]
    counts: dict[str, int]
    sink: FoundSink
    texts: int
    texts_needed: int | None
    mirrored: dict[str, int]
    domains: list[str]
    unit: str
    clean_loss: dict[str, float]
    level: float
    minimal_effect: float
    minimal_effect_from: NotRequired[MinimalEffect]
    groups: NotRequired[list[ExaminedGroup]]
    budget: str
    variants: list[str]
    text: NotRequired[str]
