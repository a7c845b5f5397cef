"""What the terminal shows of ``sinklab causes``: a table of the heads for each domain, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.run import Result
from sinklab.results.summaries.causes import Effect, ExaminedGroup, ExaminedHead, Labelled

__all__ = ["display"]

COLOURS = {
    "semantic": "blue", "constant": "cyan", "dormant": "magenta", "broadcast": "green", "unneeded": "white", "switch": "yellow",
    "broadcast-switch": "yellow", "mixed": "yellow", "undecided": "dim",
}  # fmt: skip
COLUMNS = {
    "redirect": "all to the sink",
    "hide": "sink hidden",
    "zero_value": "its value zeroed",
    "zero": "head zeroed",
    "resample": "of another text",
}
"""Interventions that the table shows, with their headings."""

PER_HEAD = 40
"""Heads that the terminal shows; a larger model's undecided ones are in summary.json alone."""


def display(result: Result) -> Iterator[RenderableType]:
    """Heads with their labels and effects, groups of them, counts of labels, the sentences of the summary."""
    summary = result.summary
    every: list[ExaminedHead] = summary["heads"]
    groups: list[ExaminedGroup] = summary["groups"]
    shown = [head for head in every if head["label"] != "undecided"] if len(every) > PER_HEAD else every
    heads = {f"{head['layer']}.{head['head']}": head for head in shown}
    used = [name for name in COLUMNS if any(name in head["effects"] for head in every)]
    for domain in summary["domains"]:
        yield f"[bold]{escape(domain)}[/bold], change of the loss in {summary['unit']} with its interval"
        yield _table("head", heads, domain, used)
        yield from _reasons(heads, domain)
        if groups:
            yield ""
            # Layers and labels are short, and which heads they have stands below.
            yield _table("at once", {group["called"] or group["name"]: group for group in groups}, domain, used)
            for group in groups:
                yield Text(f"{group['name']}, alone {_beside_alone(group, domain)}")
            yield from _reasons({group["name"]: group for group in groups}, domain)
        yield ""
    if len(shown) < len(every):
        yield f"{len(every) - len(shown)} undecided heads are not shown\n"
    yield f"[bold]{', '.join(f'{count} {label}' for label, count in summary['counts'].items() if count)}[/bold]"
    yield Text(summary["text"])
    yield Text(summary["minimal_effect_from"]["text"])
    if result.folder is not None:
        yield Text(f"\nreport  {result.folder / 'report.html'}")


def _table(heading: str, entries: Mapping[str, Labelled], domain: str, used: Sequence[str]) -> Table:
    """A row for every head, or group, by its name."""
    table = Table(box=None, pad_edge=False)
    for name in (heading, "label", "needs sink", "sink weight", "value", *(COLUMNS[name] for name in used)):
        table.add_column(name, justify="left" if name in (heading, "label", "needs sink") else "right")
    for name, entry in entries.items():
        label = entry["domains"].get(domain, entry["label"])
        numbers = (entry["sink_weights"].get(domain), entry["value_ratios"].get(domain))
        table.add_row(
            escape(name),
            f"[{COLOURS[label]}]{label}[/]",
            entry["needs_sink"].get(domain, "–"),  # a model without a sink has none to need
            *("–" if number is None else f"{number:.2f}" for number in numbers),
            *(_effect(entry["effects"].get(name, {}).get(domain)) for name in used),
        )
    return table


def _reasons(entries: Mapping[str, Labelled], domain: str) -> Iterator[Text]:
    """Why heads, or groups, are undecided."""
    for name, entry in entries.items():
        if (reason := entry["undecided"].get(domain)) is not None:
            texts = "" if reason["texts"] is None else f"; {reason['texts']:,} texts of {domain} would decide"
            yield Text(f"{name} {reason['why']}{texts}")


def _beside_alone(group: ExaminedGroup, domain: str) -> str:
    """What the heads of a group are alone, and what they cost together beyond that."""
    alone = ", ".join(f"{count} {label}" for label, count in group["alone"].items())
    more = group["beyond_alone"]["zero"][domain]
    return f"{alone}; an output of 0 costs {more['mean']:+z.4f} [{more['low']:+z.4f}, {more['high']:+z.4f}] more at once"


def _effect(effect: Effect | None) -> str:
    if effect is None:
        return "–"
    interval = f"[{effect['low']:+z.4f}, {effect['high']:+z.4f}]"
    return f"{effect['mean']:+z.4f} {escape(interval)}"
