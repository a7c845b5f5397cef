"""Effects: what is computed from the numbers of one seed, and then judged over seeds; one number each, with its words."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from sinklab.errors import ConfigurationError

__all__ = ["Difference", "Effect", "Extreme", "Numbers", "Peak", "Ratio", "Trend", "Value"]

Numbers = Mapping[str, Mapping[str, float]]
"""What one seed has given: label of a condition to metric to number. A number that could not be taken is absent."""


class Effect(abc.ABC):
    """One number of one seed."""

    @abc.abstractmethod
    def __call__(self, numbers: Numbers) -> float | None:
        """The effect, or ``None`` when a number that it needs is missing or is not finite (a run that diverged)."""

    @abc.abstractmethod
    def needs(self) -> frozenset[tuple[str, str]]:
        """The (condition, metric) pairs that it is computed from."""

    @property
    @abc.abstractmethod
    def words(self) -> str:
        """What is computed, in one line for tables."""


def _of(numbers: Numbers, condition: str, metric: str) -> float | None:
    found = numbers.get(condition, {}).get(metric)
    return None if found is None or not math.isfinite(found) else float(found)


def _all(numbers: Numbers, conditions: Sequence[str], metric: str) -> list[float] | None:
    found = [_of(numbers, condition, metric) for condition in conditions]
    return None if any(value is None for value in found) else [value for value in found if value is not None]


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
    """A number of one condition less that of another, of the same seed.

    Args:
        other: metric of ``against``, if it is another than ``metric``.
    """

    word: ClassVar[str] = "less"

    def compare(self, left: float, right: float) -> float | None:
        return left - right


class Ratio(_Pair):
    """A number of one condition over that of another, of the same seed; missing where the latter is 0.

    Args:
        other: metric of ``against``, if it is another than ``metric``.
    """

    word: ClassVar[str] = "over"

    def compare(self, left: float, right: float) -> float | None:
        return left / right if right else None


@dataclasses.dataclass(frozen=True)
class Trend(Effect):
    """Spearman's rank correlation of a number with the order of the conditions: 1 rises throughout, -1 falls throughout.

    Ties share their ranks; if all values are the same, the trend is 0.

    Args:
        over: labels, in the order in which the number is said to rise or fall; at least three.
    """

    metric: str
    over: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.over) < 3:
            raise ConfigurationError(f"a trend needs three conditions or more, got {', '.join(self.over)}; use a Difference")

    def __call__(self, numbers: Numbers) -> float | None:
        values = _all(numbers, self.over, self.metric)
        return None if values is None else _correlation([float(place) for place in range(len(values))], _ranks(values))

    def needs(self) -> frozenset[tuple[str, str]]:
        return frozenset((label, self.metric) for label in self.over)

    @property
    def words(self) -> str:
        return f"rank correlation of {self.metric} with the order {', '.join(self.over)}"


@dataclasses.dataclass(frozen=True)
class Peak(Effect):
    """By how much the largest number inside an order of conditions exceeds the larger one of its two ends."""

    metric: str
    over: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.over) < 3:
            raise ConfigurationError(f"a peak needs three conditions or more, got {', '.join(self.over)}")

    def __call__(self, numbers: Numbers) -> float | None:
        values = _all(numbers, self.over, self.metric)
        return None if values is None else max(values[1:-1]) - max(values[0], values[-1])

    def needs(self) -> frozenset[tuple[str, str]]:
        return frozenset((label, self.metric) for label in self.over)

    @property
    def words(self) -> str:
        return f"{self.metric}: largest inside {', '.join(self.over)} less the larger end"


@dataclasses.dataclass(frozen=True)
class Extreme(Effect):
    """The largest (or smallest) number over several conditions: for what must hold in every one of them."""

    metric: str
    over: tuple[str, ...]
    largest: bool = True

    def __post_init__(self) -> None:
        if not self.over:
            raise ConfigurationError("an extreme needs at least one condition")

    def __call__(self, numbers: Numbers) -> float | None:
        values = _all(numbers, self.over, self.metric)
        return None if values is None else (max if self.largest else min)(values)

    def needs(self) -> frozenset[tuple[str, str]]:
        return frozenset((label, self.metric) for label in self.over)

    @property
    def words(self) -> str:
        return f"{'largest' if self.largest else 'smallest'} {self.metric} of {', '.join(self.over)}"


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values]


def _correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Pearson's, and 0 if one side does not vary."""
    mean_left, mean_right = sum(left) / len(left), sum(right) / len(right)
    across = sum((a - mean_left) * (b - mean_right) for a, b in zip(left, right, strict=True))
    spread = math.sqrt(sum((a - mean_left) ** 2 for a in left) * sum((b - mean_right) ** 2 for b in right))
    return across / spread if spread else 0.0
