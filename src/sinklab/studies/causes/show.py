"""What is shown of the causes of sinks: labels of heads, what edits do to the loss, and the experiments on the sink."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sinklab.results.blocks import Bar, Block, Curves, Facts, Grid, Heading, HeadMap, Mark, Marks, Say, interval, names, number
from sinklab.results.intervals import Interval
from sinklab.studies.causes.found import (
    Causes,
    ExaminedGroup,
    ExaminedHead,
    KeyBias,
    Labelled,
    Location,
    Massive,
    Refused,
    Spread,
    ThreeMetrics,
)  # fmt: skip

__all__ = ["show"]

LABELS: dict[str, tuple[str, str]] = {
    "semantic": ("S", "silencing it costs loss, and so does its output on another text"),
    "constant": ("C", "silencing it costs loss, its output on another text costs nothing"),
    "dormant": ("D", "all attention on the sink costs nothing, hiding the sink costs loss: the head rests there"),
    "broadcast": ("B", "all attention on the sink costs nothing, zeroing the sink's value costs loss"),
    "unneeded": ("U", "neither silencing it nor removing its sink costs loss"),
    "switch": ("W", "semantic on some domains or at some positions, dormant on the others"),
    "broadcast-switch": ("V", "semantic on some domains; on others it rests, and the sink's value is used"),
    "mixed": ("M", "its labels differ by domain in another way"),
    "undecided": ("·", "none of these is shown at the error rate asked for"),
}
"""Label to the letter in the map and its meaning."""
EDITS = {
    "redirect": "all to sink", "hide": "sink hidden", "zero_value": "its value 0", "zero": "output 0", "resample": "other text",
}  # fmt: skip
"""Edits of a head, as tables head them."""
CONTRASTS = {
    **EDITS, "hide - zero_value": "share on other keys, less on none", "rotated": "random outputs",
    "redirect control - redirect": "all to another key, less the sink",
}  # fmt: skip
"""Contrasts of the table with intervals; summary.json has all, with p-values."""
SHOWN = 40
"""Heads in a figure; of a larger model the ones that are decided and hurt most."""
STRONG = 10
"""Rows of lists that may be long."""


def show(found: Causes) -> Iterator[Block]:
    """Counts of labels first, then what edits of every head do, by domain, then groups and experiments."""
    counts = [f"{count} {label}" for label, count in found.counts.items() if count]
    where = f"the sink is {found.sink.name}" if found.sink.name else "read as a model without a sink"
    yield Say(f"{len(found.heads)} head{'s' * (len(found.heads) != 1)}: {names(counts, len(LABELS))}; {where}.")
    yield Facts(list(_facts(found)))
    yield HeadMap(
        "Labels of heads",
        {(head.layer, head.head): (LABELS[head.label][0], head.label, _words(head)) for head in found.heads},
        [(label, letter, found.counts[label], words) for label, (letter, words) in LABELS.items() if found.counts.get(label)],
    )
    order = sorted(found.heads, key=lambda head: (head.label == "undecided", -_size(head)))
    for domain in found.domains:
        yield from _domain(found, domain, sorted(order[:SHOWN], key=lambda head: (head.layer, head.head)))
    reasons = [
        [_name(entry), domain, why.nearest, ", ".join(why.not_shown), why.texts]
        for entry in (*order, *found.groups)
        for domain, why in entry.undecided.items()
    ]
    if reasons:
        yield Grid(["undecided", "on", "nearest", "not shown", "texts that would decide"], reasons, text=4, limit=STRONG)
    yield from (Say(note, small=True) for note in found.notes)
    for name, (title, blocks) in EXPERIMENTS.items():
        if (experiment := getattr(found, name)) is not None:
            yield Heading(title, 3)
            refused = isinstance(experiment, Refused)
            yield from [Say(f"Not measured: {experiment.refused}", small=True)] if refused else blocks(experiment)


def _facts(found: Causes) -> Iterator[Sequence[str]]:
    if needing := [_name(head) for head in found.heads if "yes" in head.needs_sink.values()]:
        yield "need it", f"{names(needing)}: their share of the sink costs more on other keys than on none"
    for domain, count in found.mirrored.items():
        if count:
            semantic = sum(head.domains[domain] == "semantic" for head in found.heads)
            yield "mirrored", f"{count} on {domain}, every silencing of which lowers the loss; {semantic} semantic there"
    more = "" if found.texts_needed is None else f"; {found.texts_needed:,} of a domain would decide half of the undecided"
    yield "texts", f"{found.texts:,} of {names(found.domains)}{more}"
    minimal, costs = found.minimal_effect_from, found.minimal_effect_from.worth.get(found.minimal_effect_from.domain or "", {})
    why = "as asked for" if minimal.by == "given" else "all attention is not shown to be worth more"
    if costs:
        worth = interval(min(costs.values(), key=lambda cost: cost.mean), 2, "")
        why = f"of {worth} that all attention is worth, a twentieth of the share of one of {minimal.heads} heads"
    yield "nothing is", f"a change below {minimal.value:g} {found.unit}: {why}"
    yield "errors", f"at most {100 * found.level:g} % of the labels are expected to be false (Benjamini and Hochberg 1995)"


def _domain(found: Causes, domain: str, shown: Sequence[ExaminedHead]) -> Iterator[Block]:
    """Tables of means, a figure with their intervals, and a table of all."""
    places = max(0, 1 - math.floor(math.log10(found.minimal_effect)))
    used = [name for name in CONTRASTS if any(name in head.effects for head in found.heads)]
    edits = [name for name in EDITS if name in used]
    more = f", {len(shown)} of {len(found.heads)} heads" if len(shown) < len(found.heads) else ""
    heads = [
        [
            _name(head), head.domains[domain], head.needs_sink.get(domain), head.sink_weights.get(domain),
            *(interval({"mean": head.effects[name][domain].mean}, places) for name in edits),
        ]
        for head in shown
    ]  # fmt: skip
    title = f"Change of the loss on {domain}, {found.unit}{more}"
    yield Grid(["head", "label", "needs sink", "on sink", *(EDITS[name] for name in edits)], heads, title, text=3)
    if found.groups:
        groups = [
            [
                _name(group), group.domains[domain], group.needs_sink.get(domain),
                names([f"{count} {label}" for label, count in group.alone.items()]),
                interval({"mean": group.effects["zero"][domain].mean}, places),
                interval(group.beyond_alone["zero"][domain], places),
            ]
            for group in found.groups
        ]  # fmt: skip
        yield Grid(["at once", "label", "needs sink", "alone", EDITS["zero"], "beyond the sum of each alone"], groups, text=4)
    marks = [
        (
            f"{_name(head)} {head.domains[domain]}",
            [
                Mark(EDITS[name], effect.mean, effect.low, effect.high)
                for name in edits
                for effect in [head.effects[name][domain]]
            ],
        )
        for head in shown
    ]
    yield Marks(f"Edits of a head on {domain}", marks, unit=found.unit, least=found.minimal_effect)
    every = [
        [
            _name(entry), entry.domains[domain], entry.value_ratios.get(domain),
            *(interval(entry.effects.get(name, {}).get(domain), places) for name in used),
        ]
        for entry in (*found.heads, *found.groups)
    ]  # fmt: skip
    title = f"Every head on {domain}, with the length of its sink's value and 95 % intervals over texts"
    yield Grid(["head", "label", "|value|", *(CONTRASTS[name] for name in used)], every, title, folded=True, text=2)


def _three_metrics(found: ThreeMetrics) -> Iterator[Block]:
    many, used = len(found.heads) > SHOWN, list(found.meanings)
    items = found.layers if many else found.heads
    most = {name: max((abs(item[name] or 0.0) for item in items.values()), default=0.0) for name in used}
    rows = [[name, *(_bar(item[column], most[column]) for column in used)] for name, item in items.items()]
    yield Grid(["layer" if many else "head", *used], rows, limit=STRONG)
    yield from (Say(f"{name}: {meaning}", small=True) for name, meaning in found.meanings.items())
    pairs = [
        [pair.first, pair.second, interval({"mean": pair.rho, "low": pair.low, "high": pair.high}, 2), pair.reading]
        for pair in found.correlations
        if pair.over == "heads"
    ]
    yield Grid(["over heads", "and", "rank correlation", "reading"], pairs, text=2)
    quiet = [("quiet", f"{names(found.quiet)}: their sink there, and no loss without it")] if found.quiet else []
    needy = [("needy", f"{names(found.needy)}: no sink there, and a loss where it is hidden")] if found.needy else []
    if quiet or needy:
        yield Facts([*quiet, *needy])


def _location(found: Location) -> Iterator[Block]:
    if found.follows is not None:
        yield Say(f"Moved, the sink of head {found.head} goes with the {found.follows}.")
    index, rows = found.heads.index(found.head), []
    for state in found.conditions.values():
        top, first = state.strongest[0] if state.strongest else None, state.first_token_at
        rows.append([
            state.name, state.at_place[index], "gone" if first is None else f"{number(state.at_first_token[index])} at {first}",
            "–" if top is None else f"{number(top.weight)} at {top.position}, head {top.head}", interval(state.loss, 3),
        ])  # fmt: skip
    place = f"positions {', '.join(map(str, found.place))}" if isinstance(found.place, list) else f"position {found.place}"
    place = "null score" if found.place == "null" else place
    headings = ["texts", f"head {found.head} on {place}", "on the first token", "strongest of any head", f"loss, {found.unit}"]
    yield Grid(headings, rows)
    yield from (Say(f"Left out: {name}, because {why}.", small=True) for name, why in found.left_out.items())


def _key_bias(found: KeyBias) -> Iterator[Block]:
    edits = {"zero_value": "the sink's values at 0", "constant_score": "its score made constant"}
    suffixes = {
        "": "", " control": ", of a random other key", " beyond control": ", the difference",
        " of sink heads": f", in {names(found.sink_heads)} alone",
    }  # fmt: skip
    losses = {edit + suffix: edits[edit] + words for edit in edits for suffix, words in suffixes.items()}
    rows = [
        [words, interval(found.losses[name]), _verdict(found.losses[name], found.minimal_effect)]
        for name, words in losses.items()
        if name in found.losses
    ]
    yield Grid(["in all heads at once", f"loss, {found.unit}", "is"], rows)
    fields = [name for name in found.heads[0].__dataclass_fields__ if name not in ("head", "module")]
    scores = [[one.head, *(getattr(one, name) for name in fields)] for one in found.heads]
    title = "How every head scores the sink, and other keys"
    yield Grid(["head", *(name.replace("_", " ") for name in fields)], scores, title, folded=True)


def _massive(found: Massive) -> Iterator[Block]:
    count = len(found.found)
    criterion = f"above {found.least:g} and {found.times_median:g} times the median of its hidden state"
    yield Say(f"{count or 'No'} value{'s' * (count != 1)} {'are' if count > 1 else 'is'} {criterion}.")
    if found.found:
        rows = [
            [str(one.position), one.channel, one.birth, one.death, one.texts, one.value, one.deviation] for one in found.found
        ]
        yield Grid(["position", "channel", "born in layer", "gone in", "texts", "value", "deviation"], rows, limit=STRONG)
        weights = [-1.0 if weight is None else weight for weight in found.sink_weights or []]
        more = [f"head {found.heads[head := weights.index(max(weights))]} on the sink"] if weights else []
        edits = [
            [name, interval(edit.loss), *((edit.sink_weights or [])[head : head + 1] if more else ())]
            for name, edit in found.edits.items()
        ]
        yield Grid(["set in the layer of birth", f"loss, {found.unit}", *more], edits)
    peaks = {
        "largest": [peak["value"] for peak in found.peaks],
        "times the median": [peak["times_median"] for peak in found.peaks],
    }
    yield Curves("Largest activation", peaks, [peak["layer"] for peak in found.peaks], x_name="layer", logarithmic=True)


def _spread(found: Spread) -> Iterator[Block]:
    ratio, control = found.ratios["no sink"], found.ratios["control"]
    verdict = "A replaced token changes no other one."
    if ratio is not None and control is not None:
        side = "farther" if ratio.low > 1 else "less" if ratio.high < 1 else ""
        clear = ratio.low > 1.05 * control.high if side == "farther" else 1.05 * ratio.high < control.low
        verdict = f"Without the sink changes spread {side}, {'' if clear else 'not clearly '}more so than without another key."
        if ratio.low > 1 / 1.05 and ratio.high < 1.05:
            verdict = "The sink makes no difference of 5 % or more."
        elif not side:
            verdict = "Whether the sink holds changes back stays open."
    yield Say(verdict)
    rows = [[name, interval(found.ratios[name], 2, ""), interval(loss)] for name, loss in found.losses.items()]
    yield Grid(["hidden", "spread, times that of the model as it is", f"loss, {found.unit}"], rows)
    yield Curves("Relative change of later tokens", found.totals, found.layers, x_name="layer", logarithmic=True)


EXPERIMENTS: dict[str, tuple[str, Callable[[Any], Iterator[Block]]]] = {
    "read_outs": ("Three things that are not the same", _three_metrics),
    "location": ("Where the sink goes", _location),
    "key_bias": ("Is what stands at the sink used?", _key_bias),
    "massive": ("Massive activations", _massive),
    "spread": ("Does the sink keep changes from spreading?", _spread),
}
"""Experiment to its heading and its blocks."""


def _verdict(loss: Interval, least: float) -> str:
    """Whether the change of a loss is nothing, missed, harm, or open."""
    if max(abs(loss.low), abs(loss.high)) < least:
        return "nothing"
    return "harm" if loss.high <= -least else "missed" if loss.low >= least else "open"


def _bar(value: float | None, most: float) -> Bar | None:
    return None if value is None else Bar(value, abs(value) / (most or 1.0), "rest" if value < 0 else "unit")


def _size(head: ExaminedHead) -> float:
    return max((abs(effect.mean) for name in EDITS for effect in head.effects.get(name, {}).values()), default=0.0)


def _name(entry: Labelled) -> str:
    """``layer.head``; of a group its short name."""
    if isinstance(entry, ExaminedHead):
        return f"{entry.layer}.{entry.head}"
    assert isinstance(entry, ExaminedGroup)
    return entry.called or entry.name


def _words(head: ExaminedHead) -> str:
    of = ", ".join(f"{label} on {domain}" for domain, label in head.domains.items()) if len(head.domains) > 1 else ""
    return f"Layer {head.layer}, head {head.head}: {head.label}{f' ({of})' * bool(of)}"
