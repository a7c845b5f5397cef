"""Numbers of several seeds from those of one, for tests of what a claim says about published numbers."""

from __future__ import annotations

__all__ = ["over_seeds"]


def over_seeds(numbers):
    """Three seeds that differ by a thousandth, so that intervals have a width."""
    return {
        seed: {label: {metric: value * (1 + seed / 1000) for metric, value in of.items()} for label, of in numbers.items()}
        for seed in range(3)
    }
