"""What several seeds say together: a mean and the interval it lies in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["mean_interval"]


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Mean of independent values and half the width of Student's t interval around it, in the unit of the values.

    Args:
        values: two or more; with two the interval is that of one degree of freedom, and wide.
        level: probability with which such intervals hold the mean of the population, if values are normal.
    """
    import scipy.special  # of the same functions as scipy.stats, which takes half a second to import

    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(scipy.special.stdtrit(len(values) - 1, (1 + level) / 2)) * error
