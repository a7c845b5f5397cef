"""What a claim is: a published statement with its citation, what is run for it, and what it says about the numbers.

A claim has parts; a part is an :class:`Effect`, one number computed from the numbers of each seed, and the region in which it
is said to lie. This module needs no torch, so that claims are listed without it.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from sinklab.errors import ConfigurationError
from sinklab.jobs.estimate import Estimate, estimate_counts, estimate_mean, estimate_median, estimate_ratio, estimate_share
from sinklab.results.metric import catalogue

if TYPE_CHECKING:
    from sinklab.jobs.checkpoint import Checkpoint, Reads
    from sinklab.jobs.trained import TrainedModel
    from sinklab.training.config import PretrainingConfig

__all__ = [
    "BASELINE",
    "BASES",
    "CHECKPOINT",
    "COSTS",
    "RECORDED",
    "SCALES",
    "TRAINED_COSTS",
    "Base",
    "Changes",
    "Claim",
    "Cost",
    "Difference",
    "Effect",
    "Extreme",
    "Measure",
    "Numbers",
    "OfCheckpoint",
    "OnCheckpoint",
    "Part",
    "Peak",
    "Ratio",
    "ReadOut",
    "Rise",
    "Scale",
    "Slope",
    "Times",
    "Trend",
    "Value",
    "Variant",
    "bases_at",
    "folder_name",
    "folder_names",
]

Scale = Literal["tiny", "small", "60m", "1b"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "60m", "1b")

CHECKPOINT = "checkpoint"
"""In the place of a scale: nothing is trained, and claims are measured on models as they are."""

RECORDED = (*SCALES, CHECKPOINT)
"""What a record may have for its scale."""

Base = Literal["bos", "no-bos"]
BASES: Mapping[Scale, tuple[Base, ...]] = {
    "tiny": ("bos", "no-bos"),
    "small": ("bos",),
    "60m": ("no-bos",),
    "1b": ("no-bos",),
}
"""What the rows of a scale's models begin with: BOS, which is a place to rest in every row, or nothing of the kind.

With BOS, a bias that could take the sink is not needed; so what a paper found without BOS is tested without.
"""


def bases_at(scale: Scale, bases: Sequence[Base] = ()) -> tuple[Base, ...]:
    """Those of a claim's bases that a scale has, in their order; where it has none of them, the first of the scale."""
    return tuple(base for base in bases if base in BASES[scale]) or BASES[scale][:1]


def folder_name(scale: str, base: str | None, own: str | None) -> str:
    """The folder in which the result of a claim lies: the scale, with the base where that is not the claim's own."""
    return scale if base == own else f"{scale}-{base}"


def folder_names(scale: str) -> tuple[str, ...]:
    """Every folder in which results of a scale, or of :data:`CHECKPOINT`, may lie."""
    there = next((bases for known, bases in BASES.items() if known == scale), ())
    return (scale, *(folder_name(scale, base, None) for base in there if len(there) > 1))


Cost = Literal["seconds", "minutes", "hours", "gpu"]
COSTS: tuple[Cost, ...] = ("seconds", "minutes", "hours", "gpu")

TRAINED_COSTS: Mapping[Scale, Cost] = {"tiny": "minutes", "small": "hours", "60m": "gpu", "1b": "gpu"}
"""Cost of a claim about pre-training, at every scale."""

BASELINE = "baseline"
"""Label of the variant in which nothing is changed."""


@dataclasses.dataclass(frozen=True)
class Times:
    """A value of the scale's own configuration times a factor; what makes "half the learning rate" one word at every scale."""

    factor: float


Numbers = Mapping[str, Mapping[str, float]]
"""What one seed has given: label of a variant to metric to number. A number that could not be taken is absent."""


