"""What was found about a claim, as its ``run.json`` has it: one dataclass for a part, a model and a claim; no torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sinklab.errors import InputError, ResultError
from sinklab.results.sections import from_json, to_json
from sinklab.results.table import read_run
from sinklab_claims.contract.claim import CHECKPOINT, RECORDED, folder_names, is_natural

Verdict = Literal[
    "reproduced", "in part", "not reproduced", "absent at this scale", "inconclusive", "not tested at this scale",
    "not applicable", "agrees with the proof", "contradicts the proof",
]  # fmt: skip

OF_A_PROOF: Mapping[Verdict, Verdict] = {"reproduced": "agrees with the proof", "not reproduced": "contradicts the proof"}

PLAIN: Mapping[str, Verdict] = {own: plain for plain, own in OF_A_PROOF.items()}
"""Verdicts about proofs to what the parts say that make them."""


Evidence = Literal["toy", "natural", "checkpoint"]
"""A synthetic language or a theory's task; models of ours on text that people wrote; models that others trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartFound:
    """What was found about one part of a claim.

    Attributes:
        says: the sentence.
        effect: what is computed of every seed, in words; ``needs`` are the (variant, metric) pairs that it is computed from.
        expected: the claimed region in words; its bounds are ``more_than`` and ``less_than``.
        unit: of all numbers.
        mean: what the seeds say together: the mean, of a ratio the geometric one, of a correlation the median.
        interval: 95 %, for all steps together where there are several; ``method`` says how it was taken.
        standardized: the mean over the standard deviation over seeds.
        by_seed: by seed, of one on a checkpoint by draw of texts, over models by their names.
        steps: of how many steps this is the one that decides.
        model: of what is said of some of several models the one that decides, whose draws the interval is over.
        secondary: whether it is shown beside a part and not counted.
    """

    says: str
    effect: str
    needs: list[tuple[str, str]]
    expected: str
    more_than: float | None
    less_than: float | None
    unit: str
    mean: float | None
    interval: tuple[float, float] | None
    method: str | None = None
    standardized: float | None = None
    by_seed: dict[str, float | None]
    verdict: Verdict
    steps: int = 1
    model: str = ""
    secondary: bool = False


def in_words(verdict: str, parts: Sequence[PartFound]) -> str:
    """A verdict for tables; of one that holds in part, how many parts do and are refuted: ``in part (2 of 4, 1 refuted)``."""
    if verdict != "in part":
        return verdict
    of = [part.verdict for part in parts if not part.secondary]
    held, fail = of.count("reproduced"), of.count("not reproduced")
    return f"in part ({held} of {len(of)}" + (f", {fail} refuted)" if fail else ")")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFound:
    """What was found about a claim on one checkpoint; the effect is that of :func:`deciding_part`.

    Attributes:
        numbers: means over the draws of all that was measured, by label and metric.
    """

    name: str
    revision: str
    kind: str
    operation: str
    parameters: int
    text: str
    verdict: Verdict
    reason: str
    effect: float | None
    interval: tuple[float, float] | None
    unit: str | None
    parts: list[PartFound]
    presupposes: list[PartFound]
    numbers: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimFound:
    """What was found about a claim at a scale, or on checkpoints.

    Attributes:
        base: what the rows of the models begin with; ``source_base`` is that of the claim's source.
        evidence: a remark about the result that other numbers support.
        looks: how often it was judged, each time on other seeds.
        natural_text: of results until 2026-11-29, whether a model of none of our bases had read text that people wrote.
        conditions: of every trained variant what it changes, what it starts from and the trainings by seed.
        config: the configuration in which variants change something.
        models: of a claim on checkpoints each model by itself.
        lent: variant and seed to the claims whose numbers its premises also rest on, in results from before 2026-11-29.
    """

    claim: str
    statement: str
    source: str
    reference: str
    published: str
    scale: str
    cost: str
    seeds: list[int]
    verdict: Verdict
    reason: str
    parts: list[PartFound]
    presupposes: list[PartFound]
    environment: Mapping[str, Any]
    created: str
    kind: Literal["claim"] = "claim"
    run_id: str = ""
    base: str | None = None
    source_base: str | None = None
    evidence: str = ""
    looks: int = 1
    natural_text: bool = False
    conditions: dict[str, Any] = dataclasses.field(default_factory=dict)
    read_outs: list[str] = dataclasses.field(default_factory=list)
    config: dict[str, Any] | None = None
    models: list[ModelFound] = dataclasses.field(default_factory=list)
    lent: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    errors: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class StoredClaim:
    """What was found about a claim, and the folder in which that and its table lie."""

    folder: Path
    record: ClaimFound


def read_results(folder: Path) -> list[StoredClaim]:
    """Every result below ``folder``, newest first, then by name.

    Args:
        folder: with ``SCALE/CLAIM/run.json`` and ``SCALE-BASE/CLAIM/run.json`` in it, or ``SCALE.json`` with a list of such
            records; one that is not there has no results.

    Raises:
        InputError: a record that is damaged, or is of another kind; the message says which and what.
    """
    results = []
    for place in (place for scale in RECORDED for place in folder_names(scale)):
        if (kept := folder / f"{place}.json").is_file():
            records = json.loads(kept.read_text(encoding="utf-8"))
            results += [StoredClaim(folder / place / record["claim"], _read(record, kept)) for record in records]
        for path in sorted((folder / place).glob("*/run.json")):
            record = read_run(path.parent)
            if record.get("kind") != "pathways":  # a comparison of operations that is kept beside claims
                results.append(StoredClaim(path.parent, _read(record, path)))
    by_name = sorted(results, key=lambda result: result.record.claim)
    return sorted(by_name, key=lambda result: result.record.created, reverse=True)


