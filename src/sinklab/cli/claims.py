"""The command ``sinklab claims``: every published statement that can be run, its source, its cost, and its last verdict."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.cli import output
from sinklab.cli.stated import Stated, stated
from sinklab.errors import UnknownNameError
from sinklab.jobs.claim import SCALES
from sinklab.registry import claims as registered
from sinklab.studies.arguments import AsJson, command

__all__ = ["check_word", "claims", "format_effect", "print_verdicts", "verdict_markup"]


COLOURS = {"reproduced": "green", "not reproduced": "red", "inconclusive": "yellow"}


@command
def claims(
    names: list[str] | None = None,
    *,
    source: str | None = None,
    scale: str = "tiny",
    results: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """List published statements about sinks that can be run, with source, cost and last verdict.

    Args:
        names: All by default; of one, everything is shown.
        source: Only those of a paper, such as gu2024.
        scale: tiny, small, 60m, 1b: the scale that cost and verdict are about.
        results: Output directory of sinklab reproduce; by default ./sinklab-claims if there are results in it, else those that
            come with sinklab.

    Examples:
        sinklab claims
        sinklab claims sink_moves_to_bias
        sinklab claims --source gu2024 --json
        sinklab reproduce repeated_token_laws  (to run one)
    """
    check_word(scale, SCALES, "scale")
    listed = [stated(name) for name in names or registered]
    if source is not None:
        check_word(source, sorted({stated(name).source for name in registered}), "source")
        listed = [claim for claim in listed if claim.source == source]
    known, where = _last_verdicts(results, scale)
    rows = [_row(claim, known.get(claim.name), scale) for claim in listed]
    if as_json:
        output.print_json(rows)
        return
    if names is not None and len(rows) == 1:
        _print_one(rows[0])
    else:
        _print_all(rows, scale)
    print(f"\nverdicts from {where}")


def check_word(word: str, known: tuple[str, ...] | list[str], kind: str) -> None:
    """Refuse a word that is not among the known ones.

    Raises:
        UnknownNameError: with the nearest known word, and all of them.
    """
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"there is no {kind} {word!r}.{hint} Known: {', '.join(known)}")


def format_effect(mean: float | None, interval: Any, unit: str | None) -> str:
    """``25.1 [20.3, 29.9] points``; empty where there is no number."""
    if mean is None:
        return ""
    ends = "" if interval is None else f" [{interval[0]:.3g}, {interval[1]:.3g}]"
    return f"{mean:.3g}{ends} {unit or ''}".strip()


def verdict_markup(verdict: str | None) -> str:
    """A verdict for the terminal: in words, and coloured."""
    if verdict is None:
        return "[dim]not run yet[/dim]"
    return f"[{COLOURS[verdict]}]{verdict}[/]" if verdict in COLOURS else f"[dim]{verdict}[/dim]"


def print_verdicts(rows: list[dict[str, Any]]) -> None:
    """A table of verdicts: rows with name, verdict, effect, interval, unit and seeds."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("claim", "verdict", "effect", "seeds"):
        table.add_column(heading, no_wrap=heading != "effect")
    for row in rows:
        effect = format_effect(row["effect"], row["interval"], row["unit"])
        table.add_row(row["name"], verdict_markup(row["verdict"]), escape(effect), str(len(row["seeds"])))
    _console().print(table)


def _last_verdicts(folder: Path | None, scale: str) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Claim to its newest result at a scale, and where these were found."""
    from sinklab.studies.reproduce.kept import read_results, summary_of

    place = folder or Path("sinklab-claims")
    found = [summary_of(kept.record) for kept in read_results(place)]
    if found or folder is not None:
        return {row["name"]: row for row in reversed(found) if row["scale"] == scale}, str(place)
    record = json.loads((resources.files("sinklab.claims") / "record.json").read_text(encoding="utf-8"))
    return {row["name"]: row for row in reversed(record) if row["scale"] == scale}, "the results that come with sinklab"


def _row(claim: Stated, result: Mapping[str, Any] | None, scale: str) -> dict[str, Any]:
    empty = dict.fromkeys(("effect", "interval", "unit", "created", "hardware"), None)
    cost = claim.costs.get(scale)
    verdict = None if cost is not None else "not tested at this scale"
    found: dict[str, Any] = {
        "name": claim.name,
        "source": claim.source,
        "scale": scale,
        "verdict": verdict,
        **empty,
        "seeds": [],
    }
    words = {"statement": claim.statement, "reference": claim.reference, "published": claim.published}
    return {**found, **(result or {}), "cost": cost, "costs": claim.costs, **words}


def _print_all(rows: list[dict[str, Any]], scale: str) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("claim", "source", "cost", "verdict", "statement"):
        table.add_column(heading, no_wrap=heading != "statement")
    for row in rows:
        cost = row["cost"] or "[dim]–[/dim]"
        table.add_row(row["name"], row["source"], cost, verdict_markup(row["verdict"]), escape(row["statement"]))
    console = _console()
    console.print(table)
    console.print(f"\n{len(rows)} claims; cost and verdict at scale {scale}. One in full: sinklab claims NAME", style="dim")


def _print_one(row: dict[str, Any]) -> None:
    console = _console()
    console.print(f"[bold]{row['name']}[/bold]  {escape(row['statement'])}")
    console.print(f"{row['reference']}. Published: {row['published']}", markup=False)
    console.print(f"cost: {', '.join(f'{cost} at {scale}' for scale, cost in row['costs'].items())}", markup=False)
    effect = escape(format_effect(row["effect"], row["interval"], row["unit"]))
    seeds = f"  ({len(row['seeds'])} seeds)" if row["seeds"] else ""
    console.print(f"at scale {row['scale']}: {verdict_markup(row['verdict'])}  {effect}{seeds}")


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else output.PIPE_WIDTH)
