"""What find_causes() finds: dataclasses with the keys of its ``summary.json``, and ``None`` where there is no number."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

from sinklab.results.intervals import Interval

Label = Literal[
    "text-dependent", "constant", "dormant", "bias", "broadcast", "unneeded", "switch", "active", "needs-sink",
    "slight", "mixed", "undecided", "not-run",
]  # fmt: skip
"""What a head is, or a group of heads."""
LABELS: tuple[Label, ...] = get_args(Label)
Number: TypeAlias = float | None


@dataclasses.dataclass(frozen=True)
class Effect:
    """A mean over texts in the unit of the loss with its 95 % bootstrap interval, and the p-value of what it is to show."""

    mean: float
    low: float
    high: float
    p: float


@dataclasses.dataclass(frozen=True)
class Undecided:
    """Why a head has no label in a domain: the nearest one, and its claims that are not shown (none where two labels are)."""

    nearest: str
    not_shown: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled:
    """What is known of a head or group: label by domain, effects by contrast, by domain too.

    ``needs_sink`` is ``yes``, ``no`` or ``undecided``; empty without a sink. ``sink_weights`` are those on the texts of each
    domain. ``value_ratio`` is the norm of the sink's value over that of others.
    """

    label: Label
    domains: dict[str, str]
    needs_sink: dict[str, str]
    undecided: dict[str, Undecided]
    sink_weight: Number
    sink_weights: dict[str, Number]
    value_ratio: Number
    effects: dict[str, dict[str, Effect]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaminedHead(Labelled):
    """One head; ``estimates`` are what the screen expects of its edits, and never a verdict; empty without a screen."""

    layer: int
    head: int
    module: str
    estimates: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaminedGroup(Labelled):
    """Heads that were edited at once; numbers of the sink are means over its members.

    ``called`` is the layer of a group that was not named by its heads, and ``alone`` counts the labels of its members.
    """

    name: str
    called: str
    members: list[str]
    alone: dict[str, int]


@dataclasses.dataclass(frozen=True)
class MinimalEffect:
    """The minimal effect, ``auto`` or ``given``; over how many ``heads``, or layers (``of``), the worth is shared; what all
    attention costs, by domain with outputs of ``zero`` and of another text (``resample``); and the domain that counts,
    ``None`` where it is not shown to be worth enough on any."""

    value: float
    by: str
    heads: int
    domain: str | None
    worth: dict[str, dict[str, Interval]]
    of: str = "heads"


@dataclasses.dataclass(frozen=True)
class FoundSink:
    """Where the sink is, what else was tried (``place`` and ``weight``), and ``weight`` and ``value_ratio`` of every head."""

    place: int | str | None
    name: str
    tried: list[dict[str, int | float | str]]
    secondary: list[int]
    heads: dict[str, dict[str, Number]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causes:
    """``summary.json`` of ``sinklab causes``, and the entry ``causes`` of that of an audit.

    Attributes:
        texts: of all domains together.
        notes: what a reader has to know beside the labels: a loss above that of a guess, texts longer than in training.
        budget: seconds; ``None`` without one.
    """

    heads: list[ExaminedHead]
    groups: list[ExaminedGroup]
    counts: dict[str, int]
    sink: FoundSink
    texts: int
    domains: list[str]
    loss_of: str | None
    unit: str
    clean_loss: dict[str, float]
    level: float
    minimal_effect: float
    minimal_effect_from: MinimalEffect
    budget: float | None
    variants: list[str]
    notes: list[str]
