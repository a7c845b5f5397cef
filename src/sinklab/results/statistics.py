"""What several values say together: a mean, the interval it lies in, and how far the mean of more of them may be off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

__all__ = ["CHANCE", "LEAST_PARTS", "fewest", "mean_interval", "rare_cost", "shortfall"]

LEAST_PARTS = 8
"""Parts of the text that an interval rests on at least; Student's t for 7 degrees of freedom is 2.4, for infinitely many 2."""

CHANCE = 0.8
"""With which a count that is foretold decides (of seeds, of texts), as usual for the power of a study."""


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Mean of independent values and half the width of Student's t interval around it, in the unit of the values.

    Args:
        values: two or more; with two the interval is that of one degree of freedom, and wide.
        level: probability with which such intervals hold the mean of the population, if values are normal.
    """
    import scipy.special  # of the same functions as scipy.stats, which takes half a second to import

    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(scipy.special.stdtrit(len(values) - 1, (1 + level) / 2)) * error


def rare_cost(count: int, what: str = "text") -> str:
    """How rare a cost may be that none of so many texts shows: the sentence that stands beside a verdict "no" over their means.

    What one text in r has is in none of n with probability ``(1 - 1/r)^n``, which is 5 % at ``r = n / 3`` (the rule of three),
    and of two or three texts at a share of 78 or 63 %.
    An interval of means says nothing of it: texts without it have no spread.

    Args:
        count: texts that were measured, 1 or more.
        what: the noun for one of them.
    """
    if count == 1:
        return f"One {what} was measured: a cost that others have is not seen."
    if count < 4:  # more than half of them may have it, so the exact share
        share = 100 * (1 - 0.05 ** (1 / count))
        return f"A cost in fewer than {share:.0f} % of {what}s may not show in these {count}."
    return f"A cost in fewer than one {what} in {max(2, count // 3):,} may not show in these {count:,}."


def shortfall(seen: int, total: int, chance: float = CHANCE) -> float:
    """How far the mean of ``total`` values lies below that of the first ``seen`` of them, in standard deviations of one value.

    It lies no lower than that with probability ``chance``, whatever the mean of the population is, under normal scatter: the
    mean of all falls from that of the first by ``sqrt(1 / seen - 1 / total)`` in standard deviation, for what later values add
    and for what is not known of the population together. To take a mean that was seen as the one that will be, as a forecast
    with ``chance`` a half does, is to promise what comes true in half of the cases.

    Args:
        seen: two or more.
        total: ``seen`` or more.
    """
    import scipy.special

    return float(scipy.special.stdtrit(seen - 1, chance)) * math.sqrt(1 / seen - 1 / total)


def fewest(decides: Callable[[int], bool], least: int, most: int) -> int | None:
    """The first count from ``least`` to ``most`` that decides, as far as a range can be halved; ``None`` if ``most`` does not.

    Args:
        decides: of a count, whether it does; larger ones hardly ever undo it.
    """
    if least > most or not decides(most):
        return None
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if decides(middle) else (middle + 1, most)
    return most
