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

    ``needs_sink`` is ``yes``, ``no`` or ``undecided``; empty without a sink. ``value_ratio`` is the norm of the sink's value
    over that of others.
    """

    label: Label
    domains: dict[str, str]
    needs_sink: dict[str, str]
    undecided: dict[str, Undecided]
    sink_weight: Number
    value_ratio: Number
    sink_weights: dict[str, Number]
    value_ratios: dict[str, Number]
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


@dataclasses.dataclass(frozen=True)
class SharedKeys:
    """Grouped queries: so many ``heads`` share one key and value of the sink; in how many of the ``keys`` all of them give it
    the threshold or more, some, and none."""

    heads: int
    keys: int
    all_sink: int
    some_sink: int
    none_sinks: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """Why this cannot be had of this model or these texts."""

    refused: str


# --- where the sink goes ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Strong:
    """A key position, the head that gives it most, and its mean share of a row (over the queries that see the key, not it)."""

    weight: float
    head: str
    position: int


@dataclasses.dataclass(frozen=True)
class Condition:
    """What was changed, and where the attention went.

    Attributes:
        name: ``as it is``; ``hidden``, the sink hidden from all heads; ``removed``, the first token taken away;
            ``duplicated``, the first token twice; ``replaced``, a random token in its stead; ``moved``, the first token at a
            later position, those before it one earlier; ``random prefix``, random tokens in front.
        first_token_at: where the first token of the texts now stands; ``None`` if nowhere.
        at_place, at_first_token: by head, mean share on the place that the sink has in the texts as they are, and on the first
            token, where it now stands; ``None`` where half of the queries do not see it.
        strongest: the position that a head gives most.
        loss: change over texts, on the ``scored`` targets that both conditions have; ``None`` for the texts as they are.
    """

    name: str
    first_token_at: int | None
    at_place: list[Number]
    at_first_token: list[Number]
    strongest: Strong | None
    loss: Interval | None
    scored: int


@dataclasses.dataclass(frozen=True)
class Location:
    """Where the sink goes when it is hidden or its token moved; the texts as they are first.

    Attributes:
        head: the one that gives the sink most; ``heads`` are in the order of all shares.
        left_out: conditions that these samples cannot have, and why.
        follows: what the sink of ``head`` went with when the first token was moved, half of its share or more: ``token``,
            ``position``, ``both``, ``neither``; ``None`` where it has no sink at position 0, or nothing moved.
    """

    place: int | str | list[int]
    head: str
    heads: list[str]
    conditions: dict[str, Condition]
    left_out: dict[str, str]
    texts: int
    unit: str
    follows: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causes:
    """``summary.json`` of ``sinklab causes``, and the entry ``causes`` of that of an audit.

    Attributes:
        texts: of all domains together.
        mirrored: by domain, heads that would look text-dependent if gains were costs.
        notes: what a reader has to know beside the labels: a loss above that of a guess, texts longer than in training.
        budget: seconds; ``None`` without one.
        of_a_key: of models with grouped queries.
        location: where the sink goes; ``None`` where it was not asked for.
    """

    heads: list[ExaminedHead]
    groups: list[ExaminedGroup]
    counts: dict[str, int]
    sink: FoundSink
    of_a_key: SharedKeys | None
    texts: int
    mirrored: dict[str, int]
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
    location: Location | Refused | None
