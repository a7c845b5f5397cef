"""What an audit shows: the sinks first, what they were found on, other conditions, and the sections that were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.results.blocks import Bar, Block, Facts, Grid, Heading, Say, counted, number, percent
from sinklab.results.intervals import LEAST_SHARE, LEVEL
from sinklab.results.sections import from_json, sections
from sinklab.studies.audit.found import (
    LEAST_SHARE_OF_HEADS,
    MANY_HEADS,
    AuditFound,
    Condition,
    Place,
    SinksFound,
    bos_words,
    condition_name,
    heads_words,
    is_of_few,
    layers_words,
    loss_unit,
    place_and_token,
    samples_of,
)

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
        rows.append(("pairs", found.samples_definition))
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