class Effect(abc.ABC):
    """One number of one seed."""

    @abc.abstractmethod
    def __call__(self, numbers: Numbers) -> float | None:
        """The effect, or ``None`` when a number that it needs is missing or is not finite (a run that diverged)."""

    @abc.abstractmethod
    def needs(self) -> frozenset[tuple[str, str]]:
        """The (variant, metric) pairs that it is computed from."""

    @property
    @abc.abstractmethod
    def words(self) -> str:
        """What is computed, in one line for tables."""

    @property
    def unit(self) -> str:
        """That of the metrics, if they are declared and have one unit; else "number"."""
        known = catalogue()
        units = {known[metric].metric.unit if metric in known else "number" for _, metric in self.needs()}
        return units.pop() if len(units) == 1 else "number"

    def estimate(self, values: Sequence[float]) -> Estimate:
        """What the effects of three seeds or more say together.

        Outcomes are counted: whether a training diverged, and the difference of two of these. Shares are rates. A number that
        is a ratio (a norm over that of others) is one, as the ratio of two numbers is.
        """
        known, paired = catalogue(), isinstance(self, Difference | Peak)
        outcomes = all(metric in known and known[metric].metric.outcome for _, metric in self.needs())
        if outcomes and all(value in (-1.0, 0.0, 1.0) for value in values):
            return estimate_counts(values, paired=paired)
        if self.unit == "ratio" and not paired:
            return estimate_ratio(values)
        whole = {"fraction": 1.0, "percent": 100.0}.get(self.unit)
        if whole is not None and not paired and min(values) >= 0 and max(values) <= whole:
            return estimate_share(values, whole)
        return estimate_mean(values)


def _of(numbers: Numbers, variant: str, metric: str) -> float | None:
    found = numbers.get(variant, {}).get(metric)
    return None if found is None or not math.isfinite(found) else float(found)


def _all(numbers: Numbers, variants: Sequence[str], metric: str) -> list[float] | None:
    found = [_of(numbers, variant, metric) for variant in variants]
    return None if any(value is None for value in found) else [value for value in found if value is not None]


def _less(unit: str) -> str:
    """The unit of a difference: of two percentages it is points."""
    return "points" if unit == "percent" else unit


@dataclasses.dataclass(frozen=True)
class Value(Effect):
    """A number as it is."""

    metric: str
    of: str

    def __call__(self, numbers: Numbers) -> float | None:
        return _of(numbers, self.of, self.metric)

    def needs(self) -> frozenset[tuple[str, str]]:
        return frozenset({(self.of, self.metric)})

    @property
    def words(self) -> str:
        return f"{self.metric} of {self.of}"


@dataclasses.dataclass(frozen=True)
class _Pair(Effect):
    """Two numbers of one seed, side by side."""

    metric: str
    of: str
    against: str
    other: str | None = None

    word: ClassVar[str]
    """What stands between the two in tables."""

    @abc.abstractmethod
    def compare(self, left: float, right: float) -> float | None:
        """The effect from both numbers."""

    def __call__(self, numbers: Numbers) -> float | None:
        left, right = _of(numbers, self.of, self.metric), _of(numbers, self.against, self.other or self.metric)
        return None if left is None or right is None else self.compare(left, right)

    def needs(self) -> frozenset[tuple[str, str]]:
        return frozenset({(self.of, self.metric), (self.against, self.other or self.metric)})

    @property
    def words(self) -> str:
        if self.other is not None:
            return f"{self.metric} of {self.of} {self.word} {self.other} of {self.against}"
        return f"{self.metric}: {self.of} {self.word} {self.against}"


class Difference(_Pair):
    """A number of one variant less that of another, of the same seed.

    Args:
        other: metric of ``against``, if it is another than ``metric``.
    """

    word: ClassVar[str] = "less"

    @property
    def unit(self) -> str:
        return _less(super().unit)

    def compare(self, left: float, right: float) -> float | None:
        return left - right


class Ratio(_Pair):
    """A number of one variant over that of another, of the same seed; missing where the latter is 0.

    Args:
        other: metric of ``against``, if it is another than ``metric``.
    """

    word: ClassVar[str] = "over"
    unit: ClassVar[str] = "ratio"

    def compare(self, left: float, right: float) -> float | None:
        return left / right if right else None

    def estimate(self, values: Sequence[float]) -> Estimate:
        return estimate_ratio(values)


