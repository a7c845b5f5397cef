"""What the terminal shows of ``sinklab cache``: a row a policy, what was left out and why, and what to use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sinklab.report.policies import HEADINGS, left_out_lines, policy_rows, sampled_line
from sinklab.results.naming import counted
from sinklab.results.run import Result
from sinklab.results.summaries.cache import Comparison, PerHeadEntry, QuantizedEntry
from sinklab.studies.cache.rounding import must_stay_whole
from sinklab.studies.export.display import display_exports
from sinklab.studies.export.writing import FOLDER

__all__ = ["display"]


def display(result: Result) -> Iterator[RenderableType]:
    """The table of the policies and the recommendation."""
    summary = cast(Comparison, result.summary)  # of a result of this command
    shown = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for row in policy_rows(summary):
        shown.add_row(*row)
    bos = "with BOS" if summary["bos"] else "without BOS"
    texts = f"{counted(summary['documents'], 'text')} of {summary['tokens']:,} tokens of {summary['corpus']} {bos}"
    yield Text(f"{summary['model']}: {texts}, scored from token {summary['scored_from']:,} on\n")
    yield shown
    for line in left_out_lines(summary):
        yield Text(f"left out  {line}")
    if line := sampled_line(summary):
        yield Text(line)
    yield Text(f"\n{summary['recommendation']}")
    if "quantized" in summary:
        yield from _quantized(summary["quantized"], summary["documents"])
    if "per_head" in summary:
        yield from _per_head(summary["per_head"])
    if "exports" in summary:
        yield from display_exports(summary["exports"], None if result.folder is None else result.folder / FOLDER)
    if result.folder is not None:
        yield Text(f"\nplot  {result.folder / 'loss.png'}")


def _quantized(entries: list[QuantizedEntry], texts: int) -> Iterator[RenderableType]:
    shown = Table(box=None, pad_edge=False)
    for heading in ("integers", "held", "in full precision", "loss added, nats", "95 %", "bytes"):
        shown.add_column(heading, justify="left" if heading in ("integers", "in full precision") else "right")
    for entry in entries:
        gap, held = entry["gap"], "all" if entry["window"] is None else f"window {entry['window']}"
        interval = "" if gap["low"] is None or gap["high"] is None else f"{gap['low']:+z.4f} to {gap['high']:+z.4f}"
        shown.add_row(
            entry["quantized"], held, entry["whole"], f"{gap['mean']:+z.4f}", interval, f"{entry['bytes_ratio']:.2f} ×"
        )
    yield Text("\nA cache of integers, against the same cache in the model's dtype:\n")
    yield shown
    yield Text(f"\n{must_stay_whole(entries, texts)}")


def _per_head(entries: list[PerHeadEntry]) -> Iterator[RenderableType]:
    shown = Table(box=None, pad_edge=False)
    for heading in (
        "bytes of",
        "chosen by",
        "heads cut",
        "their window",
        "the others'",
        "uniform",
        "per head",
        "95 %",
        "bytes",
    ):
        shown.add_column(heading, justify="left" if heading == "chosen by" else "right")
    for entry in entries:
        gap, heads = entry["gap"], sum(len(layer) for layer in entry["budgets"])
        interval = "" if gap["low"] is None or gap["high"] is None else f"{gap['low']:+z.4f} to {gap['high']:+z.4f}"
        shown.add_row(
            f"{entry['window']:,} tokens", entry["source"], f"{len(entry['cut'])} of {heads}", _sizes(entry["shorter"]),
            _sizes(entry["others"]), f"{entry['uniform_loss']:.3f}", f"{gap['mean']:+z.4f}", interval,
            f"{entry['bytes_ratio']:.3f} ×",
        )  # fmt: skip
    sinks = counted(entries[0]["num_sinks"], "first token") if entries else ""
    yield Text(
        f"\nBudgets per key-value head, each with {sinks}, against the same for all in the same bytes (negative is better):\n"
    )
    yield shown


def _sizes(windows: list[int]) -> str:
    return "–" if not windows else str(windows[0]) if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
