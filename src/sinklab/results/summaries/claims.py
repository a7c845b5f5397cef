"""``run.json`` of a claim: its parts, its verdict, and the models that it was measured on."""

from __future__ import annotations

from typing import NotRequired, TypedDict

__all__ = [
    "ClaimOfModel",
    "ClaimPart",
    "ClaimRecord",
    "Judged",
]


class ClaimPart(TypedDict):
    """What was found about one part of a claim."""

    says: str
    effect: str
    needs: list[list[str]]
    expected: str
    more_than: float | None
    less_than: float | None
    unit: str
    mean: float | None
    interval: list[float] | None
    method: NotRequired[str | None]
    standardized: float | None
    by_seed: dict[str, float | None]
    verdict: str
    steps: NotRequired[int]
    """Of how many steps this is the one that decides, where there are several: the interval is 95 % for all together."""
    model: NotRequired[str]
    """Of what is said of some of several models the one that decides, whose draws the interval is over; likewise."""


class Judged(TypedDict):
    """A verdict and the parts that it is made of."""

    verdict: str
    parts: list[ClaimPart]


class ClaimOfModel(Judged):
    """What was found about a claim on one checkpoint; ``by_seed`` of its parts is by draw of texts."""

    name: str
    revision: str
    kind: str
    operation: str
    parameters: int
    text: str
    reason: str
    effect: float | None
    interval: list[float] | None
    unit: str | None
    presupposes: list[ClaimPart]


class ClaimRecord(Judged):
    """``run.json`` of a claim; of one on checkpoints ``by_seed`` is by name of the model, and ``models`` has each by itself."""

    kind: str
    claim: str
    statement: str
    source: str
    reference: str
    published: str
    scale: str
    base: NotRequired[str | None]
    source_base: NotRequired[str | None]
    natural_text: NotRequired[bool]
    cost: str
    reason: str
    created: str
    seeds: list[int]
    presupposes: list[ClaimPart]
    conditions: dict[str, object]
    environment: dict[str, dict[str, object]]
    evidence: NotRequired[str]
    one_model: NotRequired[str | None]
    models: NotRequired[list[ClaimOfModel]]
    lent: NotRequired[dict[str, dict[str, str]]]
    """Label of a variant to seeds beyond ``seeds`` to the claims that have trained these, with a comma between several.

    Numbers that premises alone use.
    """
