"""Kept results: the records of claims that have been run, read from the folder that ``reproduce`` leaves, without torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast

from sinklab.errors import InputError
from sinklab.jobs.scale import CHECKPOINT, RECORDED, folder_names, is_natural
from sinklab.jobs.verdict import PLAIN, VERDICTS
from sinklab.results.summaries.claims import ClaimOfModel, ClaimPart, ClaimRecord, Judged
from sinklab.results.table import read_run

if TYPE_CHECKING:
    from sinklab.jobs.claim import Claim

__all__ = [
    "ClaimAnswer",
    "ClaimVerdict",
    "Evidence",
    "KeptVerdict",
    "ListedClaim",
    "ModelVerdict",
    "StoredClaim",
    "clearance",
    "deciding_part",
    "evidence_of",
    "hardware_of",
    "read_results",
    "same_training",
    "summary_of",
    "without_dtype",
    "words_of",
]

Evidence = Literal["toy", "natural", "checkpoint"]
"""A synthetic language or a theory's task; models of ours on text that people wrote; models that others trained."""


FIELDS = {
    **dict.fromkeys(("claim", "statement", "source", "reference", "published", "scale", "cost", "reason", "created"), str),
    **dict.fromkeys(("seeds", "parts", "presupposes"), list),
    **dict.fromkeys(("conditions", "environment"), dict),
}
"""What a record must have, besides its kind and its verdict."""

PART_FIELDS = (
    "says",
    "effect",
    "needs",
    "expected",
    "more_than",
    "less_than",
    "unit",
    "mean",
    "interval",
    "by_seed",
    "verdict",
)


@dataclasses.dataclass(frozen=True)
class StoredClaim:
    """The record of a claim that was run, and the folder in which it and its table lie."""

    folder: Path
    record: ClaimRecord


def read_results(folder: Path) -> list[StoredClaim]:
    """Every result below ``folder``, newest first, then by name.

    Args:
        folder: with ``SCALE/CLAIM/run.json`` and ``SCALE-BASE/CLAIM/run.json`` in it; one that is not there has no results.

    Raises:
        InputError: a record that is damaged, or is of another kind; the message says which and what.
    """
    results = [
        StoredClaim(path.parent, _checked(path))
        for scale in RECORDED
        for place in folder_names(scale)
        for path in sorted((folder / place).glob("*/run.json"))
        if read_run(path.parent).get("kind") != "pathways"  # kept beside claims, and read by its own page
    ]
    return sorted(
        sorted(results, key=lambda result: str(result.record["claim"])),
        key=lambda result: str(result.record["created"]),
        reverse=True,
    )


class ClaimVerdict(TypedDict):
    """What became of a claim; the effect is that of :func:`deciding_part`."""

    name: str
    source: str
    scale: str
    base: str | None
    verdict: str | None
    effect: float | None
    interval: list[float] | None
    unit: str | None
    seeds: list[int]


class ModelVerdict(TypedDict):
    """What became of a claim on one checkpoint."""

    name: str
    revision: str
    verdict: str
    reason: str
    effect: float | None
    interval: list[float] | None
    unit: str | None


class KeptVerdict(ClaimVerdict):
    """The same of a record: what its models have read, when it was made, and on what."""

    evidence: Evidence | None
    created: str | None
    hardware: str | None
    models: NotRequired[list[ModelVerdict]]


class ListedClaim(KeptVerdict):
    """One entry of ``sinklab claims --json``."""

    cost: str | None
    costs: Mapping[str, str]
    statement: str
    reference: str
    published: str
    other_base: KeptVerdict | None
    """The newest result on the base that the claim's source does not have."""


class ClaimAnswer(ClaimVerdict):
    """``summary`` of ``sinklab reproduce`` for one claim."""

    reason: str
    parts: list[ClaimPart]
    folder: str | None
    errors: list[str]
    models: NotRequired[list[ClaimOfModel]]


def deciding_part(record: Judged) -> ClaimPart | None:
    """The part that makes the verdict what it is; the first of all where none has it.

    One part that lies outside, or is open, is enough against a claim: it is the first of these. A claim holds if all parts
    hold: of one that does it is the part that clears its bound by least, by :func:`clearance`.
    """
    parts, verdict = record["parts"], PLAIN.get(record["verdict"], record["verdict"])
    with_it = [part for part in parts if part["verdict"] == verdict] or parts
    if verdict == "reproduced":
        return min(with_it, key=clearance, default=None)
    return with_it[0] if with_it else None


