"""What the terminal shows of claims: the list, one in full, and verdicts with their effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sinklab.results.naming import counted
from sinklab.results.run import Result
from sinklab_claims.contract.claim import ROWS

__all__ = ["display", "display_claims", "display_models", "display_one", "display_parts", "format_effect"]

if TYPE_CHECKING:
    from sinklab_claims.verdict.records import ClaimAnswer, ClaimVerdict, KeptVerdict, ListedClaim


COLOURS = {
    **dict.fromkeys(("reproduced", "holds for this model", "agrees with the proof"), "green"),
    **dict.fromkeys(("not reproduced", "does not hold for this model", "contradicts the proof"), "red"),
    "inconclusive": "yellow",
}


EVIDENCE = {
    "toy": "models of ours on a synthetic language or task",
    "natural": "models of ours on text that people wrote",
    "checkpoint": "models that others trained",
}
"""Kinds of evidence in words."""


def display(result: Result) -> Iterator[RenderableType]:
    """Of several claims a table of verdicts; of one its parts too, and where its figure and table are."""
    rows = result.listed or []
    if any("models" in row for row in rows):
        yield from display_models(rows)
        for row in rows:
            if len(rows) == 1:
                yield from _display_each(row)
            else:
                yield from _display_open(row)
        yield Text(f"\npage  {result.summary['page']}")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("claim", "verdict", "effect", "seeds"):
        table.add_column(heading, no_wrap=heading != "effect")
    for row in rows:
        table.add_row(row["name"], _verdict(row["verdict"]), escape(_effect(row)), str(len(row["seeds"])))
    yield table
    for row in rows:
        if len(rows) == 1:
            yield from display_parts(row)
        elif row["reason"]:
            yield Text(f"\n{row['name']}: {row['reason']}")
    yield Text(f"\npage  {result.summary['page']}")
    for row in rows:
        if len(rows) == 1 and row["folder"] is not None:
            yield Text(f"figure  {row['folder']}/figure.png\ntable  {row['folder']}/table.parquet")


def display_models(rows: Sequence[ClaimAnswer]) -> Iterator[RenderableType]:
    """Claims against models: what was found about each, over models, and below the table why a claim does not apply to one."""
    names = [model["name"] for model in rows[0]["models"]]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("claim", no_wrap=True)
    for name in names:
        table.add_column(escape(name))
    if len(names) > 1:
        table.add_column("over models")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        cells = []
        for model in row["models"]:
            effect = format_effect(model["effect"], model["interval"], model["unit"])
            applies = model["verdict"] != "not applicable"
            cells.append(f"{_verdict(model['verdict'])}{chr(10) + escape(effect) if applies and effect else ''}")
            if not applies:
                reasons.setdefault(f"{model['name']}: {model['reason']}", []).append(row["name"])
        table.add_row(row["name"], *cells, *([_verdict(row["verdict"])] if len(names) > 1 else []))
    yield table
    if reasons:
        yield Text("\nnot applicable", style="dim")
    for reason, claims in reasons.items():
        yield Text(f"{', '.join(claims)}: {reason}")


def _display_each(row: ClaimAnswer) -> Iterator[RenderableType]:
    """What was found about every part of a claim on every model that it applies to."""
    for model in row["models"]:
        for part in model["parts"] if model["verdict"] != "not applicable" else ():
            effect = format_effect(part["mean"], part["interval"], part["unit"])
            yield f"\n{escape(model['name'])}, {escape(part['says'])}: {_verdict(part['verdict'])}"
            yield Text(f"  {part['effect']} = {effect or 'no number'}; claimed: {part['expected']}")
    if row["reason"]:
        yield Text(f"\nover models: {row['reason']}")


def _display_open(row: ClaimAnswer) -> Iterator[RenderableType]:
    """Of several claims why the verdict over models is open, and of one model why its own is."""
    first, *others = row["models"]
    who, open_one = (first["name"], first) if not others else ("over models", row)
    if open_one["verdict"] == "inconclusive" and open_one["reason"]:
        yield Text(f"\n{row['name']}, {who}: {open_one['reason']}")


def display_parts(row: ClaimAnswer) -> Iterator[RenderableType]:
    """What was found about every part of a claim."""
    for part in row["parts"]:
        effect = format_effect(part["mean"], part["interval"], part["unit"])
        model = f" of {part['model']}" if "model" in part else ""
        yield f"\n{escape(part['says'])}: {_verdict(part['verdict'])}"
        yield Text(f"  {part['effect']} = {effect or 'no number'}{model}; claimed: {part['expected']}")
    if row["reason"]:
        yield Text(f"\n{row['reason']}")


def display_claims(rows: Sequence[ListedClaim], scale: str, where: str) -> Iterator[RenderableType]:
    """Every claim on a line: source, cost, last verdict with the kind of evidence, and statement."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("claim", "source", "cost", "verdict", "evidence", "statement"):
        table.add_column(heading, no_wrap=heading != "statement")
    for row in rows:
        cost = row["cost"] or "[dim]–[/dim]"
        other = row["other_base"]
        verdict = _verdict(row["verdict"]) + ("" if other is None else f"\n{_rows(other)}: {_verdict(other['verdict'])}")
        table.add_row(row["name"], row["source"], cost, verdict, row["evidence"] or "", escape(row["statement"]))
    yield table
    yield Text(
        f"\n{counted(len(rows), 'claim')}; cost and verdict at scale {scale}. One in full: sinklab claims NAME", style="dim"
    )
    if any(row["other_base"] for row in rows):
        yield Text("a verdict is on the base of the claim's source; that on the other stands below it", style="dim")
    words = {row["evidence"]: EVIDENCE[row["evidence"]] for row in rows if row["evidence"] is not None}
    if words:
        yield Text(f"evidence: {'; '.join(f'{kind}, {words[kind]}' for kind in EVIDENCE if kind in words)}", style="dim")
    yield Text(f"\nverdicts from {where}")


