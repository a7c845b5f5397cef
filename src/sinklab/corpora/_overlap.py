"""When two texts are one: they have a run of tokens in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["RUN", "count_repeats", "token_runs"]

RUN = 16
"""Tokens in a row that no two texts may have in common: files begin with the same licence, and passages of one file overlap."""


def token_runs(ids: Sequence[int], length: int = RUN) -> set[tuple[int, ...]]:
    """All runs of ``length`` tokens; of a shorter text none."""
    return {tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)}


def count_repeats(texts: Iterable[Sequence[int]], length: int = RUN) -> int:
    """How many texts have a run of ``length`` tokens that one before them has; of a shorter text all tokens."""
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    for ids in texts:
        runs = token_runs(ids, min(length, len(ids)))
        repeats += bool(runs & seen)
        seen |= runs
    return repeats
