"""What was found of origins, their rows, and how they are shown: on the terminal, the page and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from sinklab.results.blocks import Block, Cell, Curves, Facts, Grid, Heading, HeadMap, Say, counted, interval, names, number
from sinklab.results.intervals import Interval
from sinklab.results.metric import Coordinates, Metric, Row

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

    ``own`` heads are those that give the place most; of these ``kept`` is the share above uniform attention that silenced
    units leave."""

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
    """Rows of the long table about one place; ``heads`` are module, layer, head and weight of all; ``samples`` have it."""
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


GONE, STAYS = 0.25, 0.5
"""Share of a spike, or of a sink's weight above a uniform one, up to which it is gone, and from which on it stays."""

_SUBLAYERS = {"attention": "attention", "cross-attention": "cross-attention", "mlp": "MLP", "block": "as a whole"}
_VERBS = {"gone": "goes", "weakened": "weakens", "stays": "stays", "open": "may go or stay"}
_ON = {"units": "{units}", "controls": "random", "write": "the whole write", "channels": "channels"}


def show(found: Origins) -> Iterator[Block]:
    """Each place with its births, and each of these with its finding, its edits, and what is behind them."""
    for origin in found.origins:
        if origin.birth == 1:
            yield Heading(f"{origin.kind.capitalize()} at {origin.description}", 3)
            yield from _place([one for one in found.origins if one.place == origin.place])
        else:
            yield Heading(f"Born again in block {origin.block}", 4)
        yield Say(origin.verdict)
        yield Facts(list(_facts(origin)))
        if origin.edits:
            yield Grid(["Edit", "Loss, nats", "Weight", "kept", "Spike", "kept"], list(_edits(origin)))
        yield Grid(
            ["Head", "Weight on it", "If attention were uniform", "Units silenced", "Whole write 0"],
            [
                [_head(head), head.weight, head.uniform, head.edited.get("units zero"), head.edited.get("write zero")]
                for head in origin.heads
            ],
            f"Heads that look at it, the {sum(head.own for head in origin.heads)} that are counted first", folded=True,
        )  # fmt: skip
    for note in found.notes:
        yield Say(note, small=True)
    if found.origins:
        unchanged = "" if found.loss is None else f" from {found.loss:.3f} of the model as it is"
        yield Say(
            f"{counted(found.samples, 'sample')}. Loss: change{unchanged}, with 95 % interval. Weight: mean over the heads "
            "behind the origin that give the place at least half as much as the strongest of them; kept: of what exceeds "
            "uniform attention. Spike: largest over median size of a state. Random: as many units of the same sublayer, "
            f"{counted(found.controls, 'draw')}, one a sample.", small=True,
        )  # fmt: skip


def _place(births: Sequence[Origin]) -> Iterator[Block]:
    """Of a place its norms, and of one that is born again who rests on which birth."""
    origin = births[0]
    if len(births) > 1:
        yield Say(story(births))
        cells, legend = dict[tuple[int, int], tuple[str, str, str]](), list[tuple[str, str, int, str]]()
        for letter, one in zip("ABCDEFGH", births, strict=False):
            own, kind, words = [head for head in one.heads if head.own], f"birth-{one.birth}", f"rests on block {one.block}"
            cells |= {(head.layer, head.head): (letter, kind, f"{_head(head)} {words}") for head in own}
            legend.append((kind, letter, len(own), words))
        yield HeadMap("Which birth a head rests on", cells, legend)
    stages = range(-1, len(origin.norms.place) - 1)
    norms = {origin.place: origin.norms.place, "other tokens": origin.norms.others}
    yield Curves("Norm by block", norms, stages, "block; −1 is what enters the first", logarithmic=True, mark=origin.block)


def story(births: Sequence[Origin]) -> str:
    """Of a place that is born more than once, in which blocks, and the heads of which layers rest on each; else nothing."""
    if len(births) < 2:
        return ""
    parts = []
    for one in births:
        own = [head.layer for head in one.heads if head.own]
        parts.append(f"block {one.block} ({len(own)} heads of layers {min(own)}–{max(own)})" if own else f"block {one.block}")
    return f"The {births[0].kind} at {births[0].place} is born {len(births)} times: {names(parts, 4)}."


def finding(origin: Origin) -> str:
    """Where it is born, how much its units write, and whether spike and sink go with them; at most 160 characters."""
    return f"{'; '.join(filter(None, (_birth(origin), _written(origin), _parting(origin))))}."