@dataclasses.dataclass(frozen=True)
class _Several(Effect):
    """One number of several variants of one seed."""

    metric: str
    over: tuple[str, ...]

    def needs(self) -> frozenset[tuple[str, str]]:
        return frozenset((label, self.metric) for label in self.over)


@dataclasses.dataclass(frozen=True)
class Trend(_Several):
    """Spearman's rank correlation of a number with the order of the variants: 1 rises throughout, -1 falls throughout.

    Ties share their ranks; if all values are the same, the trend is 0.

    Args:
        over: labels, in the order in which the number is said to rise or fall; at least three.
    """

    unit: ClassVar[str] = "correlation"

    def __post_init__(self) -> None:
        if len(self.over) < 3:
            raise ConfigurationError(f"a trend needs three variants or more, got {', '.join(self.over)}; use a Difference")

    def __call__(self, numbers: Numbers) -> float | None:
        values = _all(numbers, self.over, self.metric)
        if values is None or len(set(values)) == 1:
            return None if values is None else 0.0
        from scipy.stats import spearmanr

        return float(spearmanr(range(len(values)), values).statistic)

    def estimate(self, values: Sequence[float]) -> Estimate:
        # Over a few conditions it takes a handful of values, whose mean no t interval describes.
        return estimate_median(values)

    @property
    def words(self) -> str:
        return f"rank correlation of {self.metric} with the order {', '.join(self.over)}"


@dataclasses.dataclass(frozen=True)
class Peak(_Several):
    """By how much the largest number inside an order of variants exceeds the larger one of its two ends."""

    def __post_init__(self) -> None:
        if len(self.over) < 3:
            raise ConfigurationError(f"a peak needs three variants or more, got {', '.join(self.over)}")

    def __call__(self, numbers: Numbers) -> float | None:
        values = _all(numbers, self.over, self.metric)
        return None if values is None else max(values[1:-1]) - max(values[0], values[-1])

    @property
    def unit(self) -> str:
        return _less(super().unit)

    @property
    def words(self) -> str:
        return f"{self.metric}: largest inside {', '.join(self.over)} less the larger end"


@dataclasses.dataclass(frozen=True)
class Extreme(_Several):
    """The largest (or smallest) number over several variants: for what must hold in every one of them."""

    largest: bool = True

    def __post_init__(self) -> None:
        if not self.over:
            raise ConfigurationError("an extreme needs at least one variant")

    def __call__(self, numbers: Numbers) -> float | None:
        values = _all(numbers, self.over, self.metric)
        return None if values is None else (max if self.largest else min)(values)

    @property
    def words(self) -> str:
        return f"{'largest' if self.largest else 'smallest'} {self.metric} of {', '.join(self.over)}"


@dataclasses.dataclass(frozen=True)
class Rise(_Several):
    """The largest rise of a number from one variant to the next: at most 0 where it falls, or stays, throughout."""

    def __post_init__(self) -> None:
        if len(self.over) < 2:
            raise ConfigurationError(f"a rise needs two variants or more, got {', '.join(self.over) or 'none'}")

    def __call__(self, numbers: Numbers) -> float | None:
        values = _all(numbers, self.over, self.metric)
        return None if values is None else max(after - before for before, after in itertools.pairwise(values))

    @property
    def unit(self) -> str:
        return _less(super().unit)

    @property
    def words(self) -> str:
        return f"{self.metric}: largest rise from one to the next of {', '.join(self.over)}"


