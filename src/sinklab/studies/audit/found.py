"""What an audit found and shows: the dataclasses of summary.json, the words for what they hold, and the blocks made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinklab.results.blocks import Bar, Block, Facts, Grid, Heading, Say, counted, names, number, percent, quote
from sinklab.results.intervals import LEAST_SHARE, LEVEL, MOST
from sinklab.results.sections import from_json, sections

MANY_HEADS = 48
"""Heads from which on a headline says in which layers they are; of fewer the tables are read at a glance."""

MOST_RUNS = 4
"""Runs of layers that are listed."""

LEAST_SHARE_OF_HEADS = 0.02
"""Share of the heads below which a place is no other sink in words; in tables it is."""

LARGE_WORTH = 0.5
"""Nats from which on what BOS is worth is a headline."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place that plays the sink, with the attributes of :class:`~sinklab.sinks.Sink`.

    Attributes:
        heads: layer, head, module and rate in percent of the heads that sink there, strongest first.
        rate: percent of (document, head) that have their sink there.
        name, description: in words, for the middle of a sentence and with all that is known.
    """

    kind: str
    name: str
    description: str
    rate: float
    heads: list[tuple[int, int, str, float]]
    position: int | None = None
    positions: list[int] = field(default_factory=list)
    called: str | None = None
    token: int | None = None
    anywhere: bool = False
    text: str | None = None
    token_share: float | None = None
    mass: float | None = None
    sinking: int | None = None
    value_ratio: float | None = None

    @property
    def token_there(self) -> str | None:
        """The token at a position, where most of the sinks there have that one; that of a sink which is a token."""
        if self.kind == "position" and (self.token_share is None or self.token_share <= MOST):
            return None
        return self.text if self.kind in ("position", "token") else None

    @property
    def columns(self) -> list[int]:
        """Positions that it is: one, or those of a group; none of a token or a null score."""
        return [self.position] if self.position is not None else self.positions


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the sinks are, as :class:`~sinklab.sinks.Sinks` has it: strongest first, and on which texts they were found."""

    sinks: list[Place]
    followed: list[Place]
    weak: list[Place]
    silent: list[Place]
    threshold: float
    definition: str
    corpus: str | None
    bos: int | None
    samples: int
    seq_len: int
    heads_by_weight: int
    front: int = 0


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The sink on one corpus, with or without the beginning-of-sequence token; rates in percent, the loss in nats.

    Attributes:
        samples: how many were read; ``None`` for as many as of the audit.
    """

    corpus: str
    bos: int
    loss: float | None
    sink: str
    sink_rate: float | None
    sink_rate_gu2024: float
    top_position: int | None
    top_rate: float | None
    samples: int | None = None


@dataclass(frozen=True)
class FrontWorth:
    """What the loss of some samples gains from BOS, or what a model has for it, in nats, and half of its 95 % interval."""

    gain: float
    half: float
    samples: int


@dataclass(frozen=True)
class Grouped:
    """Groups of heads that share a key and a value, and in how many of them all heads sink, none, or some."""

    size: int
    all: int
    none: int
    some: int


@dataclass(frozen=True, kw_only=True)
class SinksFound:
    """The sinks of a model, or of a part of an encoder–decoder; conditions have the main one first.

    Attributes:
        sink_rate_gu2024: percent of heads and samples that sink at position 0 (Gu et al. 2024, arXiv 2410.10781).
        candidate_positions: positions up to the last one that half of the queries see; by attention module too.
        windowed_modules: attention modules in which fewer than half of the queries see position 0, of ``num_modules``.
        longest_sample: tokens of the longest sample in which half of the queries see it in each of these.
        sink_heads: heads that sink at the strongest sink; ``sink_heads_by_weight`` give some position more than the threshold.
        definitions: the sink rate under each published definition, by metric.
        sink_layers: those in which heads sink at the strongest sink at least half as often as in the layer where most do.
        grouped: of a model with fewer key–value heads than heads.
    """

    sinks: Places
    sink_rate_gu2024: float
    candidate_positions: int
    candidates_by_module: dict[str, int]
    windowed_modules: int
    num_modules: int
    longest_sample: int | None
    sink_role: str
    sink_heads: int
    sink_heads_by_weight: int
    num_heads: int
    first_token_mean_weight: float | None
    null_mass: float | None
    definitions: dict[str, float]
    conditions: list[Condition]
    finding: str = ""
    part: str = ""
    sink_layers: list[int] = field(default_factory=list)
    grouped: Grouped | None = None

    @property
    def main(self) -> Place | None:
        """The strongest sink."""
        return self.sinks.sinks[0] if self.sinks.sinks else None

    @property
    def column(self) -> int | None:
        """The position of the strongest sink; ``None`` where that is no position, or there is no sink."""
        return self.main.position if self.main is not None and self.main.kind == "position" else None

    @property
    def columns(self) -> list[int]:
        """Positions of the strongest sink: one, or those of a group."""
        return [] if self.main is None else self.main.columns

    @property
    def sink_name(self) -> str:
        """What numbers about "the sink" are about; where none was found, position 0."""
        return self.main.name if self.main is not None else "position 0 (no sink was found)"


@dataclass(frozen=True, kw_only=True)
class AuditFound(SinksFound):
    """``summary.json`` of an audit besides its sections; what is of a part is that of the first one.

    Attributes:
        kind: what a sample is: text, pairs, image or audio.
        bos_name: what samples may begin with, ``BOS`` or ``[CLS] and [SEP]``; empty where there is no such thing.
        normalized: whether rows of weights sum to one.
        tier: where the weights come from, if not from the attention interface; ``not_measured`` are the probes that it lacks.
        status: ``stopped`` where an interruption has ended it after the main condition.
    """

    summary_version: int
    model: str
    revision: str | None
    operation: str
    loss: float | None
    loss_kind: str | None
    loss_definition: str | None
    bits_per_byte: float | None
    warnings: list[str]
    samples_definition: str | None
    normalized: bool
    corpus: str
    bos: int
    bos_name: str
    kind: str
    seq_len: int
    samples: int
    threshold: float
    off_seam_modules: list[str]
    layers_without_attention: dict[str, int]
    tier: str | None
    not_measured: dict[str, str]
    parts: list[SinksFound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    status: str = "finished"
    front_worth: FrontWorth | None = None

    @property
    def views(self) -> list[SinksFound]:
        """Each part by itself; of another model the whole."""
        return list(self.parts) or [self]

    @property
    def reads_text(self) -> bool:
        """Whether samples are texts, whose positions are tokens."""
        return self.kind in ("text", "pairs")


def finding(found: SinksFound, threshold: float) -> str:
    """What was found, in one sentence of at most 160 characters; its numbers stand in the tables."""
    sinks, heads = found.sinks, f"{found.num_heads:,} heads"
    whose = f"{found.part[:1].upper()}{found.part[1:]}: the" if found.part else "The"
    if found.main is not None and found.main.kind == "null":
        return (
            f"{whose} sink is the null score, which takes {percent(100 * (found.null_mass or 0.0))} of the mass of all heads."
        )
    if found.main is not None:
        where = f" in {layers_words(found.sink_layers)}" if found.num_heads > MANY_HEADS and found.sink_layers else ""
        return (
            f"{whose} sink is {place_and_token(found.main)}: {found.main.sinking or 0:,} of {heads}{where}, sink rate "
            f"{percent(found.main.rate)}."
        )
    none = f"{found.part[:1].upper()}{found.part[1:]}: no sink" if found.part else "There is no sink"
    if sinks.silent:
        return f"{none}: {sinks.silent[0].name} passes {threshold:g} only where rows are divided by their sums."
    if sinks.followed:
        top = sinks.followed[0]
        return f"{none} that stays at a place; {top.sinking or 0:,} of {heads} look at {top.name}."
    if sinks.weak:
        top = sinks.weak[0]
        return f"{none}: no head sinks at one place often enough; most do at {top.name}, {percent(top.rate)}."
    if not found.candidate_positions:
        return f"{none}, and none could count: no position is seen by half of the queries of these samples."
    return f"{none}: no position holds more than {threshold:g} of the attention of any of {heads} often enough."


def worth_words(found: AuditFound) -> str:
    """What BOS is worth, in a sentence for the headline; empty where that is little, or not known."""
    worth = found.front_worth
    if worth is None or worth.gain - worth.half < LARGE_WORTH:
        return ""
    return f"Without {found.bos_name} the loss is {number(worth.gain, 2)} nats higher."


def layers_words(layers: Sequence[int]) -> str:
    """``layers 3–9 and 12–29``: runs of numbers, or how many there are where there are many runs."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer for layer in layers if layer + 1 not in layers]
    runs = [f"{start}" if start == stop else f"{start}–{stop}" for start, stop in zip(starts, stops, strict=True)]
    if len(runs) > MOST_RUNS:
        return f"{len(layers)} layers from {layers[0]} to {layers[-1]}"
    return f"layer{'' if len(layers) == 1 else 's'} {names(runs)}"


