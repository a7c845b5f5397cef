"""Effects: one number computed from the numbers of each seed, which a claim says to lie in some region; no torch."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar

from sinklab.errors import ConfigurationError
from sinklab.jobs.estimate import Estimate, estimate_kind, estimate_median, estimate_ratio
from sinklab.results.metric import Metric, declared

ANY = (-math.inf, math.inf)
"""Range of a number that may be any."""

Numbers = Mapping[str, Mapping[str, float]]
"""What one seed has given: label of a variant to metric to number. A number that could not be taken is absent."""


class Effect(abc.ABC):
    """One number of one seed, computed from numbers of variants."""

    @property
    @abc.abstractmethod
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The (variant, metric) pairs that it is computed from, in the order of :meth:`compute`."""

    @abc.abstractmethod
    def compute(self, values: Sequence[float]) -> float | None:
        """The effect from the numbers; ``None`` where these have none."""

    @property
    @abc.abstractmethod
    def words(self) -> str:
        """What is computed, in one line for tables."""

    def __call__(self, numbers: Numbers) -> float | None:
        """The effect, or ``None`` when a number that it needs is missing or is not finite (a run that diverged)."""
        values = [numbers.get(variant, {}).get(metric, math.nan) for variant, metric in self.pairs]
        return self.compute([float(value) for value in values]) if all(map(math.isfinite, values)) else None

    def needs(self) -> frozenset[tuple[str, str]]:
        """The (variant, metric) pairs that it is computed from."""
        return frozenset(self.pairs)

    @property
    def unit(self) -> str:
        """That of the metrics, if they are declared and have one unit; else "number"."""
        units = {"number" if metric is None else metric.unit for metric in self._metrics()}
        return units.pop() if len(units) == 1 else "number"

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest value: those of the metrics, if it is a number of theirs and they have one range; else any."""
        ranges = {ANY if metric is None else metric.range for metric in self._metrics()}
        return ranges.pop() if len(ranges) == 1 else ANY

    def _metrics(self) -> list[Metric | None]:
        """What it is computed from; ``None`` for what nobody declares."""
        return [declared(metric) for _, metric in self.pairs]

    @property
    def outcome(self) -> bool:
        """Whether it is of things that happened or did not, which are counted."""
        return all(metric is not None and metric.outcome for metric in self._metrics())

    @property
    def steps(self) -> tuple[Effect, ...]:
        """Effects of which one must show what is said; mostly it is the effect itself."""
        return (self,)

    def estimate(self, values: Sequence[float], level: float = 0.95) -> Estimate:
        """What the effects of three seeds or more say together, by the kind of number; outcomes are counted."""
        return estimate_kind(values, level, unit=self.unit, range=self.range, outcome=self.outcome)


def _less(unit: str) -> str:
    """The unit of a difference: of two percentages it is points."""
    return "points" if unit == "percent" else unit


@dataclasses.dataclass(frozen=True)
class Value(Effect):
    """A number as it is.

    Args:
        within: smallest and largest value in these models, where that is less than the metric allows: a weight is a share of
            its row under softmax, and any number under ReLU.
    """

    metric: str
    of: str
    within: tuple[float, float] | None = None

    @property
    def range(self) -> tuple[float, float]:
        return super().range if self.within is None else self.within

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return ((self.of, self.metric),)

    def compute(self, values: Sequence[float]) -> float:
        return values[0]

    @property
    def words(self) -> str:
        return f"{self.metric} of {self.of}"


@dataclasses.dataclass(frozen=True)
class _Pair(Effect):
    """Two numbers of one seed, side by side.

    Args:
        other: metric of ``against``, if it is another than ``metric``.
    """

    metric: str
    of: str
    against: str
    other: str | None = None

    range: ClassVar[tuple[float, float]] = ANY
    word: ClassVar[str]
    """What stands between the two in tables."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return (self.of, self.metric), (self.against, self.other or self.metric)

    @property
    def words(self) -> str:
        if self.other is not None:
            return f"{self.metric} of {self.of} {self.word} {self.other} of {self.against}"
        return f"{self.metric}: {self.of} {self.word} {self.against}"


class Difference(_Pair):
    """A number of one variant less that of another, of the same seed."""

    word: ClassVar[str] = "less"

    @property
    def unit(self) -> str:
        return _less(super().unit)

    def compute(self, values: Sequence[float]) -> float:
        return values[0] - values[1]

    def estimate(self, values: Sequence[float], level: float = 0.95) -> Estimate:
        return estimate_kind(values, level, unit=self.unit, range=ANY, outcome=self.outcome, paired=True)


