"""The figure of an overview: of every claim the parts that decide, with all that was found about each of these.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sinklab.jobs.scale import ROWS
from sinklab.report.forest import Mark, Row, draw_forest
from sinklab.results.summaries.claims import ClaimPart
from sinklab.studies.reproduce.entries import ANSWERS, Entry
from sinklab.studies.reproduce.published import published_effect

__all__ = ["draw_overview"]


def draw_overview(entries: Sequence[Entry]) -> str:
    """The figure: of every claim that was tested the parts that decide, with all that was found about each of these.

    Checks of proofs are no evidence, and are not in it. Empty where nothing is left to draw.
    """
    tested = [entry for entry in entries if entry.group not in ("untested", "proof")]
    rows: dict[tuple[str, str, str], list[tuple[Entry, ClaimPart]]] = {}
    for entry in tested:
        if entry.deciding is not None and entry.deciding["mean"] is not None:
            rows[entry.claim, *_key(entry.deciding)] = []
    for entry in tested:
        for part in entry.parts:
            of_row = rows.get((entry.claim, *_key(part)))
            if of_row is not None and part["mean"] is not None:
                of_row.append((entry, part))
    drawn = [_row(claim, of_row) for (claim, _, _), of_row in rows.items()]
    if not drawn:
        return ""
    drawn.sort(key=lambda row: (_rank(row), row.claim))
    title = (
        "Effects of claims with 95 % intervals, by kind of evidence, beside published values; the tables have them in numbers."
    )
    notes = ["in brackets: the verdict of a part where another, or a premise, decides"]
    if any(entry.about == "one model" for entry in tested):
        notes.append("yes, no: whether one model does what is claimed, which says nothing of others")
    return draw_forest(drawn, title, "; ".join(notes))


def _key(part: ClaimPart) -> tuple[str, str]:
    """What makes two parts one: the effect, and what is claimed of it."""
    return part["effect"], part["expected"]


def _row(claim: str, found: Sequence[tuple[Entry, ClaimPart]]) -> Row:
    _, part = found[0]
    published = published_effect(claim, part["effect"])
    return Row(
        claim=claim,
        says=part["says"],
        unit=part["unit"],
        more_than=-math.inf if part["more_than"] is None else part["more_than"],
        less_than=math.inf if part["less_than"] is None else part["less_than"],
        published=None if published is None else published.value,
        marks=tuple(_mark(entry, of_entry) for entry, of_entry in found),
    )


def _mark(entry: Entry, part: ClaimPart) -> Mark:
    assert part["mean"] is not None, "only estimates are drawn"
    interval = None if part["interval"] is None else (part["interval"][0], part["interval"][1])
    of = entry.model.rpartition("/")[2].partition(":")[0][:12] if entry.model else entry.folder
    if entry.about == "models":
        of = f"{entry.seeds} {'model' if entry.seeds == 1 else 'models'}"
    elif entry.folder != entry.scale and entry.base is not None:
        of = f"{entry.scale}, {ROWS[entry.base].removeprefix('with ')}"
    return Mark(entry.kind, of, part["mean"], interval, _word(entry, part))


def _word(entry: Entry, part: ClaimPart) -> str:
    """What the part shows, in a word or two; about one model it is never the verdict of the claim."""
    plain = {"inconclusive": "open"}.get(part["verdict"], part["verdict"])
    if entry.about == "one model":
        plain = ANSWERS.get(part["verdict"], "open")
    return plain if part is entry.deciding and not entry.premise else f"({plain})"


def _rank(row: Row) -> int:
    """Those about trainings and models first that hold, then those that fail; then those about one model; then what is open."""
    order = ("reproduced", "not reproduced", *ANSWERS.values())
    return min(order.index(mark.verdict) if mark.verdict in order else len(order) for mark in row.marks)
