"""What a claim is: a published statement with its citation, the runs that test it, what it says about them, and its cost."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sinklab.errors import ConfigurationError
from sinklab.reproduction.effects import Numbers
from sinklab.reproduction.verdict import Part

if TYPE_CHECKING:  # so that claims are listed without torch
    from sinklab.reproduction.trained import Trained
    from sinklab.training.config import PretrainingConfig

__all__ = [
    "BASELINE",
    "COSTS",
    "SCALES",
    "TRAINED_COSTS",
    "Changes",
    "Claim",
    "Condition",
    "Cost",
    "Measure",
    "ReadOut",
    "Scale",
    "Times",
]

Scale = Literal["tiny", "small", "60m", "1b"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "60m", "1b")

Cost = Literal["seconds", "minutes", "hours", "gpu"]
COSTS: tuple[Cost, ...] = ("seconds", "minutes", "hours", "gpu")

TRAINED_COSTS: Mapping[Scale, Cost] = {"tiny": "minutes", "small": "hours", "60m": "gpu", "1b": "gpu"}
"""Cost of a claim about pre-training, at every scale."""

BASELINE = "baseline"
"""Label of the condition in which nothing is changed."""


@dataclasses.dataclass(frozen=True)
class Times:
    """A value of the scale's own configuration times a factor; what makes "half the learning rate" one word at every scale."""

    factor: float


Changes = Mapping[str, Any]
"""Dotted field to its value or to :class:`Times`; a dictionary (``model.operation``, ``model.position``) replaces the whole."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """A setting under which a model is pre-trained at every seed.

    Args:
        label: what tables call it: ``baseline`` where nothing is changed, otherwise what is.
        changes: to the configuration of the scale; or a function of that configuration that returns them.
        after: label of the condition from whose trained weights this one starts, at the same seed (fine-tuning).
    """

    label: str
    changes: Changes | Callable[[PretrainingConfig], Changes] = dataclasses.field(default_factory=dict)
    after: str | None = None


class ReadOut(Protocol):
    """Numbers of one trained model; registered in ``sinklab/read_outs`` or a function in the file of a claim."""

    def __call__(self, trained: Trained, /) -> Mapping[str, float]: ...


class Measure(Protocol):
    """Numbers of one seed from something else than pre-training, by condition; it must be deterministic under the seed."""

    def __call__(self, seed: int, scale: Scale, /) -> Numbers: ...


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published statement that can be run.

    The numbers that ``parts`` speak of come from pre-trained models (``conditions`` and ``read_outs``), from ``measure``, or
    from both, in which case labels must not clash. Every pre-trained condition has the numbers ``diverged`` (0 or 1),
    ``held_out_loss`` in nats, ``steps`` and ``seconds`` without any read-out.

    Args:
        statement: what is claimed, in one sentence.
        source: short name of the paper: ``gu2024``.
        reference: where it says so: ``Gu et al. 2024 (arXiv 2410.10781), table 4``.
        published: the published numbers, in a sentence.
        parts: what the claim says about the numbers; all must hold.
        presupposes: what must be so for the claim to be about anything, such as a baseline that has a sink.
        conditions: what is pre-trained.
        read_outs: what is read from every trained model: names from ``sinklab/read_outs``, or functions.
        measure: numbers from elsewhere.
        costs: scale to cost class. At scales that are not named the claim cannot be run; by default those of pre-training.
        evidence: scale to a remark about the result there that other numbers support; never a guess.

    Raises:
        ConfigurationError: fields that cannot go together; the message says which.
    """

    statement: str
    source: str
    reference: str
    published: str
    parts: tuple[Part, ...]
    presupposes: tuple[Part, ...] = ()
    conditions: tuple[Condition, ...] = ()
    read_outs: tuple[str | ReadOut, ...] = ()
    measure: Measure | None = None
    costs: Mapping[Scale, Cost] = dataclasses.field(default_factory=lambda: dict(TRAINED_COSTS))
    evidence: Mapping[Scale, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        labels = [condition.label for condition in self.conditions]
        problem = None
        if not self.parts:
            problem = "has no parts; a claim says something about a number"
        elif not re.search(r"arXiv \d{4}\.\d{5}", self.reference):
            problem = f"reference {self.reference!r} names no 'arXiv NNNN.NNNNN'"
        elif not self.conditions and self.measure is None:
            problem = "has neither conditions nor measure, so nothing can be run"
        elif len(set(labels)) < len(labels):
            problem = f"two conditions have one label: {', '.join(labels)}"
        elif not self.costs:
            problem = "has no costs, so no scale to run at"
        else:
            for condition in self.conditions:
                if condition.after is not None and condition.after not in labels:
                    problem = f"condition {condition.label!r} starts after {condition.after!r}, which is no condition of it"
        if problem is not None:
            raise ConfigurationError(f"claim {self.statement!r}: {problem}")
