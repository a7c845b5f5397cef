"""Ties: when two weights are as large as each other but for rounding, and when a mean weight is above a threshold."""

from __future__ import annotations

from sinklab.errors import ConfigurationError

__all__ = ["TIE", "just_above", "require_threshold"]

TIE = 1e-5
"""Relative distance within which two float32 weights are the same: the noise of two kernels that compute one number."""


def just_above(threshold: float) -> float:
    """What a mean weight exceeds that lies above a threshold, and is not as large but for rounding.

    Ten weights of 1/10 add up to a little more than 1 in float32, and their mean is not above 1/10.
    """
    return threshold * (1.0 + TIE)


def require_threshold(threshold: object, name: str = "threshold") -> None:
    """Refuse a threshold that is no number in [0, 1).

    Raises:
        ConfigurationError: it is.
    """
    try:
        fits, where = bool(0.0 <= threshold < 1.0), "in"  # type: ignore[operator]
    except TypeError:
        fits, where = False, "a number in"
    if not fits:
        raise ConfigurationError(
            f"{name} {threshold!r} must be {where} [0, 1): a mean weight is compared with it; usual is 0.3"
        )
