"""Choosing a learning rate for every operation: on seeds of its own, so that what is then evaluated was not looked at.

A rate that suits softmax need not suit another operation, and one rate for all compares an operation that is tuned with others
that are not. So each operation is trained at five rates, and the one with the lowest mean held-out loss is its own.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from sinklab.errors import ConfigurationError
from sinklab.jobs.scale import SCALES, Scale

__all__ = ["FACTORS", "SELECTION_SEEDS", "Choice", "Losses", "check_apart"]

FACTORS: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Learning rates that are tried, over that of the scale."""

SELECTION_SEEDS: Mapping[Scale, tuple[int, ...]] = {scale: (1000, 1001) if scale == "tiny" else (1000,) for scale in SCALES}
"""Seeds on which a rate is chosen; none of them is evaluated."""

Losses = Mapping[float, Mapping[int, float | None]]
"""Factor to seed to held-out loss in nats, ``None`` for a training that diverged; one that failed is absent."""


def check_apart(seeds: Sequence[int], scale: Scale) -> None:
    """Refuse to evaluate on seeds on which rates are chosen.

    Raises:
        ConfigurationError: they share one.
    """
    both = sorted(set(seeds) & set(SELECTION_SEEDS[scale]))
    if both:
        raise ConfigurationError(
            f"pathways: seed {both[0]} is one on which learning rates are chosen; evaluate on others than "
            f"{', '.join(map(str, SELECTION_SEEDS[scale]))}"
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The learning rate of one operation, and what it was chosen by.

    Args:
        losses: of every factor of :data:`FACTORS` on every selection seed.
        seeds: the selection seeds.
    """

    losses: Losses
    seeds: tuple[int, ...]

    @property
    def means(self) -> dict[float, float]:
        """Factor to mean loss, of those with which no training diverged or failed."""
        means = {}
        for factor in FACTORS:
            values = [self.losses.get(factor, {}).get(seed) for seed in self.seeds]
            known = [value for value in values if value is not None]
            if values and len(known) == len(values):
                means[factor] = statistics.fmean(known)
        return means

    @property
    def missing(self) -> int:
        """Trainings that have given nothing, not even that they diverged."""
        return sum(seed not in self.losses.get(factor, {}) for factor in FACTORS for seed in self.seeds)

    @property
    def factor(self) -> float | None:
        """That of the lowest mean loss; of equal ones the lowest. ``None`` if a training is missing, or none has a mean."""
        means = self.means
        return None if self.missing or not means else min(means, key=lambda factor: (means[factor], factor))

    @property
    def end(self) -> str:
        """``lowest`` or ``highest`` where the best rate is the end of the range, so that one outside may be better."""
        return {FACTORS[0]: "lowest", FACTORS[-1]: "highest"}.get(self.factor or 0.0, "")

    @property
    def spread(self) -> float | None:
        """Largest less lowest mean loss, in nats, over the rates that have one."""
        means = self.means
        return max(means.values()) - min(means.values()) if means and not self.missing else None

    @property
    def diverged(self) -> float | None:
        """Share of the trainings that diverged."""
        losses = [value for of_factor in self.losses.values() for value in of_factor.values()]
        return sum(value is None for value in losses) / len(losses) if losses and not self.missing else None

    @property
    def numbers(self) -> dict[str, float]:
        """Columns of the comparison."""
        numbers = {"chosen_factor": self.factor, "rate_range": self.spread, "rate_diverged": self.diverged}
        return {name: value for name, value in numbers.items() if value is not None}

    def to_dict(self) -> dict[str, object]:
        """For JSON; :meth:`of_dict` makes it again."""
        losses = {
            f"{factor:g}": {str(seed): loss for seed, loss in of_factor.items()} for factor, of_factor in self.losses.items()
        }
        return {"factor": self.factor, "end_of_range": self.end or None, "seeds": list(self.seeds), "losses": losses}

    @classmethod
    def of_dict(cls, fields: Mapping[str, object]) -> Choice:
        """What :meth:`to_dict` has written."""
        losses, seeds = fields["losses"], fields["seeds"]
        assert isinstance(losses, Mapping)
        assert isinstance(seeds, list)
        return cls(
            {float(factor): {int(seed): loss for seed, loss in of_factor.items()} for factor, of_factor in losses.items()},
            tuple(seeds),
        )