class Ratio(_Pair):
    """A number of one variant over that of another, of the same seed; missing where the latter is not above 0.

    A cost of which there is none has no half: over a gain, what costs more is the smaller ratio.
    """

    word: ClassVar[str] = "over"
    unit: ClassVar[str] = "ratio"

    def compute(self, values: Sequence[float]) -> float | None:
        return values[0] / values[1] if values[1] > 0 else None

    def estimate(self, values: Sequence[float], level: float = 0.95) -> Estimate:
        return estimate_ratio(values, level)


@dataclasses.dataclass(frozen=True)
class Best(Effect):
    """The smallest number of some variants less the smallest of others, of the same seed: each at its own best setting."""

    metric: str
    of: tuple[str, ...]
    against: tuple[str, ...]

    range: ClassVar[tuple[float, float]] = ANY

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple((label, self.metric) for label in (*self.of, *self.against))

    def compute(self, values: Sequence[float]) -> float:
        return min(values[: len(self.of)]) - min(values[len(self.of) :])

    @property
    def words(self) -> str:
        return f"smallest {self.metric}: of {', '.join(self.of)} less of {', '.join(self.against)}"


@dataclasses.dataclass(frozen=True)
class _Several(Effect):
    """One number of several variants of one seed."""

    metric: str
    over: tuple[str, ...]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple((label, self.metric) for label in self.over)


@dataclasses.dataclass(frozen=True)
class Trend(_Several):
    """Spearman's rank correlation of a number with the order of the variants: 1 rises throughout, -1 falls throughout.

    Ties share their ranks; if all values are the same, the trend is 0.

    Args:
        over: labels, in the order in which the number is said to rise or fall; at least three.
    """

    unit: ClassVar[str] = "correlation"
    range: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    def compute(self, values: Sequence[float]) -> float:
        if len(set(values)) == 1:
            return 0.0
        from scipy.stats import spearmanr

        return float(spearmanr(range(len(values)), values).statistic)

    def estimate(self, values: Sequence[float], level: float = 0.95) -> Estimate:
        # Over a few conditions it takes a handful of values, whose mean no t interval describes.
        return estimate_median(values, level)

    @property
    def words(self) -> str:
        return f"rank correlation of {self.metric} with the order {', '.join(self.over)}"


@dataclasses.dataclass(frozen=True)
class Extreme(_Several):
    """The largest (or smallest) number over several variants: for what must hold in every one of them."""

    largest: bool = True

    def compute(self, values: Sequence[float]) -> float:
        return (max if self.largest else min)(values)

    @property
    def words(self) -> str:
        return f"{'largest' if self.largest else 'smallest'} {self.metric} of {', '.join(self.over)}"


@dataclasses.dataclass(frozen=True)
class Rise(_Several):
    """The largest rise of a number from one variant to the next: at most 0 where it falls, or stays, throughout.

    Over seeds every step is judged by itself: the largest of several noisy steps is above 0 in each seed of a plateau.
    """

    range: ClassVar[tuple[float, float]] = ANY

    def compute(self, values: Sequence[float]) -> float:
        return max(after - before for before, after in itertools.pairwise(values))

    @property
    def steps(self) -> tuple[Effect, ...]:
        return tuple(Difference(self.metric, after, before) for before, after in itertools.pairwise(self.over))

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
    range: ClassVar[tuple[float, float]] = ANY

    def __post_init__(self) -> None:
        if len(self.over) != len(self.at) or min(self.at, default=0.0) <= 0 or len(set(self.at)) < 2:
            raise ConfigurationError(f"a slope needs a positive number for each of {', '.join(self.over)}, got {self.at}")

    def compute(self, values: Sequence[float]) -> float:
        return statistics.linear_regression([math.log2(at) for at in self.at], values).slope

    def estimate(self, values: Sequence[float], level: float = 0.95) -> Estimate:
        # Of it 0 and 1 are values like any other, whatever the metric.
        return estimate_kind(values, level, unit=self.unit, range=ANY, outcome=False)

    @property
    def unit(self) -> str:
        return f"{_less(super().unit)} a doubling"

    @property
    def words(self) -> str:
        return f"slope of {self.metric} over the logarithm of what differs in {', '.join(self.over)}"