def is_of_few(place: Place, found: SinksFound) -> bool:
    """Whether so few heads sink at a place that no headline calls it another sink."""
    return (place.sinking or 0) < LEAST_SHARE_OF_HEADS * found.num_heads


def place_and_token(place: Place) -> str:
    """``position 2, mostly “.”``: a place and the token that stands there."""
    token = place.token_there if place.kind == "position" else None
    if token is None or token in place.name:
        return place.name
    shown = quote(token if len(token) <= 20 else f"{token[:19]}…")
    return f"{place.name}, {'mostly ' if (place.token_share or 0.0) < 1.0 else ''}{shown}"


def bos_words(bos: object, bos_name: str) -> str:
    """``with BOS`` or ``without BOS``; empty where there is nothing to be with or without."""
    return f"{'with' if bos else 'without'} {bos_name}" if bos_name else ""


def condition_name(corpus: str, bos: object, found: AuditFound) -> str:
    """A corpus in words, and whether its samples begin with BOS, or what the model has for it."""
    made_up = {"random_tokens": "random tokens", "repeated_token": "one token repeated", "noise": "noise"}
    made_up |= {"constant": "one grey" if found.kind == "image" else "one tone", "chirps": "synthetic chirps"}
    what = {"image": "pictures", "audio": "sound"}.get(found.kind, "natural text")
    words = "" if bos is None else bos_words(bos, found.bos_name)
    return ", ".join(filter(None, (made_up.get(corpus, f"{what} · {corpus}"), words)))


