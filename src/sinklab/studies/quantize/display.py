"""What the terminal shows of ``sinklab quantize``: schemes, the sites that cost most, cures, and what they come to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.report.quantize import scheme_name
from sinklab.report.words import number
from sinklab.results.naming import counted, size
from sinklab.results.run import Result
from sinklab.results.summaries.quantize import QuantizeSummary
from sinklab.studies.quantize.verdict import sample_noun

__all__ = ["display"]

SHOWN = 8
"""Sites that the terminal shows; all are in summary.json."""


def display(result: Result) -> Iterator[RenderableType]:
    """Three tables and a few sentences; two tables fewer where there is no gap."""
    summary = cast(QuantizeSummary, result.summary)  # of a result of this command
    unit = summary["unit"]
    share = 100 * summary["quantized_share"]
    yield Text(
        f"{summary['model']}: {counted(summary['texts'], 'sample')} of {summary['corpus']}, ranges from "
        f"{counted(summary['calibration'], 'other')}; loss of the {summary['loss_of']} {summary['clean_loss']['mean']:.3f} "
        f"{unit}; {share:.0f} % of parameters on grids, {size(summary['float_bytes'])} in 16 bits\n"
    )
    table = _table("scheme", "loss", "gap [95 %]", "verdict", "weights", "computed by")
    for scheme in summary["schemes"]:
        verdict = scheme["verdict"] + (", the loss falls" if scheme["high"] < 0 else "")
        if scheme["texts_needed"]:
            verdict += f" ({scheme['texts_needed']:,} {sample_noun(summary)}s would do)"
        table.add_row(
            scheme_name(scheme), f"{scheme['loss']:.3f}", escape(_interval(scheme["gap"], scheme["low"], scheme["high"])),
            verdict, size(scheme["weight_bytes"]), scheme["products"],
        )  # fmt: skip
    yield table
    if summary["sites"]:
        yield f"\n[bold]Alone on grids under {summary['examined'].upper()}[/bold], the most costly of {len(summary['sites'])}"
        table = _table("site", "gap", "channel", "times median", "at")
        for site in sorted(summary["sites"], key=lambda site: -site["gap"])[:SHOWN]:
            where = "many positions" if site["everywhere"] else ", ".join(site["tokens"][:4])
            table.add_row(
                escape(site["site"]), escape(_interval(site["gap"], site["low"], site["high"])), str(site["channel"]),
                number(site["range_ratio"]), escape(where) or "–",
            )  # fmt: skip
        yield table
    if summary["cures"]:
        yield "\n[bold]Cures[/bold]"
        table = _table("cure", "gap left", "products whole", "activations whole", "more bytes")
        for cure in sorted(summary["cures"], key=lambda cure: cure["left"]["mean"]):
            left = cure["left"]
            table.add_row(
                cure["cure"], escape(_interval(left["mean"], left["low"], left["high"])), f"{100 * cure['share_whole']:.2f} %",
                f"{100 * cure['activations_whole']:.2f} %", size(cure["extra_bytes"]),
            )  # fmt: skip
        yield table
    if summary["sinks_refused"]:
        yield Text(f"\nno sinks are known: {summary['sinks_refused']}")
    yield Text(f"\n{summary['text']}")
    recipe = summary["recipe"]
    for name, reason in (recipe["refused"] if recipe else {}).items():
        yield Text(f"no recipe for {name}: {reason}")
    if result.folder is not None:
        yield Text(f"\nfigure  {result.folder / 'quantize.png'}")
        for name in recipe["files"] if recipe else ():
            yield Text(f"recipe  {result.folder / name}")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for at, heading in enumerate(headings):
        table.add_column(escape(heading), justify="right" if at and heading not in ("verdict", "at", "computed by") else "left")
    return table


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:+z.3f} [{low:+z.3f}, {high:+z.3f}]"
