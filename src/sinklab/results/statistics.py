"""What several seeds say together: a mean and the interval it lies in, without scipy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["mean_interval", "t_quantile"]


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Mean of independent values and half the width of Student's t interval around it, in the unit of the values.

    Args:
        values: two or more; with two the interval is that of one degree of freedom, and wide.
        level: probability with which such intervals hold the mean of the population, if values are normal.
    """
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), t_quantile(level, len(values) - 1) * spread


def t_quantile(level: float, degrees: int) -> float:
    """The q with P(|T| <= q) = level for Student's t of ``degrees`` >= 1 degrees of freedom.

    The distribution function is a finite sum for whole degrees (Abramowitz & Stegun 26.7.3 and 26.7.4, with q as the square
    root of the degrees times the tangent of an angle), and is inverted by halving.
    """
    odd = degrees % 2

    def inside(angle: float) -> float:
        cosine, total = math.cos(angle), 0.0
        term = cosine if odd else 1.0
        for exponent in range(odd, degrees - 1, 2):
            total += term
            term *= cosine**2 * (exponent + 1) / (exponent + 2)
        return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):  # beyond the 53 bits of a float
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)
