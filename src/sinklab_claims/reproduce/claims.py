"""The command ``sinklab claims``: every published statement that can be run, its source, its cost, and its last verdict."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import ConfigurationError, UnknownNameError
from sinklab.registry import claims as registered
from sinklab.registry import read_outs
from sinklab.results.folder import default_out
from sinklab.results.run import Listing
from sinklab.studies.arguments import command
from sinklab_claims.contract.claim import CHECKPOINT, RECORDED, Base, Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

STATEMENTS = "statements.json"
"""What the claims of this package state, for lists that import none of them; written by :func:`write_statements`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stated:
    """The words of a claim, its cost at every scale, its bases, and whether it is measured on checkpoints."""

    name: str
    statement: str
    source: str
    reference: str
    published: str
    costs: dict[str, str]
    bases: tuple[Base, ...]
    checkpoint: bool


@command
def claims(
    names: list[str] | None = None,
    *,
    paper: str | None = None,
    published: float | None = None,
    scale: str | None = None,
    results: Path | None = None,
) -> Listing:
    """List published statements about sinks that can be run, with source, cost and last verdict.

    With --paper or --published the page of a paper: its numbers, what was found here, real models first, and the verdicts.

    Args:
        names: Names of claims; by default all. A single one is shown in full.
        paper: Only those of a paper, such as gu2024.
        published: Only those whose source has this number, such as 92.47.
        scale: Scale of cost and verdict: tiny, small, medium; or checkpoint, for models as they are. By default of each claim
            that of the strongest evidence, models that others trained before those of this package.
        results: Output directory of 'sinklab reproduce'; by default sinklab-claims if it has results, else those of the
            package.

    Examples:
        sinklab claims
        sinklab claims sink_moves_to_bias
        sinklab claims --paper gu2024
        sinklab claims --published 92.47
        sinklab reproduce repeated_token_laws  (to run one)
    """
    from sinklab_claims.reproduce.show import ORDER, show_claims, show_paper, weakness

    if scale is not None:
        check_word(scale, RECORDED, "scale")
    listed = [stated(name) for name in names or registered]
    if paper is not None:
        check_paper(paper)
        listed = [claim for claim in listed if claim.source == paper]
    every, where = _last_verdicts(results)
    if published is not None:
        listed = [claim for claim in listed if _has_number(claim, published)]
        if not listed:
            raise UnknownNameError(f"no claim of these has the published number {published:g}; see: sinklab claims --json")
    every = [row for row in every if scale in (None, row["scale"])]
    rows = []
    for claim in listed:
        of_claim = [row for row in every if row["name"] == claim.name]
        smallest = next((at for at in reversed(ORDER) if at in claim.costs), CHECKPOINT)
        best = scale or min(filter(_is_own, of_claim), key=weakness, default={"scale": smallest})["scale"]
        found = {_is_own(row): row for row in of_claim if row["scale"] == best}
        rows.append(_row(claim, found.get(True), found.get(False), best))
    if paper is not None or published is not None or (names is not None and len(rows) == 1):
        return Listing(rows, lambda rows: show_paper(rows, every, where))
    return Listing(rows, lambda rows: show_claims(rows, where))


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


def stated(name: str) -> Stated:
    """What a claim states; one of this package is not imported for it. Raises as :func:`claim_called`."""
    known = _statements().get(name) if name in registered else None
    return _imported(name) if known is None else Stated(name=name, **{**known, "bases": tuple(known["bases"])})


@functools.cache
def _statements() -> Mapping[str, Any]:
    statements: Mapping[str, Any] = json.loads((resources.files("sinklab_claims") / STATEMENTS).read_text(encoding="utf-8"))
    return statements


def _imported(name: str) -> Stated:
    claim = claim_called(name)
    words = {field: getattr(claim, field) for field in ("statement", "source", "reference", "published", "bases")}
    costs = {str(scale): str(cost) for scale, cost in claim.costs.items()}
    return Stated(name=name, costs=costs, checkpoint=claim.checkpoint is not None, **words)


def write_statements(path: Path) -> None:
    """Write :data:`STATEMENTS` anew: ``python -m sinklab_claims.reproduce.claims``."""
    claims = {name: dataclasses.asdict(_imported(name)) for name in registered}
    text = json.dumps({name: {key: claim[key] for key in claim if key != "name"} for name, claim in claims.items()}, indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")


def check_word(word: str, known: Sequence[str], kind: str) -> None:
    """Raise UnknownNameError for a word that is not among the known ones, with the nearest of them."""
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"there is no {kind} {word!r}.{hint} Known: {', '.join(known)}")


def check_paper(paper: str) -> None:
    """Raise UnknownNameError for a paper that no claim is from."""
    check_word(paper, sorted({stated(name).source for name in registered}), "paper")


def _has_number(claim: Stated, wanted: float) -> bool:
    """Whether what a source has published, in words or as numbers beside effects, holds this number."""
    from sinklab_claims.verdict.records import published

    kept = published().get(claim.name, {})
    rows = kept.get("table", {}).get("rows", [])
    numbers = [*kept.get("effects", {}).values(), *(number for row in rows for number in row[3:] if number is not None)]
    words = re.findall(r"-?\d+(?:\.\d+)?", claim.published.replace(",", ""))
    return wanted in (*numbers, *map(float, words))


def _last_verdicts(folder: Path | None) -> tuple[list[dict[str, Any]], str]:
    """Every result, the oldest first, and where these were found."""
    from sinklab_claims.verdict.records import read_results, summary_of

    place = folder or default_out("sinklab-claims")
    results = [summary_of(result.record) for result in read_results(place)]
    where = str(place)
    if not results and folder is None:
        results = json.loads((resources.files("sinklab_claims") / "record.json").read_text(encoding="utf-8"))
        where = "the results that come with sinklab"
    # A name that another paper had before says nothing of the claim that has it now.
    known = (row for row in reversed(results) if row["name"] not in registered or row["source"] == stated(row["name"]).source)
    return list(known), where


def _is_own(row: Mapping[str, Any]) -> bool:
    """Whether a result is about the base of the claim's source, whose verdict is that of the claim."""
    if row["base"] is None or row["name"] not in registered:
        return True
    return bool(row["base"] == stated(row["name"]).bases[0])


def _row(claim: Stated, result: Mapping[str, Any] | None, other: Mapping[str, Any] | None, scale: str) -> dict[str, Any]:
    """One entry of ``sinklab claims --json``; ``other_base`` is the newest result on the base that the source does not have."""
    cost = ("minutes" if claim.checkpoint else None) if scale == CHECKPOINT else claim.costs.get(scale)
    without = "not applicable" if scale == CHECKPOINT else "not tested at this scale"
    nothing = dict.fromkeys(("base", "effect", "interval", "unit", "evidence", "created", "hardware"))
    row = {"name": claim.name, "source": claim.source, "scale": scale, **nothing}
    row |= {"verdict": None if cost is not None else without, "seeds": [], **(result or {})}
    row |= {"cost": cost, "costs": {**claim.costs, **({CHECKPOINT: "minutes"} if claim.checkpoint else {})}}
    return row | {name: getattr(claim, name) for name in ("statement", "reference", "published")} | {"other_base": other}


if __name__ == "__main__":
    write_statements(Path(__file__).parents[1] / STATEMENTS)
