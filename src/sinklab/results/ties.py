"""Ties: when two weights are as large as each other but for rounding, and when a mean weight is above a threshold."""

from __future__ import annotations

__all__ = ["TIE", "just_above"]

TIE = 1e-5
"""Relative distance within which two float32 weights are the same: the noise of two kernels that compute one number."""


def just_above(threshold: float) -> float:
    """What a mean weight exceeds that lies above a threshold, and is not as large but for rounding.

    Ten weights of 1/10 add up to a little more than 1 in float32, and their mean is not above 1/10.
    """
    return threshold * (1.0 + TIE)
