"""What is shown of the causes of sinks: labels of heads, and what edits do to the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sinklab.results.blocks import Block, Cell, Facts, Grid, HeadMap, Say, interval, names, number
from sinklab.studies.causes.found import Causes, ExaminedGroup, ExaminedHead, Labelled

LABELS: dict[str, tuple[str, str]] = {
    "text-dependent": ("T", "silencing it costs loss, and so does its output on another text"),
    "constant": ("C", "silencing it costs loss, its output on another text costs nothing"),
    "dormant": ("D", "all attention on the sink costs nothing, hiding the sink costs loss: the head rests there"),
    "bias": ("B", "all attention on the sink costs nothing, its value is missed, and its mean over texts does as well"),
    "broadcast": ("M", "all attention on the sink costs nothing, and its value is missed: a message, for which no mean does"),
    "unneeded": ("U", "neither silencing it nor removing its sink costs loss"),
    "switch": ("W", "text-dependent on some domains, at rest on the others"),
    "active": ("A", "silencing it costs loss; whether a constant would do is not shown"),
    "needs-sink": ("N", "hiding its sink costs loss; what it needs of it, and does beside, is not shown"),
    "slight": ("S", "neither silence nor a hidden sink costs an even share of what attention is worth; below that it is open"),
    "mixed": ("X", "its labels differ by domain in another way"),
    "undecided": ("·", "none of these is shown at the error rate asked for"),
    "not-run": ("?", "not measured within the budget; the screen's estimate is no verdict"),
}
"""Label to the letter in the map and its meaning."""
EDITS = {
    "redirect": "all to sink", "hide": "sink hidden", "zero_value": "its value 0", "mean_sink": "its mean", "zero": "output 0",
    "resample": "other text",
}  # fmt: skip
"""Edits of a head, as tables head them."""
CONTRASTS = {**EDITS, "hide - zero_value": "share on other keys, less on none"}
"""Contrasts of the table with intervals; summary.json has all, with p-values."""
SHOWN = 40
"""Heads in a table and a figure; of a larger model the ones of which most is decided, then those whose edits cost most."""
OPEN = ("slight", "undecided")
"""Labels that say little, or nothing."""
PART = (*OPEN, "active", "needs-sink")
"""Those that say no more than a part."""
STRONG = 10
"""Rows of lists that may be long."""


def show(found: Causes) -> Iterator[Block]:
    """Counts of labels first, then what edits of every head do, by domain, then groups."""
    counts = [f"{count} {label}" for label, count in found.counts.items() if count]
    where = f"the sink is {found.sink.name}" if found.sink.name else "read as a model without a sink"
    yield Say(f"{len(found.heads)} head{'s' * (len(found.heads) != 1)}: {names(counts, len(LABELS))}; {where}.")
    yield Facts(list(_facts(found)))
    yield HeadMap(
        "Labels of heads",
        {(head.layer, head.head): (LABELS[head.label][0], head.label, _words(head)) for head in found.heads},
        [(label, letter, found.counts[label], words) for label, (letter, words) in LABELS.items() if found.counts.get(label)],
    )
    run = [head for head in found.heads if head.label != "not-run"]
    order = sorted(run, key=lambda head: (head.label in OPEN, -_size(head)))
    if len(run) <= SHOWN:
        order.sort(key=lambda head: (head.layer, head.head))
    for domain in found.domains:
        yield from _domain(found, domain, order[:SHOWN])
    reasons = [
        [_name(entry), domain, why.nearest, ", ".join(why.not_shown)]
        for entry in (*order, *found.groups)
        for domain, why in entry.undecided.items()
    ]
    if reasons:
        yield Grid(["undecided", "on", "nearest", "not shown"], reasons, text=4, limit=STRONG)
    yield from _screen(found)
    yield from (Say(note, small=True) for note in found.notes)


def _facts(found: Causes) -> Iterator[Sequence[str]]:
    if needing := [_name(head) for head in found.heads if "yes" in head.needs_sink.values()]:
        yield "need it", f"{names(needing)}: their share of the sink costs more on other keys than on none"
    if known := sorted(_known(found), reverse=True):
        yield "known", "; ".join(words for _, words in known[:3]) + f" {found.unit}; what more they do is not decided"
    if found.budget is not None:
        left = found.counts.get("not-run", 0)
        yield (
            "budget",
            f"{found.budget:g} s: {len(found.heads) - left} of {len(found.heads)} heads measured, most informative first",
        )
    yield "texts", f"{found.texts:,} of {names(found.domains)}"
    minimal, costs = found.minimal_effect_from, found.minimal_effect_from.worth.get(found.minimal_effect_from.domain or "", {})
    why = "as asked for" if minimal.by == "given" else "all attention is not shown to be worth more"
    if costs:
        worth = interval(min(costs.values(), key=lambda cost: cost.mean), 2, "")
        why = f"of {worth} that all attention is worth, a twentieth of the share of one of {minimal.heads} {minimal.of}"
    yield "nothing is", f"a change below {minimal.value:g} {found.unit}: {why}"
    if found.counts.get("slight"):
        yield "slight is", f"below {20 * minimal.value:g} {found.unit}, an even share, shown of silence and of a hidden sink"
    yield "errors", f"at most {100 * found.level:g} % of the labels are expected to be false (Benjamini and Hochberg 1995)"


def _known(found: Causes) -> Iterator[tuple[float, str]]:
    """Edits that cost more than an even share of heads that have no whole label: the cost, and the words."""
    for head in found.heads:
        costs = {
            name: max(effects.values(), key=lambda effect: effect.low)
            for name in EDITS
            if head.label in PART and (effects := head.effects.get(name))
        }
        dearest = max(costs, key=lambda name: costs[name].low, default="")
        if dearest and costs[dearest].low > 20 * found.minimal_effect:
            yield costs[dearest].mean, f"{_name(head)} with {EDITS[dearest]} {interval(costs[dearest], 2)}"


def _domain(found: Causes, domain: str, shown: Sequence[ExaminedHead]) -> Iterator[Block]:
    """Tables of means, and one of all with their intervals."""
    places = max(0, 1 - math.floor(math.log10(found.minimal_effect)))
    used = [name for name in CONTRASTS if any(name in head.effects for head in found.heads)]
    edits = [name for name in EDITS if name in used]
    more = f", {len(shown)} of {len(found.heads)} heads" if len(shown) < len(found.heads) else ""
    heads = [
        [
            _name(head), head.domains[domain], head.needs_sink.get(domain), head.sink_weights[domain],
            *(_mean(head, name, domain, places) for name in edits),
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
                *(_mean(group, name, domain, places) for name in edits),
            ]
            for group in found.groups
            if group.label != "not-run"
        ]  # fmt: skip
        headings = ["at once", "label", "needs sink", "alone", *(EDITS[name] for name in edits)]
        yield Grid(headings, groups, text=4)
    every = [
        [
            _name(entry), entry.domains[domain], entry.value_ratio,
            *(interval(entry.effects.get(name, {}).get(domain), places) for name in used),
        ]
        for entry in (*found.heads, *found.groups)
        if entry.label != "not-run"
    ]  # fmt: skip
    title = f"Every head on {domain}, with the length of its sink's value and 95 % intervals over texts"
    yield Grid(["head", "label", "|value|", *(CONTRASTS[name] for name in used)], every, title, folded=True, text=2)


def _screen(found: Causes) -> Iterator[Block]:
    """What the screen expects of heads that were not measured."""
    left = sorted((head for head in found.heads if head.label == "not-run"), key=lambda head: -_expected(head))
    names = [name for name in EDITS if any(name in head.estimates for head in left)]
    rows: list[list[Cell]] = [[_name(head), *(number(head.estimates.get(name)) for name in names)] for head in left]
    if names:
        title = "Not measured: what the screen expects, which is no verdict"
        yield Grid(["head", *(EDITS[name] for name in names)], rows, title, limit=STRONG, folded=True)


def _expected(head: ExaminedHead) -> float:
    return max(map(abs, head.estimates.values()), default=0.0)


def _size(head: ExaminedHead) -> float:
    return max((abs(effect.mean) for name in EDITS for effect in head.effects.get(name, {}).values()), default=0.0)


def _mean(entry: Labelled, name: str, domain: str, places: int) -> Cell:
    effect = entry.effects.get(name, {}).get(domain)
    return None if effect is None else interval({"mean": effect.mean}, places)


def _name(entry: Labelled) -> str:
    """``layer.head``; of a group its short name."""
    if isinstance(entry, ExaminedHead):
        return f"{entry.layer}.{entry.head}"
    assert isinstance(entry, ExaminedGroup)
    return entry.called or entry.name


def _words(head: ExaminedHead) -> str:
    of = ", ".join(f"{label} on {domain}" for domain, label in head.domains.items()) if len(head.domains) > 1 else ""
    return f"Layer {head.layer}, head {head.head}: {head.label}{f' ({of})' * bool(of)}"
