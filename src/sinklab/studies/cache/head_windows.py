"""Head windows: ways to share the tokens of a uniform window out among heads, from an order of them or from what each costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

__all__ = ["CUT", "LONG", "SHORT", "Head", "Windows", "ladder", "shared_by_cost", "shared_by_order"]

Head: TypeAlias = tuple[int, int]
"""Layer and key-value head, both from 0."""

Windows: TypeAlias = dict[Head, int]
"""Tokens before the query that each head holds besides its sinks."""

SHORT = (8, 4, 2)
"""Parts of the uniform window that the short ones are."""

CUT = (0.25, 0.5, 0.75)
"""Shares of the heads that have a short one."""

LONG = (1.5, 2.0, 3.0)
"""Multiples of the uniform window that are tried for one head alone."""


def shared_by_order(order: Sequence[Head], window: int, most: int) -> Iterator[Windows]:
    """The first heads of an order cut short, in several numbers and to several windows, what is saved given to the others.

    Args:
        window: the uniform one; none has fewer tokens in all than these have.
        most: that a head can hold.
    """
    heads = len(order)
    for cut in sorted({round(share * heads) for share in CUT} - {0, heads}):
        for short in sorted({window // part for part in SHORT} - {0}):
            long = (heads * window - cut * short) // (heads - cut)
            if window < long <= most:
                yield {head: short if rank < cut else long for rank, head in enumerate(order)}


def ladder(window: int, most: int) -> list[int]:
    """Windows that are tried for one head while all others have the uniform one, which is among them; ascending."""
    shorter = {window // part for part in SHORT} - {0}
    longer = {size for times in LONG if (size := int(times * window)) <= most}
    return sorted(shorter | {window} | longer)


def shared_by_cost(costs: Mapping[Head, Mapping[int, float]], total: int) -> Windows:
    """Windows of the least sum of costs that together hold ``total`` tokens at most, if costs of heads add up.

    Every head begins with its smallest window, and the step that saves most a token is taken until none fits: along the lower
    convex hull of each head's costs, on which this is the best choice but for the tokens that are left in the end.

    Args:
        costs: head to window to cost; every head has its smallest window, and these fit.
    """
    windows = {head: min(sizes) for head, sizes in costs.items()}
    left = total - sum(windows.values())
    steps = [
        ((sizes[start] - sizes[stop]) / (stop - start), head, start, stop)
        for head, sizes in costs.items()
        for start, stop in _hull(sizes)
    ]
    for _, head, start, stop in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if windows[head] == start and stop - start <= left:  # behind a step that did not fit, no later one of its head is taken
            windows[head], left = stop, left - (stop - start)
    return windows


def _hull(sizes: Mapping[int, float]) -> list[tuple[int, int]]:
    """Steps from window to window along the lower convex hull of the costs, as long as they save something."""
    steps: list[tuple[int, int]] = []
    start = min(sizes)
    while True:
        saved = {stop: (sizes[start] - sizes[stop]) / (stop - start) for stop in sizes if stop > start}
        best = max(saved, key=lambda stop: (saved[stop], stop), default=None)
        if best is None or saved[best] <= 0:
            return steps
        steps.append((start, best))
        start = best
