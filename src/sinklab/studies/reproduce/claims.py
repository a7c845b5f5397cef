"""The command ``sinklab claims``: every published statement that can be run, its source, its cost, and its last verdict."""

from __future__ import annotations

import difflib
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sinklab.errors import UnknownNameError
from sinklab.jobs.scale import CHECKPOINT, RECORDED, Scale, bases_at
from sinklab.registry import claims as registered
from sinklab.results.folder import default_out
from sinklab.results.run import Listing
from sinklab.studies.arguments import command
from sinklab.studies.reproduce.display import display_claims, display_one
from sinklab.studies.reproduce.stated import Stated, stated

if TYPE_CHECKING:
    from sinklab.studies.reproduce.kept import KeptVerdict, ListedClaim

__all__ = ["check_word", "claims"]


@command
def claims(
    names: list[str] | None = None,
    *,
    source: str | None = None,
    scale: str = "tiny",
    results: Path | None = None,
) -> Listing:
    """List published statements about sinks that can be run, with source, cost and last verdict.

    Args:
        names: Names of claims; by default all. A single one is shown in full.
        source: Only those of a paper, such as gu2024.
        scale: Scale of cost and verdict: tiny, small, medium, 60m, 1b; or checkpoint, for models as they are.
        results: Output directory of 'sinklab reproduce'; by default sinklab-claims if it has results, else those of the
            package.

    Examples:
        sinklab claims
        sinklab claims sink_moves_to_bias
        sinklab claims --source gu2024 --json
        sinklab reproduce repeated_token_laws  (to run one)
    """
    check_word(scale, RECORDED, "scale")
    listed = [stated(name) for name in names or registered]
    if source is not None:
        check_word(source, sorted({stated(name).source for name in registered}), "source")
        listed = [claim for claim in listed if claim.source == source]
    found, where = _last_verdicts(results, scale)
    own = {row["name"]: row for row in found if _own(row)}
    other = {row["name"]: row for row in found if not _own(row)}
    rows = [_row(claim, own.get(claim.name), other.get(claim.name), scale) for claim in listed]
    if names is not None and len(rows) == 1:
        return Listing(rows, lambda rows: display_one(rows[0], where))
    return Listing(rows, lambda rows: display_claims(rows, scale, where))


def check_word(word: str, known: tuple[str, ...] | list[str], kind: str) -> None:
    """Refuse a word that is not among the known ones.

    Raises:
        UnknownNameError: with the nearest known word, and all of them.
    """
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"there is no {kind} {word!r}.{hint} Known: {', '.join(known)}")


def _last_verdicts(folder: Path | None, scale: str) -> tuple[list[KeptVerdict], str]:
    """Every result at a scale, the oldest first, and where these were found."""
    from sinklab.studies.reproduce.kept import read_results, summary_of

    place = folder or default_out("sinklab-claims")
    results = [summary_of(result.record) for result in read_results(place)]
    where = str(place)
    if not results and folder is None:
        results = json.loads((resources.files("sinklab_claims") / "record.json").read_text(encoding="utf-8"))
        where = "the results that come with sinklab"
    return [row for row in reversed(results) if row["scale"] == scale], where


def _own(row: KeptVerdict) -> bool:
    """Whether a result is about the base of the claim's source, whose verdict is that of the claim."""
    if row["base"] is None or row["name"] not in registered:
        return True
    return row["base"] == bases_at(cast(Scale, row["scale"]), stated(row["name"]).bases)[0]


def _row(claim: Stated, result: KeptVerdict | None, other: KeptVerdict | None, scale: str) -> ListedClaim:
    cost = ("minutes" if claim.checkpoint else None) if scale == CHECKPOINT else claim.costs.get(scale)
    without = "not applicable" if scale == CHECKPOINT else "not tested at this scale"
    verdict = None if cost is not None else without
    entry: KeptVerdict = {
        "name": claim.name,
        "source": claim.source,
        "scale": scale,
        "base": None,
        "verdict": verdict,
        "effect": None,
        "interval": None,
        "unit": None,
        "evidence": None,
        "created": None,
        "hardware": None,
        "seeds": [],
    }
    if result is not None:
        entry = {**entry, **result}
    return {
        **entry,
        "cost": cost,
        "costs": {**claim.costs, **({CHECKPOINT: "minutes"} if claim.checkpoint else {})},
        "statement": claim.statement,
        "reference": claim.reference,
        "published": claim.published,
        "other_base": other,
    }