def loss_unit(found: AuditFound) -> str:
    """What the loss is counted in: ``nats per token``; of a masked-LM loss ``nats per hidden token``."""
    units = {"masked token": "nats per hidden token", "target token": "nats per target token", "class": "nats per sample"}
    return units.get(str(found.loss_kind), "nats per token")


def samples_of(found: AuditFound) -> str:
    """How many samples there are, and of how many tokens or positions."""
    return f"{counted(found.samples, 'sample')} of {counted(found.seq_len, 'token' if found.reads_text else 'position')}"


def heads_words(places: Sequence[tuple[int, int, str, float]], most: int = 4) -> str:
    """Heads as layer.head, the strongest ones by name."""
    return names([f"{layer}.{head}" for layer, head, *_ in places], most) or number(None)


LISTED = 5
"""Places that a terminal lists besides the strongest; summary.json has more, the table all."""

Row = tuple[str, ...]


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The answer, then each section."""
    found = from_json(AuditFound, summary, "summary.json")
    yield Facts([*facts(found), *_elsewhere(found)])
    yield from (Say(text, small=True) for text in (*found.warnings, *found.notes))
    for title, _, blocks in section_blocks(summary):
        yield Heading(title)
        yield from blocks


def section_blocks(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Block]]]:
    """Title, lead and blocks of every section that was asked for."""
    for name, section in sections().items():
        if summary.get(name) is not None:
            yield section.title, section.lead, section.blocks(summary[name])


def facts(found: AuditFound) -> list[Row]:
    """Labels and what belongs to them, the sinks first."""
    rows: list[Row] = [row for view in found.views for row in _sinks(view)]
    if worth := found.front_worth:
        worth_of = f"{worth.gain:.2f} ± {worth.half:.2f} nats a token, on {counted(worth.samples, 'text')}"
        rows.append(("in front", f"{found.bos_name} is worth {worth_of}".replace("-", "−")))
    pictures = {"image": "pictures", "audio": "sound"}.get(found.kind, "text")
    parts = found.parts
    heads = ", ".join(f"{part.num_heads:,} in the {part.part}" for part in parts) if parts else f"{found.num_heads:,}"
    others = sum(found.layers_without_attention.values())
    without = f"; {counted(others, 'layer')} without attention" if others else ""
    corpus = f"{found.corpus} {bos_words(found.bos, found.bos_name)}".rstrip()
    rows += [
        ("model", f"{found.model} ({found.operation} attention, heads: {heads}{without})"),
        (pictures, f"{corpus}, {samples_of(found)}; threshold {found.threshold:g}"),
        ("loss", _loss(found)),
    ]
    if found.tier:
        rows.append(("tier", f"{found.tier}; not measured: {', '.join(found.not_measured)}"))
    if found.samples_definition:
        rows.append(("pairs" if found.kind == "pairs" else "samples", found.samples_definition))
    return rows


def _sinks(view: SinksFound) -> Iterator[Row]:
    """The strongest sink of a model or part, position 0 where that is another, and the places besides."""
    label = view.part or "sink"
    main, places = view.main, [*view.sinks.sinks[1:], *view.sinks.followed]
    others = [place for place in places if not is_of_few(place, view)]
    yield label, _place(main, view) if main is not None else view.finding
    if view.column != 0 and all(place.position != 0 for place in others):
        yield "", f"position 0: sink rate {percent(view.sink_rate_gu2024)}"
    for index, place in enumerate(others[:LISTED]):
        yield "" if index else "also", _place(place, view)
    if len(others) > LISTED:
        yield "", f"{len(others) - LISTED} more"
    if few := len(places) - len(others):
        yield "", f"{counted(few, 'place')} of fewer than {100 * LEAST_SHARE_OF_HEADS:g} % of the heads, in summary.json"
    if grouped := view.grouped:
        share = f"of {counted(grouped.all + grouped.none + grouped.some, 'group')} of {grouped.size} with one key and value"
        yield "heads", f"{share}, all sink in {grouped.all}, none in {grouped.none}, some in {grouped.some}"
    if view.windowed_modules:
        shorter = f"; samples of at most {view.longest_sample:,} tokens (`--seq-len`) do" if view.longest_sample else ""
        seen = f"{view.windowed_modules} of {view.num_modules} attention modules do not show position 0 to half of the queries"
        yield "windows", seen + shorter


def _place(place: Place, view: SinksFound) -> str:
    heads = f"{place.sinking or 0:,} of {view.num_heads:,} heads"
    if place is view.main and view.num_heads > MANY_HEADS and view.sink_layers:
        heads += f" in {layers_words(view.sink_layers)}"
    value = f", value {number(place.value_ratio, 2)} × the mean" if place.value_ratio is not None else ""
    return f"{place_and_token(place)}: {heads}, sink rate {percent(place.rate)}{value}"


def _loss(found: AuditFound) -> str:
    """The loss in its unit; what it is taken of, or why there is none."""
    if found.loss is None:
        if (found.kind, found.loss_kind) == ("image", "next token"):
            return "none: the text is a prompt"
        return "none: no sample has a class" if found.loss_kind == "class" else "not defined for this model"
    if found.bits_per_byte is not None:
        return f"{found.loss:.3f} {loss_unit(found)}, {found.bits_per_byte:.3f} bits per byte"
    what = "" if found.loss_kind == "next token" else f" ({found.loss_definition})"
    return f"{found.loss:.3f} {loss_unit(found)}{what}"


def _elsewhere(found: AuditFound) -> Iterator[Row]:
    """The sink under every condition but the main one."""
    label = "elsewhere"
    for view in found.views:
        for condition in view.conditions[1:]:
            name = f"{condition.corpus} {bos_words(condition.bos, found.bos_name)}".rstrip()
            name = f"{view.part}, {name}" if view.part else name
            rate = "no sink" if condition.sink_rate is None else f"{condition.sink}: {percent(condition.sink_rate)}"
            yield label, f"{name}{_fewer(condition, found)}: {rate}"
            label = ""


def _fewer(condition: Condition, found: AuditFound) -> str:
    """How many samples a condition was read with, where these are fewer than of the main one."""
    return "" if condition.samples in (None, found.samples) else f", {counted(condition.samples or 0, 'sample')}"


def remarks(found: AuditFound) -> list[str]:
    """Sentences that a page has below the numbers."""
    sure = f"A head sinks at a place if it does in more than {100 * LEAST_SHARE:g} % of such samples, with {100 * LEVEL:g} % "
    one = "One sample does not show in how many others a head sinks."
    return [one if found.samples == 1 else f"{sure}confidence.", *found.warnings, *found.notes]


def sinks_grid(found: AuditFound) -> Grid:
    """Every place of the sinks, with its heads; also those that are nearly sinks."""
    kinds = {"sinks": "sink", "followed": "looked at", "silent": "only as a share of its row", "weak": "in too few samples"}
    rows = [
        [
            f"{view.part}: {place_and_token(place)}" if view.part else place_and_token(place),
            words,
            heads_words(place.heads),
            place.sinking,
            Bar(percent(place.rate), place.rate / 100),
            place.mass,
            place.value_ratio,
        ]
        for view in found.views
        for kind, words in kinds.items()
        for place in getattr(view.sinks, kind)
    ]
    headings = [
        "Place",
        "What it is",
        "Heads, strongest first",
        "Heads that sink",
        "Sink rate",
        "Mean weight",
        "Value / mean value",
    ]
    return Grid(headings, rows, text=3)


def conditions_grid(found: AuditFound) -> Grid:
    """The measurement under every condition."""
    rows = [
        [
            (f"{view.part} · " if view.part else "")
            + condition_name(condition.corpus, condition.bos, found)
            + _fewer(condition, found),
            condition.sink,
            "–" if condition.sink_rate is None else Bar(percent(condition.sink_rate), condition.sink_rate / 100),
            Bar(percent(condition.sink_rate_gu2024), condition.sink_rate_gu2024 / 100),
            condition.top_position,
            percent(condition.top_rate),
            condition.loss,
        ]
        for view in found.views
        for condition in view.conditions
    ]
    first = "Tokens" if found.reads_text else "Samples"
    loss = f"Loss, {loss_unit(found)}"
    headings = [first, "Sink", "Its rate", "Rate at position 0", "Strongest position", "Rate there", loss]
    return Grid(headings, rows, text=2)