def _read(record: Mapping[str, Any], path: Path) -> ClaimFound:
    try:
        return from_json(ClaimFound, record, path)
    except ResultError as error:
        raise InputError(f"{error}; run the claim again, its models are kept") from error


def deciding_part(parts: Sequence[PartFound], verdict: str) -> PartFound | None:
    """The part that makes the verdict what it is; the first of all where none has it.

    One part that lies outside, or is open, is what a claim lacks: it is the first of these. A claim holds if all parts
    hold: of one that does it is the part that clears its bound by least, by :func:`clearance`.
    """
    counted = [part for part in parts if not part.secondary]
    lacks = ("not reproduced", "absent at this scale", "inconclusive")
    wanted = lacks if verdict == "in part" else (PLAIN.get(verdict, verdict),)
    plain = next((word for word in wanted if any(part.verdict == word for part in counted)), wanted[0])
    with_it = [part for part in counted if part.verdict == plain] or counted
    return min(with_it, key=clearance, default=None) if plain == "reproduced" else next(iter(with_it), None)


def clearance(part: PartFound) -> float:
    """How far the middle lies from the nearest bound, over how far the interval reaches towards it: an order, no effect size.

    Above 1 where the interval does not reach the bound, infinite where it has no width, 0 where there is none.
    """
    if part.mean is None or part.interval is None:
        return 0.0
    bounds = [bound for bound in (part.more_than, part.less_than) if bound is not None]
    reaches = [abs(part.mean - part.interval[bound > part.mean]) for bound in bounds]
    return min(
        (abs(part.mean - bound) / reach if reach else math.inf for bound, reach in zip(bounds, reaches, strict=True)),
        default=0.0,
    )


def effect_of(parts: Sequence[PartFound], verdict: str) -> dict[str, Any]:
    """``effect``, ``interval`` and ``unit`` of the part that decides; ``None`` without any."""
    part = deciding_part(parts, verdict)
    found = (None, None, None) if part is None else (part.mean, part.interval, part.unit)
    return dict(zip(("effect", "interval", "unit"), found, strict=True))


def answer(found: ClaimFound, folder: Path | None = None) -> dict[str, Any]:
    """``summary`` of ``sinklab reproduce`` for one claim."""
    row = {**_verdict(found), "reason": found.reason, "parts": [to_json(part) for part in found.parts]}
    row |= {"folder": None if folder is None else str(folder), "errors": found.errors}
    return {**row, "models": [to_json(model) for model in found.models]} if found.models else row


def _verdict(found: ClaimFound) -> dict[str, Any]:
    row = {"name": found.claim} | {name: getattr(found, name) for name in ("source", "scale", "base", "looks")}
    row |= {"verdict": in_words(found.verdict, found.parts)} | effect_of(found.parts, found.verdict)
    return row | {"interval": row["interval"] and list(row["interval"]), "seeds": found.seeds}


def summary_of(found: ClaimFound) -> dict[str, Any]:
    """A record in the fields of ``sinklab claims --json``; the effect is that of :func:`deciding_part`."""
    row = {**_verdict(found), "evidence": evidence_of(found), "created": found.created, "hardware": hardware_of(found)}
    row |= {"reason": found.reason, "parts": [_brief(part) for part in found.parts]}
    of_model = ("name", "revision", "text", "reason", "effect", "interval", "unit", "numbers")
    models = [
        {name: to_json(model)[name] for name in of_model}
        | {"verdict": in_words(model.verdict, model.parts), "parts": [_brief(part) for part in model.parts]}
        for model in found.models
    ]
    return {**row, "models": models} if models else row


def _brief(part: PartFound) -> dict[str, Any]:
    names = ("says", "effect", "expected", "mean", "interval", "unit", "verdict", "secondary")
    return {name: to_json(part)[name] for name in names} | {"n": sum(value is not None for value in part.by_seed.values())}


def evidence_of(found: ClaimFound) -> Evidence:
    """What the models of a record have read."""
    if found.scale == CHECKPOINT:
        return "checkpoint"
    if found.base is not None:  # something was trained
        return "natural" if is_natural(found.scale) else "toy"
    # The embedded models have read Python source.
    return "natural" if found.natural_text else "toy"


def hardware_of(found: ClaimFound) -> str:
    """What it ran on, in words: ``cpu, AMD EPYC, 2 cores``."""
    hardware = found.environment.get("hardware", {})
    cores = f"{hardware['cpu_count']} cores" if hardware.get("cpu_count") else ""
    return ", ".join(filter(None, (hardware.get("device"), hardware.get("name"), cores))) or "unknown hardware"


@functools.cache
def published() -> Mapping[str, Any]:
    """Claim to what its source has of numbers: ``effects``, ``of`` which model these are, and a ``table`` where it has one.

    A table has ``models``, and ``rows`` of a text, a label and a metric, and a number for each model, ``None`` without one.
    """
    found: Mapping[str, Any] = json.loads((resources.files("sinklab_claims") / "published.json").read_text(encoding="utf-8"))
    return found


def published_effects() -> Mapping[str, Mapping[str, float]]:
    """Claim to the words of an effect to its published number, of those effects for which the source has one.

    Left out are numbers that are read off a drawing, unless the entry says so, that are of a similar quantity, and that the
    claim derives. Losses are differences of logarithms of perplexities, in nats. The file says of which model each is.
    """
    return {claim: entry["effects"] for claim, entry in published().items()}
