"""The page of claims: one self-contained HTML file with every verdict, and the numbers behind each of them."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from sinklab.report.claim_figure import VERDICT_COLOURS
from sinklab.report.page import render, write_page
from sinklab.report.words import number
from sinklab.results.summaries.claims import ClaimPart, ClaimRecord

__all__ = ["ClaimsSummary", "VerdictLine", "VerdictList", "effect_words", "write_claims_page"]


@dataclasses.dataclass(frozen=True)
class VerdictLine:
    """One verdict in a list, in words.

    Attributes:
        anchor: id of its details.
        on: kind of evidence, and what was run.
        says: what was found, or is open.
        effect: with its interval and unit.
        claimed: the region.
        published: what the source reports for the same effect, and of which model.
        count: seeds, draws of texts or models; of what is open those that would decide it too.
    """

    claim: str
    anchor: str
    on: str
    says: str
    effect: str
    claimed: str
    published: str
    count: str


@dataclasses.dataclass(frozen=True)
class VerdictList:
    """Verdicts of one kind.

    Attributes:
        note: what the list is of.
        counted: heading of the column of :attr:`VerdictLine.count`.
    """

    title: str
    note: str
    counted: str
    lines: tuple[VerdictLine, ...]


@dataclasses.dataclass(frozen=True)
class ClaimsSummary:
    """What results come to.

    Attributes:
        counts: heading, columns and rows of tables of how many verdicts there are of each kind.
        lists: the verdicts themselves.
        figure: all effects, as SVG text; empty where there are none.
    """

    counts: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...]
    lists: tuple[VerdictList, ...]
    figure: str


def write_claims_page(results: Sequence[tuple[Path, ClaimRecord]], path: Path, summary: ClaimsSummary | None = None) -> Path:
    """Write one page about all results; returns its path.

    Args:
        results: folder and ``run.json`` of each claim, in the order of the page; ``figure.png`` of a folder is embedded if
            it is there.
        summary: stands before all else.
    """
    counts = {verdict: sum(record["verdict"] == verdict for _, record in results) for verdict in VERDICT_COLOURS}
    context = {
        "title": "What became of the claims",
        "counts": {verdict: count for verdict, count in counts.items() if count},
        "results": [(folder.parent.name, record, _image(folder / "figure.png")) for folder, record in results],
        "summary": summary,
        "overview": None if summary is None else Markup(summary.figure),
        "words": effect_words,
        "models": list(dict.fromkeys(model["name"] for _, record in results for model in record.get("models", ()))),
        "model_words": lambda model: _words(model["effect"], model["interval"], model["unit"]),
    }
    return write_page(render("claims.html.j2", context, {"page": "claims"}, {}), path)


def effect_words(part: ClaimPart) -> str:
    """``25.1 [20.3, 29.9] points``; an en dash where there is no number, no brackets with fewer than three seeds."""
    model = f" of {part['model']}" if "model" in part and part["mean"] is not None else ""
    return _words(part["mean"], part["interval"], part["unit"]) + model


def _words(mean: float | None, interval: Sequence[float] | None, unit: str | None) -> str:
    if mean is None:
        return "–"
    ends = "" if interval is None else f" [{', '.join(number(end) for end in interval)}]"
    return f"{number(mean)}{ends} {unit}"


def _image(path: Path) -> Markup | None:
    return Markup(base64.b64encode(path.read_bytes()).decode()) if path.is_file() else None