def _birth(origin: Origin) -> str:
    there = f"block {origin.block}, {_SUBLAYERS.get(origin.sublayer or '', '')}"
    if origin.by == "norm":
        again = "Born" if origin.birth == 1 else "Born again"
        return "Its embedding stands out before the first block" if origin.block is None else f"{again} in {there}"
    return "No jump of its norm where it matters"


def _written(origin: Origin) -> str:
    if origin.norm is None or not origin.units:
        return "the write is not split into units" if origin.not_split else ""
    share = sum(unit.along for unit in origin.units) / origin.norm if origin.norm else 0.0
    verb, called = "writes" if len(origin.units) == 1 else "write", counted(len(origin.units), str(origin.unit_kind))
    if len(origin.units) < 4:
        called = f"{origin.unit_kind}{'s' * (len(origin.units) > 1)} {names([str(unit.unit) for unit in origin.units])}"
    return f"{called} {verb} {100 * share:.0f} %"


def _parting(origin: Origin) -> str:
    """Whether spike and sink go together when the units are silenced: what the experiment is for."""
    edit = origin.edit("units", "zero")
    if edit is None:
        return ""
    said = [f"the spike {_VERBS[grade(edit.spike_kept)]}"] if origin.spiked else []
    if origin.kind == "sink" and edit.weight_kept is not None:
        lost, kept, unknown = heads_that_lose(origin)
        does = _VERBS[grade(edit.weight_kept)]
        if lost and kept:  # what covers most heads is said
            does, most = ("stays", kept) if len(kept) > len(lost) else ("goes", lost)
            does = f"{does} in {len(most)} of {len(lost + kept + unknown)} heads"
        said.append(f"the sink {does}")
    return f"silenced, {' and '.join(said)}" if said else ""


def grade(kept: Interval) -> str:
    """``gone``, ``weakened`` or ``stays`` by the share that is left; ``open`` where the interval reaches from gone to stays."""
    if kept.low <= GONE and kept.high >= STAYS:
        return "open"
    return "gone" if kept.mean <= GONE else "stays" if kept.mean >= STAYS else "weakened"


def heads_that_lose(origin: Origin) -> tuple[list[HeadWeight], list[HeadWeight], list[HeadWeight]]:
    """The heads of a place that lose it with the units silenced, by what exceeds uniform attention, those that do not, and
    those whose interval reaches from the one to the other."""
    lost, kept, unknown = list[HeadWeight](), list[HeadWeight](), list[HeadWeight]()
    for head in origin.heads:
        weight, uniform, edited = head.weight, head.uniform, head.edited.get("units zero")
        if head.own and weight is not None and uniform is not None and edited is not None and weight > uniform:
            gone = (edited - uniform) / (weight - uniform) <= GONE
            unsure = head.kept is not None and grade(head.kept) == "open"
            (unknown if unsure else lost if gone else kept).append(head)
    return lost, kept, unknown


def _facts(origin: Origin) -> Iterator[tuple[str, str]]:
    change = f"{number(origin.before)} to {number(origin.after)} times that of other tokens"
    yield "norm", change if origin.by == "norm" else f"at most {number(origin.peak)} times that of other tokens"
    if (death := origin.death) is not None:
        there = f"block {death.block}, {_SUBLAYERS.get(death.sublayer, '')}"
        yield "gone", f"{there} takes the norm from {number(death.before)} to {number(death.after)}"
    if origin.units and origin.norm is not None:
        written = sum(unit.along for unit in origin.units)
        yield ("written", f"{number(written)} of {number(origin.norm)} by {names([unit.name for unit in origin.units], 8)}")
        first = origin.channels[0]
        if first.share >= 0.5:
            inside = sum(unit.in_channel for unit in origin.units)
            yield "", f"{number(inside)} of {number(first.value)} in channel {first.channel}"
    if origin.not_split:
        yield "not split", origin.not_split


def _head(head: HeadWeight) -> str:
    return f"{head.layer}.{head.head}"


def _edits(origin: Origin) -> Iterator[list[Cell]]:
    """The model as it is, then every edit."""
    units = counted(len(origin.units), str(origin.unit_kind))
    yield ["as it is", "", number(origin.weight, 2), "", number(origin.spike) if origin.spiked else None, ""]
    for edit in origin.edits:
        spike: list[Cell] = [edit.spike, interval(edit.spike_kept, 2, "")] if origin.spiked else [None, None]
        changed = [interval(edit.loss, 3), number(edit.weight, 2), interval(edit.weight_kept, 2, ""), *spike]
        yield [f"{_ON[edit.on].format(units=units)}: {edit.edit}", *changed]