@dataclasses.dataclass(frozen=True)
class Slope(_Several):
    """By how much a number grows with every doubling: the slope of the line of least squares over the logarithm, base 2.

    Args:
        at: what the variants differ in, such as a learning rate over that of the scale; positive, and not all the same.
    """

    at: tuple[float, ...] = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        if len(self.over) != len(self.at) or min(self.at, default=0.0) <= 0 or len(set(self.at)) < 2:
            raise ConfigurationError(f"a slope needs a positive number for each of {', '.join(self.over)}, got {self.at}")

    def __call__(self, numbers: Numbers) -> float | None:
        values = _all(numbers, self.over, self.metric)
        return None if values is None else statistics.linear_regression([math.log2(at) for at in self.at], values).slope

    @property
    def unit(self) -> str:
        return f"{_less(super().unit)} a doubling"

    @property
    def words(self) -> str:
        return f"slope of {self.metric} over the logarithm of what differs in {', '.join(self.over)}"


@dataclasses.dataclass(frozen=True)
class Part:
    """One sentence of a claim: an effect and the region in which it is said to lie.

    Args:
        says: the sentence, such as "the sink leaves the first token".
        more_than: lower bound of the region, itself outside. The bound of a direction is the least effect that is worth
            calling one, not 0, so that "reproduced" is about more than a sign.
        less_than: upper bound of the region, itself outside.
        proved: whether it follows from definitions alone, so that one exception is an error of the proof or of the
            implementation: it holds if every seed shows it, and is no evidence about trainings.
        of_some: whether what is claimed is that there are such models: over models one that shows it decides, and those that
            do not refute nothing.

    Raises:
        ConfigurationError: no bound, or bounds with nothing between.
    """

    says: str
    effect: Effect
    more_than: float = -math.inf
    less_than: float = math.inf
    proved: bool = False
    of_some: bool = False

    def __post_init__(self) -> None:
        if math.isinf(self.more_than) and math.isinf(self.less_than):
            raise ConfigurationError(f"the part {self.says!r} has no bound; give more_than or less_than")
        if not self.more_than < self.less_than:
            raise ConfigurationError(f"the part {self.says!r}: nothing lies between {self.more_than:g} and {self.less_than:g}")

    @property
    def region(self) -> str:
        """The region in words."""
        bounds = [f"more than {self.more_than:g}"] if math.isfinite(self.more_than) else []
        bounds += [f"less than {self.less_than:g}"] if math.isfinite(self.less_than) else []
        return " and ".join(bounds)


Changes = Mapping[str, object]
"""Dotted field to its value or to :class:`Times`; a dictionary (``model.operation``, ``model.position``) replaces the whole."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A setting under which a model is pre-trained at every seed.

    Args:
        label: what tables call it: ``baseline`` where nothing is changed, otherwise what is.
        changes: to the configuration of the scale; or a function of that configuration that returns them.
        after: label of the variant from whose trained weights this one starts, at the same seed (fine-tuning).
    """

    label: str
    changes: Changes | Callable[[PretrainingConfig], Changes] = dataclasses.field(default_factory=dict)
    after: str | None = None


class ReadOut(Protocol):
    """Numbers of one trained model; registered in ``sinklab/read_outs`` or a function in the file of a claim."""

    def __call__(self, trained: TrainedModel, /) -> Mapping[str, float]: ...


class Measure(Protocol):
    """Numbers of one seed from something else than pre-training, by variant; it must be deterministic under the seed."""

    def __call__(self, seed: int, scale: Scale, /) -> Numbers: ...


