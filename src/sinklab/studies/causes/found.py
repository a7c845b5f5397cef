"""What find_causes() finds: dataclasses with the keys of its ``summary.json``, and ``None`` where there is no number."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

from sinklab.results.intervals import Interval

__all__ = [
    "LABELS",
    "Activation",
    "Causes",
    "Condition",
    "Correlation",
    "Effect",
    "ExaminedGroup",
    "ExaminedHead",
    "FoundSink",
    "HeadScores",
    "HeadShares",
    "KeyBias",
    "Label",
    "Labelled",
    "Location",
    "Massive",
    "MassiveEdit",
    "MinimalEffect",
    "Peak",
    "Refused",
    "Spread",
    "Strong",
    "ThreeMetrics",
    "Tried",
    "Undecided",
]

Label = Literal["semantic", "constant", "dormant", "broadcast", "unneeded", "switch", "broadcast-switch", "mixed", "undecided"]
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
    """Why a head has no label in a domain.

    Attributes:
        nearest: the label that it may have: one whose claims all hold in the mean, or of which the fewest do not.
        not_shown: its claims that are not shown (:data:`~sinklab.studies.causes.labels.RULES`); none where two labels are.
        texts: of the domain, those measured among them, that decide for it with a chance of
            :data:`~sinklab.results.intervals.CHANCE`; ``None`` if no number does, or none can be foretold.
    """

    nearest: str
    not_shown: list[str]
    texts: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled:
    """What is known of a head, or of a group; effects by contrast, and divergences by intervention, and by domain.

    ``needs_sink`` is ``yes``, ``no`` or ``undecided`` by domain; empty without a sink.
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
    divergence: dict[str, dict[str, Number]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaminedHead(Labelled):
    """One head; ``within`` has its label where it rests, and elsewhere, by domain, if these were measured."""

    layer: int
    head: int
    module: str
    within: dict[str, dict[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaminedGroup(Labelled):
    """Heads that were edited at once; numbers of the sink are means over its members.

    ``called`` is the layer or the label of a group that was not named by its heads. ``alone`` counts the labels of its members,
    and ``beyond_alone`` is, by intervention and domain, what the group costs less what its members cost one by one, summed.
    """

    name: str
    called: str
    members: list[str]
    alone: dict[str, int]
    beyond_alone: dict[str, dict[str, Interval]]


@dataclasses.dataclass(frozen=True)
class MinimalEffect:
    """The minimal effect and where it is from: ``auto``, or ``given``.

    ``worth`` is what all attention costs by domain, with outputs of ``zero`` and with those of another text (``resample``);
    ``domain`` the one that counts, ``None`` where none is shown to be worth enough, or nothing was measured.
    """

    value: float
    by: str
    heads: int
    domain: str | None
    worth: dict[str, dict[str, Interval]]


@dataclasses.dataclass(frozen=True)
class Tried:
    """A place that was looked at for the sink, and the largest mean weight on it."""

    place: int | str
    weight: float


@dataclasses.dataclass(frozen=True)
class HeadShares:
    """What a head gives to the main sink, and the norm of the sink's value over that of others."""

    weight: Number
    value_ratio: Number


@dataclasses.dataclass(frozen=True)
class FoundSink:
    """Where the sink of a model is, what else was tried, and what every head gives to it."""

    place: int | str | None
    name: str
    tried: list[Tried]
    secondary: list[int]
    heads: dict[str, HeadShares]


@dataclasses.dataclass(frozen=True)
class Refused:
    """Why an experiment cannot be had of this model or these texts."""

    refused: str


# --- experiments on the sink ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of two metrics with its bootstrap interval; ``None`` where one of them does not vary, and for
    fewer than three items; the ends of the interval also for fewer than eight.

    Attributes:
        over: ``heads`` or ``layers``.
        items: how many of them have both numbers.
        reading: ``together``, ``opposed``, ``no clear relation``, or ``too few to tell`` where there is no interval for that.
    """

    first: str
    second: str
    over: str
    rho: Number
    low: Number
    high: Number
    items: int
    reading: str


@dataclasses.dataclass(frozen=True)
class ThreeMetrics:
    """Concentration, outliers and need of the sink side by side: by head and by layer, each by name, and how they correlate.

    Attributes:
        quiet: heads with their sink there that do not need it: concentration of the threshold or more, and a need whose 95 %
            interval over texts lies below the minimal effect.
        needy: the other way round.
        meanings: metric by head to what it is.
    """

    heads: dict[str, dict[str, Number]]
    layers: dict[str, dict[str, Number]]
    correlations: list[Correlation]
    quiet: list[str]
    needy: list[str]
    threshold: float
    minimal_effect: float
    texts: int
    unit: str
    meanings: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Strong:
    """A key position, or a token wherever it stands, and the head that gives it most.

    Attributes:
        weight: mean share of a row, over texts and the queries that see the key and are not it.
        token: most frequent id at the position, or the id itself; ``None`` without ``input_ids``.
        position: ``None`` for a token wherever it stands.
    """

    weight: float
    head: str
    token: int | None
    position: int | None


@dataclasses.dataclass(frozen=True)
class Condition:
    """What was changed, and where the attention went.

    Attributes:
        name: ``as it is``; ``hidden``, the sink hidden from all heads; ``removed``, the first token taken away;
            ``duplicated``, the first token twice; ``replaced``, a random token in its stead; ``moved``, the first token at a
            later position, those before it one earlier; ``random prefix``, random tokens in front.
        first_token_at: where the first token of the texts now stands; ``None`` if nowhere.
        at_place: by head, mean share on the place that the sink has in the texts as they are; ``None`` where no query sees it.
        at_first_token: by head, the same on the first token, where it now stands.
        strongest: positions, by the head that gives them most, in falling order.
        tokens: ids wherever they stand, position 0 apart, likewise; of those seen often enough.
        loss: change over texts, on the targets that both conditions have; ``None`` for the texts as they are.
        scored: targets behind it.
    """

    name: str
    first_token_at: int | None
    at_place: list[Number]
    at_first_token: list[Number]
    strongest: list[Strong]
    tokens: list[Strong]
    loss: Interval | None
    scored: int


@dataclasses.dataclass(frozen=True)
class Location:
    """Where the sink goes when it is hidden or its token moved, by condition; the texts as they are first.

    Attributes:
        head: the one that gives the sink most.
        heads: in the order of all shares.
        left_out: conditions that these samples cannot have, and why.
        secondary: further positions with the threshold or more, as the texts are.
        follows: what the sink of the strongest head went with when the first token was moved, half of its share or more:
            ``token``, ``position``, ``both``, ``neither``; ``None`` where the head has no sink at position 0, or nothing moved.
    """

    place: int | str
    head: str
    heads: list[str]
    conditions: dict[str, Condition]
    left_out: dict[str, str]
    secondary: list[int]
    threshold: float
    texts: int
    unit: str
    follows: str | None


@dataclasses.dataclass(frozen=True)
class HeadScores:
    """How one head scores its sink, over the queries that see the sink and another key; ``None`` for what has no key or value.

    Attributes:
        cosine, other_cosine: mean of cos(q, k), to the sink's key and to all other keys that a query sees.
        norm_product, other_norm_product: mean of |q| |k|, likewise.
        gap: mean of the score on the sink less the mean score on the other keys of the query; softmax knows differences alone.
        gap_deviation: standard deviation of the same over queries.
        constant_share: ``gap² / (gap² + gap_deviation²)``, from 0 to 1: how much of the gap's mean square a constant is.
        value_ratio: mean |v_sink| over mean |v| of the other keys.
    """

    head: str
    module: str
    cosine: Number
    other_cosine: Number
    norm_product: Number
    other_norm_product: Number
    gap: Number
    gap_deviation: Number
    constant_share: Number
    value_ratio: Number


@dataclasses.dataclass(frozen=True)
class KeyBias:
    """Is the sink a key that takes mass and carries nothing?

    Attributes:
        losses: change of the loss over texts by edit of all heads at once: ``zero_value``, the sink's values set to 0;
            ``constant_score``, each head's score on the sink replaced by its mean over queries and texts. Each also as
            ``… control``, for a random other key of each text; ``… beyond control``, the paired difference; and
            ``… of sink heads``, in those alone that give the sink the threshold or more, if there are any.
        sink_heads: which these are.
        heads: all self-attention heads, in order.
        clean_loss: mean over texts.
    """

    place: int | str
    losses: dict[str, Interval]
    sink_heads: list[str]
    heads: list[HeadScores]
    clean_loss: float
    minimal_effect: float
    texts: int
    unit: str


@dataclasses.dataclass(frozen=True)
class Activation:
    """One channel that is massive at one position, over the texts in which it is.

    Attributes:
        position: 0-based, in the document.
        channel: coordinate of the hidden state.
        birth: first layer whose output has it; -1 for the embeddings. Of several texts the most frequent one.
        death: first layer whose output has it no more; ``None`` if the last one still has.
        texts: in how many.
        value: mean over these texts of the value where it is largest, with its sign.
        deviation: standard deviation of the same: 0 where the token before it is always the same (a BOS at position 0).
        times_median: mean over these texts of its size over the median size of the hidden state at that layer.
        token: most frequent id at the position; ``None`` without ``input_ids``.
    """

    position: int
    channel: int
    birth: int
    death: int | None
    texts: int
    value: float
    deviation: float
    times_median: Number
    token: int | None


@dataclasses.dataclass(frozen=True)
class Peak:
    """Of one layer the mean over texts of its largest value, of that over the median, and where the largest is."""

    layer: int
    value: float
    times_median: float
    position: int
    channel: int


@dataclasses.dataclass(frozen=True)
class MassiveEdit:
    """What setting all massive activations, in the layer of their birth, does.

    Attributes:
        loss: change over texts, in the unit of the readout.
        sink_weights: by head, mean weight on the sink under the edit; ``None`` without a sink.
    """

    loss: Interval
    sink_weights: list[Number] | None


@dataclasses.dataclass(frozen=True)
class Massive:
    """Massive activations: where they are born and die, and what zeroing them costs, against what their mean costs.

    Attributes:
        found: most frequent first, then largest.
        edits: the causal tests by name; empty if nothing was found. ``zero``; ``mean``, the mean of the channel over texts, at
            the same position where half of the texts have it there, else over all the positions where it is born in that
            layer; ``control``, as many other channels of the same tokens set to zero.
        heads: in the order of all sink weights.
        sink_weights: by head, of the model as it is; ``None`` without a sink.
        clean_loss: mean over texts.
        least, times_median: the criterion that the activations are by.
    """

    found: list[Activation]
    peaks: list[Peak]
    edits: dict[str, MassiveEdit]
    heads: list[str]
    sink_weights: list[Number] | None
    clean_loss: float
    least: float
    times_median: float
    texts: int
    unit: str


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far a replaced token reaches. A *relative change* is |h' - h| / |h|, h the hidden state of one token after one layer.

    Attributes:
        conditions: ``sink``, the model as it is; ``no sink``, the sink hidden from every query; ``control``, one random other
            key of each text, from its first quarter, hidden from every query instead.
        layers: numbers of the layers, -1 for the embeddings.
        distances: first and last of each bin, in tokens after the replaced one. Negative before it, where a model looks ahead.
        curves: by condition ``(layers, distances)``, mean relative change over texts and replaced tokens.
        totals: by condition ``(layers,)``, mean over texts of the mean relative change over the tokens after it (over all
            others, where a model looks ahead).
        ratios: for ``no sink`` and ``control`` the geometric mean over texts of the total after the last layer over that of the
            model as it is, with its interval; above 1 if hiding lets the change spread. ``None`` if nothing spreads at all.
        losses: what hiding costs, in the unit of the readout.
    """

    conditions: list[str]
    layers: list[int]
    distances: list[tuple[int, int]]
    curves: dict[str, list[list[Number]]]
    totals: dict[str, list[Number]]
    ratios: dict[str, Interval | None]
    losses: dict[str, Interval]
    replaced: int
    texts: int
    unit: str


# --- all of it --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causes:
    """``summary.json`` of ``sinklab causes``, and the entry ``causes`` of that of an audit.

    Attributes:
        counts: label to heads.
        texts: of all domains together.
        texts_needed: texts of each domain that would decide half of what is undecided for want of texts; ``None`` if unknown.
        mirrored: by domain, heads that would look semantic if gains were costs.
        notes: what a reader has to know beside the labels: a loss above that of a guess, texts longer than in training.
        read_outs, location, key_bias, massive, spread: the experiments; ``None`` where they are not run.
    """

    heads: list[ExaminedHead]
    groups: list[ExaminedGroup]
    counts: dict[str, int]
    sink: FoundSink
    texts: int
    texts_needed: int | None
    mirrored: dict[str, int]
    domains: list[str]
    loss_of: str | None
    unit: str
    clean_loss: dict[str, float]
    level: float
    minimal_effect: float
    minimal_effect_from: MinimalEffect
    budget: str
    variants: list[str]
    notes: list[str]
    read_outs: ThreeMetrics | Refused | None
    location: Location | Refused | None
    key_bias: KeyBias | Refused | None
    massive: Massive | Refused | None
    spread: Spread | Refused | None