def clearance(part: ClaimPart) -> float:
    """How far the middle lies from the nearest bound, over how far the interval reaches towards it: an order, no effect size.

    Returns:
        Above 1 where the interval does not reach the bound, infinite where it has no width, 0 where there is none.
    """
    middle, interval = part["mean"], part["interval"]
    if middle is None or interval is None:
        return 0.0
    reaches = []
    for bound in (part["more_than"], part["less_than"]):
        if bound is not None:
            reach = abs(middle - (interval[0] if bound < middle else interval[1]))
            reaches.append(abs(middle - bound) / reach if reach else math.inf)
    return min(reaches, default=0.0)


def summary_of(record: ClaimRecord) -> KeptVerdict:
    """A record in the fields of ``sinklab claims --json``; the effect is that of :func:`deciding_part`."""
    part = deciding_part(record)
    row: KeptVerdict = {
        "name": record["claim"],
        "source": record["source"],
        "scale": record["scale"],
        "base": record.get("base"),
        "verdict": record["verdict"],
        "effect": None if part is None else part["mean"],
        "interval": None if part is None else part["interval"],
        "unit": None if part is None else part["unit"],
        "seeds": record["seeds"],
        "evidence": evidence_of(record),
        "created": record["created"],
        "hardware": hardware_of(record),
    }
    if "models" in record:
        row["models"] = [
            {
                "name": model["name"],
                "revision": model["revision"],
                "verdict": model["verdict"],
                "reason": model["reason"],
                "effect": model["effect"],
                "interval": model["interval"],
                "unit": model["unit"],
            }
            for model in record["models"]
        ]
    return row


def words_of(claim: Claim) -> dict[str, object]:
    """What the record of a claim repeats of it, at whatever scale: its words, the base of its source, and what is read."""
    return {
        "statement": claim.statement,
        "source": claim.source,
        "reference": claim.reference,
        "published": claim.published,
        "source_base": claim.bases[0] if claim.variants else None,
        "natural_text": claim.natural_text,
    }


def evidence_of(record: ClaimRecord) -> Evidence:
    """What the models of a record have read."""
    if record["scale"] == CHECKPOINT:
        return "checkpoint"
    if record["conditions"]:
        return "natural" if is_natural(record["scale"]) else "toy"
    if record.get("one_model"):
        return "natural"  # the embedded models, which have read Python source
    return "natural" if record.get("natural_text") else "toy"


def without_dtype(field: Any) -> Any:
    """A configuration without the precision of its products, which a machine chooses; any other field as it is."""
    if not isinstance(field, Mapping) or "training" not in field:
        return field
    return {**field, "training": {name: value for name, value in field["training"].items() if name != "dtype"}}


def same_training(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two ``conditions`` of records are one variant, whatever its label and the trainings that were made of it."""
    return {**one, "cells": None} == {**other, "cells": None}


def hardware_of(record: ClaimRecord) -> str:
    """What it ran on, in words: ``cpu, AMD EPYC, 2 cores``."""
    hardware = record["environment"].get("hardware", {})
    words = [str(hardware[key]) for key in ("device", "name") if hardware.get(key)]
    cores = hardware.get("cpu_count")
    return ", ".join([*words, f"{cores} cores"] if cores else words) or "unknown hardware"


def _checked(path: Path) -> ClaimRecord:
    record = read_run(path.parent)
    problem = None
    if record.get("kind") != "claim":
        problem = f"its kind is {record.get('kind')!r}, expected 'claim'"
    elif record.get("verdict") not in VERDICTS:
        problem = f"its verdict is {record.get('verdict')!r}, expected one of {', '.join(VERDICTS)}"
    else:
        for name, kind in FIELDS.items():
            if not isinstance(record.get(name), kind):
                problem = f"its field {name!r} is {type(record.get(name)).__name__}, expected {kind.__name__}"
                break
        else:
            for part in (*record["parts"], *record["presupposes"]):
                missing = [name for name in PART_FIELDS if name not in part]
                if missing:
                    problem = f"a part of it has no {', '.join(missing)}"
                    break
    if problem is not None:
        raise InputError(f"{path} is no record of a claim: {problem}; run the claim again, its models are kept")
    return cast(ClaimRecord, record)  # that it is one has just been checked