class OfCheckpoint(Protocol):
    """Numbers of a checkpoint on the texts of one draw, by label; it must be deterministic under the seed of the draw.

    Raises:
        DoesNotApply, UnsupportedModelError: the claim is not about such a model, or it cannot be measured; both say why.
    """

    def __call__(self, checkpoint: Checkpoint, /) -> Numbers: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnCheckpoint:
    """How a claim is measured on any checkpoint, without training.

    By default the checkpoint stands in the place of the variant :data:`BASELINE`: it is read out as a model trained under it
    would be, and the parts are those of the claim.

    Args:
        label: another variant in whose place it stands.
        measure: numbers by label, in the place of the read-outs of the claim.
        parts: what is said of them, if the claim says more than one model can answer.
        presupposes: likewise.
        about: ``decoder``, models that predict the next token; ``text``, encoders too.
        reads: the longest texts that it takes.
        not_about: why it says nothing about a checkpoint of that kind, such as one with other positions; empty where it does.
        remark: how what is measured differs from what the claim says of trained models, in a sentence.
    """

    label: str = BASELINE
    measure: OfCheckpoint | None = None
    parts: tuple[Part, ...] = ()
    presupposes: tuple[Part, ...] | None = None
    about: Literal["decoder", "text"] = "decoder"
    reads: Reads = "samples"
    not_about: Callable[[Checkpoint], str] | None = None
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published statement that can be run.

    The numbers that ``parts`` speak of come from pre-trained models (``variants`` and ``read_outs``), from ``measure``, or
    from both, in which case labels must not clash. Every pre-trained variant has the numbers ``diverged`` (0 or 1),
    ``held_out_loss`` in nats, ``steps`` and ``seconds`` without any read-out.

    Args:
        statement: what is claimed, in one sentence.
        source: short name of the paper: ``gu2024``.
        reference: where it says so: ``Gu et al. 2024 (arXiv 2410.10781), table 4``.
        published: the published numbers, in a sentence.
        parts: what the claim says about the numbers; all must hold.
        presupposes: what must be so for the claim to be about anything, such as a baseline that has a sink.
        variants: what is pre-trained.
        read_outs: what is read from every trained model: names from ``sinklab/read_outs``, or functions.
        measure: numbers from elsewhere.
        costs: scale to cost class. At scales that are not named the claim cannot be run; by default those of pre-training.
        bases: on which bases it is run, where a scale has several: first the one that is as in the source, which gives the
            verdict, then others to compare with.
        one_model: scale to the name of the model that is measured there, where a seed draws texts for it and trains nothing: a
            verdict is then about this model, and says so.
        evidence: scale to a remark about the result there that other numbers support; never a guess.
        checkpoint: how it is measured on a model as it is; ``None`` where it takes training.

    Raises:
        ConfigurationError: fields that cannot go together; the message says which.
    """

    statement: str
    source: str
    reference: str
    published: str
    parts: tuple[Part, ...]
    presupposes: tuple[Part, ...] = ()
    variants: tuple[Variant, ...] = ()
    read_outs: tuple[str | ReadOut, ...] = ()
    measure: Measure | None = None
    costs: Mapping[Scale, Cost] = dataclasses.field(default_factory=lambda: dict(TRAINED_COSTS))
    bases: tuple[Base, ...] = ("bos",)
    one_model: Mapping[Scale, str] = dataclasses.field(default_factory=dict)
    evidence: Mapping[Scale, str] = dataclasses.field(default_factory=dict)
    checkpoint: OnCheckpoint | None = None

    def __post_init__(self) -> None:
        labels = [variant.label for variant in self.variants]
        problem = None
        if not self.parts:
            problem = "has no parts; a claim says something about a number"
        elif not re.search(r"arXiv \d{4}\.\d{5}", self.reference):
            problem = f"reference {self.reference!r} names no 'arXiv NNNN.NNNNN'"
        elif not self.variants and self.measure is None:
            problem = "has neither variants nor measure, so nothing can be run"
        elif len(set(labels)) < len(labels):
            problem = f"two variants have one label: {', '.join(labels)}"
        elif not self.costs:
            problem = "has no costs, so no scale to run at"
        elif not self.bases or len(set(self.bases)) < len(self.bases) or not set(self.bases) <= set(BASES["tiny"]):
            known = ", ".join(BASES["tiny"])
            problem = f"bases are {', '.join(self.bases) or 'none'}; expected one or more of {known}, each once"
        elif len(self.bases) > 1 and self.measure is not None:
            problem = "measures by itself, which no base decides, and names several bases"
        else:
            for variant in self.variants:
                if variant.after is not None and variant.after not in labels:
                    problem = f"variant {variant.label!r} starts after {variant.after!r}, which is no variant of it"
        if problem is not None:
            raise ConfigurationError(f"claim {self.statement!r}: {problem}")
