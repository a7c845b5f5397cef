"""The page of claims: one self-contained HTML file with every verdict, and the numbers behind each of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from sinklab.report.claim_figure import VERDICT_COLOURS
from sinklab.report.page import render, write_page
from sinklab.report.words import number
from sinklab.results.summaries import ClaimOfModel, ClaimPart, ClaimRecord

__all__ = ["effect_words", "write_claims_page"]


def write_claims_page(results: Sequence[tuple[Path, ClaimRecord]], path: Path) -> Path:
    """Write one page about all results; returns its path.

    Args:
        results: folder and ``run.json`` of each claim, in the order of the page; ``figure.png`` of a folder is embedded if
            it is there.
    """
    counts = {verdict: sum(record["verdict"] == verdict for _, record in results) for verdict in VERDICT_COLOURS}
    context = {
        "title": "What became of the claims",
        "counts": {verdict: count for verdict, count in counts.items() if count},
        "results": [(folder.parent.name, record, _image(folder / "figure.png")) for folder, record in results],
        "words": effect_words,
        "models": list(dict.fromkeys(model["name"] for _, record in results for model in record.get("models", ()))),
        "model_effect": _effect_of,
    }
    return write_page(render("claims.html.j2", context, {"page": "claims"}, {}), path)


def effect_words(part: ClaimPart) -> str:
    """``25.1 [20.3, 29.9] points``; an en dash where there is no number, no brackets with fewer than three seeds."""
    if part["mean"] is None:
        return "–"
    interval = "" if part["interval"] is None else f" [{', '.join(number(end) for end in part['interval'])}]"
    return f"{number(part['mean'])}{interval} {part['unit']}"


def _effect_of(model: ClaimOfModel) -> ClaimPart:
    """The part that decides the verdict of one model."""
    return next((part for part in model["parts"] if part["verdict"] == model["verdict"]), model["parts"][0])


def _image(path: Path) -> Markup | None:
    return Markup(base64.b64encode(path.read_bytes()).decode()) if path.is_file() else None
