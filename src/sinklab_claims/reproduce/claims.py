"""The command ``sinklab claims``: every published statement that can be run, its source, its cost, and its last verdict."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sinklab.errors import ConfigurationError, UnknownNameError
from sinklab.registry import claims as registered
from sinklab.registry import read_outs
from sinklab.results.folder import default_out
from sinklab.results.run import Listing
from sinklab.studies.arguments import command
from sinklab_claims.contract.claim import CHECKPOINT, RECORDED, Claim, Scale, bases_at
from sinklab_claims.reproduce.show import show_claim, show_claims
from sinklab_claims.verdict.records import read_results, summary_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_source", "check_word", "claim_called", "claims"]


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
    listed = {name: claim_called(name) for name in names or registered}
    if source is not None:
        check_source(source)
        listed = {name: claim for name, claim in listed.items() if claim.source == source}
    found, where = _last_verdicts(results, scale)
    own = {row["name"]: row for row in found if _is_own(row)}
    other = {row["name"]: row for row in found if not _is_own(row)}
    rows = [_row(name, claim, own.get(name), other.get(name), scale) for name, claim in listed.items()]
    if names is not None and len(rows) == 1:
        return Listing(rows, lambda rows: show_claim(rows[0], where))
    return Listing(rows, lambda rows: show_claims(rows, scale, where))


def claim_called(name: str) -> Claim:
    """The claim of a name; its read-outs are imported with it, since they declare the units of its numbers.

    Raises:
        UnknownNameError: no such claim.
        ConfigurationError: its function does not give a claim.
    """
    claim = registered[name]()
    if not isinstance(claim, Claim):
        raise ConfigurationError(f"claim {name!r}: its function must return a Claim, and returned {type(claim).__name__}")
    for read_out in claim.read_outs:
        if isinstance(read_out, str):
            read_outs[read_out]
    return claim


def check_word(word: str, known: Sequence[str], kind: str) -> None:
    """Refuse a word that is not among the known ones.

    Raises:
        UnknownNameError: with the nearest known word, and all of them.
    """
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"there is no {kind} {word!r}.{hint} Known: {', '.join(known)}")


def check_source(source: str) -> None:
    """Refuse a paper that no claim is from.

    Raises:
        UnknownNameError: as :func:`check_word`.
    """
    check_word(source, sorted({claim_called(name).source for name in registered}), "source")


def _last_verdicts(folder: Path | None, scale: str) -> tuple[list[dict[str, Any]], str]:
    """Every result at a scale, the oldest first, and where these were found."""
    place = folder or default_out("sinklab-claims")
    results = [summary_of(result.record) for result in read_results(place)]
    where = str(place)
    if not results and folder is None:
        results = json.loads((resources.files("sinklab_claims") / "record.json").read_text(encoding="utf-8"))
        where = "the results that come with sinklab"
    return [row for row in reversed(results) if row["scale"] == scale], where


def _is_own(row: Mapping[str, Any]) -> bool:
    """Whether a result is about the base of the claim's source, whose verdict is that of the claim."""
    if row["base"] is None or row["name"] not in registered:
        return True
    return bool(row["base"] == bases_at(cast(Scale, row["scale"]), claim_called(row["name"]).bases)[0])


def _row(
    name: str, claim: Claim, result: Mapping[str, Any] | None, other: Mapping[str, Any] | None, scale: str
) -> dict[str, Any]:
    """One entry of ``sinklab claims --json``; ``other_base`` is the newest result on the base that the source does not have."""
    on_checkpoints = claim.checkpoint is not None
    cost = ("minutes" if on_checkpoints else None) if scale == CHECKPOINT else claim.costs.get(cast(Scale, scale))
    without = "not applicable" if scale == CHECKPOINT else "not tested at this scale"
    nothing = dict.fromkeys(("base", "effect", "interval", "unit", "evidence", "created", "hardware"))
    return {
        "name": name,
        "source": claim.source,
        "scale": scale,
        **nothing,
        "verdict": None if cost is not None else without,
        "seeds": [],
        **(result or {}),
        "cost": cost,
        "costs": {**claim.costs, **({CHECKPOINT: "minutes"} if on_checkpoints else {})},
        "statement": claim.statement,
        "reference": claim.reference,
        "published": claim.published,
        "other_base": other,
    }
