"""The rule that says from counted sinks which places play the sink: a position, a token's first occurrence, or any of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np

from sinklab.results.intervals import LEAST_SHARE, least_count_above

__all__ = ["LEAST_RATE", "Hits", "Place", "enough_documents", "places"]

LEAST_RATE = 1.0
"""Percent of (document, head) from which a place is listed although no head sinks there often enough."""

LISTED = 8
"""Places that are listed at most."""

FIRST_ONLY = 0.9
"""Share of a token's sinks that must stand on its first occurrence in the document for that to be the place."""

Place: TypeAlias = "tuple[Literal['position', 'first', 'anywhere'], int]"
"""A position, or the id of a token: its first occurrence in a document, or any."""


@dataclasses.dataclass(frozen=True, eq=False)
class Hits:
    """How often heads sink; arrays of one length.

    Attributes:
        head, token, position: numbers; the token's is -1 where it is not known.
        first: whether the token is the first of its id in the document.
        once: whether it is the first of its id on which this head sinks in the document.
        count: documents.
        ratio: norms of the values there over the mean norm of the others of their document, summed.
        rated: documents that have others, and so such a ratio.
        loud: documents in which the weight itself passes, too, before rows are divided by their sums.
    """

    head: np.ndarray
    token: np.ndarray
    position: np.ndarray
    first: np.ndarray
    once: np.ndarray
    count: np.ndarray
    ratio: np.ndarray
    rated: np.ndarray
    loud: np.ndarray

    def at(self, place: Place) -> np.ndarray:
        """Which of them a place accounts for."""
        kind, number = place
        if kind == "position":
            return self.position == number
        return (self.token == number) & (self.first | (kind == "anywhere"))


def places(hits: Hits, cases: np.ndarray) -> Iterator[Place]:
    """Places that play the sink: each accounts for the most sinks that those before it do not; places where a head sinks first.

    A token at two positions or more is the place if it accounts for more sinks than any one position; where nearly all of them
    are on its first occurrence, that is the place.

    Args:
        cases: documents by head.
    """
    left = hits.count.astype(np.float64)
    enough = enough_documents(cases)
    tokens = hits.once & (hits.token >= 0)
    for _ in range(LISTED):
        totals = _totals(hits.position, left, hits.head, enough)
        best: Place = ("position", max(totals, key=totals.__getitem__, default=-1))
        most = totals.get(best[1], (False, 0.0))
        of_tokens = _totals(hits.token, np.where(tokens, left, 0.0), hits.head, enough)
        for token, total in of_tokens.items():
            # A token that stands at one position alone is that position.
            if total > most and len(np.unique(hits.position[tokens & (hits.token == token) & (left > 0)])) > 1:
                first = left[hits.at(("first", token))].sum() >= FIRST_ONLY * left[hits.at(("anywhere", token))].sum()
                best, most = ("first" if first else "anywhere", token), total
        sinks, total_count = most
        if total_count == 0 or not (sinks or total_count >= LEAST_RATE / 100 * cases.sum()):
            return
        yield best
        left = np.where(hits.at(("anywhere", best[1]) if best[0] == "first" else best), 0.0, left)


def _totals(numbers: np.ndarray, counts: np.ndarray, heads: np.ndarray, enough: np.ndarray) -> dict[int, tuple[bool, float]]:
    """Of each number, whether some head has enough of its counts, and how many there are; in the order of the numbers."""
    values, index = np.unique(numbers, return_inverse=True)
    by_head = np.zeros((len(values), len(enough)))
    np.add.at(by_head, (index, heads), counts)
    return {
        int(value): (bool((row >= enough).any()), float(row.sum())) for value, row in zip(values.tolist(), by_head, strict=True)
    }


def enough_documents(cases: np.ndarray) -> np.ndarray:
    """By head, the least number of documents in which it must sink to be a sinking head; see :attr:`Sink.sinking`."""
    return np.array([least_count_above(LEAST_SHARE, int(number)) for number in cases])
