"""What the terminal shows of ``sinklab causes``: a table of the heads for each domain, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.run import Result

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
    """Heads with their labels and effects, counts of labels, the sentences of the summary."""
    summary = result.summary
    every = summary["heads"]
    shown = [head for head in every if head["label"] != "undecided"] if len(every) > PER_HEAD else every
    used = [name for name in COLUMNS if any(name in head["effects"] for head in every)]
    for domain in summary["domains"]:
        table = Table(box=None, pad_edge=False)
        for name in ("head", "label", "needs sink", "sink weight", "value", *(COLUMNS[name] for name in used)):
            table.add_column(name, justify="left" if name in ("head", "label", "needs sink") else "right")
        for head in shown:
            label = head["domains"].get(domain, head["label"])
            numbers = (head["sink_weights"].get(domain), head["value_ratios"].get(domain))
            table.add_row(
                f"{head['layer']}.{head['head']}",
                f"[{COLOURS[label]}]{label}[/]",
                {"yes": "yes", "no": "no"}.get(head["needs_sink"].get(domain, ""), "–"),
                *("–" if number is None else f"{number:.2f}" for number in numbers),
                *(_effect(head["effects"].get(name, {}).get(domain)) for name in used),
            )
        yield f"[bold]{escape(domain)}[/bold], change of the loss in {summary['unit']} with its interval"
        yield table
        for head in shown:
            if (reason := head["undecided"].get(domain)) is not None:
                texts = "" if reason["texts"] is None else f"; {reason['texts']:,} texts of {domain} would decide"
                yield Text(f"{head['layer']}.{head['head']} {reason['why']}{texts}")
        yield ""
    if len(shown) < len(every):
        yield f"{len(every) - len(shown)} undecided heads are not shown\n"
    yield f"[bold]{', '.join(f'{count} {label}' for label, count in summary['counts'].items() if count)}[/bold]"
    yield Text(summary["text"])
    if result.folder is not None:
        yield Text(f"\nreport  {result.folder / 'report.html'}")


def _effect(effect: Mapping[str, float] | None) -> str:
    if effect is None or effect["mean"] is None:
        return "–"
    interval = f"[{effect['low']:+z.4f}, {effect['high']:+z.4f}]"
    return f"{effect['mean']:+z.4f} {escape(interval)}"