def display_one(row: ListedClaim, where: str) -> Iterator[RenderableType]:
    """One claim in full."""
    yield f"[bold]{row['name']}[/bold]  {escape(row['statement'])}"
    yield Text(f"{row['reference']}. Published: {row['published']}")
    yield Text(f"cost: {', '.join(f'{cost} at {scale}' for scale, cost in row['costs'].items())}")
    on = f", {_rows(row)}" if row["base"] is not None and row["other_base"] is not None else ""
    yield f"at scale {row['scale']}{on}: {_found(row)}"
    if (other := row["other_base"]) is not None:
        yield f"at scale {other['scale']}, {_rows(other)}, other than in the source: {_found(other)}"
    for model in row.get("models", ()):
        effect = format_effect(model["effect"], model["interval"], model["unit"])
        yield f"  {escape(model['name'])}: {_verdict(model['verdict'])}  {escape(model['reason'] or effect)}"
    yield Text(f"\nverdicts from {where}")


def format_effect(mean: float | None, interval: Sequence[float] | None, unit: str | None) -> str:
    """``25.1 [20.3, 29.9] points``; empty where there is no number."""
    if mean is None:
        return ""
    ends = "" if interval is None else f" [{interval[0]:.3g}, {interval[1]:.3g}]"
    return f"{mean:.3g}{ends} {unit or ''}".strip()


def _rows(row: ClaimVerdict) -> str:
    """What the rows of the models begin with."""
    return ROWS[row["base"] or "bos"]


def _found(row: KeptVerdict) -> str:
    """The verdict, the effect, and on how many seeds of what these rest."""
    seeds = f"  ({counted(len(row['seeds']), 'seed')}; evidence: {row['evidence']})" if row["seeds"] else ""
    return f"{_verdict(row['verdict'])}  {escape(_effect(row))}{seeds}"


def _effect(row: ClaimVerdict) -> str:
    return format_effect(row["effect"], row["interval"], row["unit"])


def _verdict(verdict: str | None) -> str:
    """In words, and coloured."""
    if verdict is None:
        return "[dim]not run yet[/dim]"
    return f"[{COLOURS[verdict]}]{verdict}[/]" if verdict in COLOURS else f"[dim]{verdict}[/dim]"
