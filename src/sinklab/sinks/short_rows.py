"""Rows of causal weights that are so short that a head which looks at all keys alike passes for one that sinks."""

from __future__ import annotations

from sinklab.results.blocks import counted

LONGEST = 100_000
"""Tokens up to which is looked for a length at which an even share is no sink."""


def short_rows_warning(length: int, threshold: float) -> str:
    """A sentence where such a head gives the first of ``length`` tokens more than the threshold; empty otherwise.

    The first query sees one key, the second two, and so on: such a head gives the first of T positions (1 + 1/2 + … + 1/T) / T,
    which is above 0.3 up to nine tokens.
    """
    share = even_share(length)
    if share <= threshold:
        return ""
    return (
        f"In texts of {counted(length, 'token')} a head that looks at all keys alike gives the first position {share:.2g} of "
        f"its attention, more than {threshold:g}: that many heads do so says nothing of a sink{from_tokens_on(threshold)}."
    )


def few_queries_warning(length: int, window: int | None, threshold: float) -> str:
    """A sentence where the rate at the first position is that of few queries, or of ones that see little else (``window``)."""
    if window is None or window >= length:
        return short_rows_warning(length, threshold)
    seen = f"In a window of {counted(window, 'token')} {window:,} of the {length:,} queries of a row see the first position"
    share = even_share(window)
    if share > threshold:
        return (
            f"{seen}, and a head that looks at all keys alike gives it {share:.2g} of what they have, more than {threshold:g}: "
            "that many heads do so says nothing of a sink."
        )
    if 2 * window < length:
        return f"{seen}, and its sink rate is taken over these alone: it does not compare with that of other windows."
    return ""


def from_tokens_on(threshold: float) -> str:
    """From how many tokens on an even share is no sink, in words; empty where no length is enough."""
    total = 0.0
    for tokens in range(1, LONGEST):
        total += 1 / tokens
        if total / tokens <= threshold:
            return f"; from {tokens:,} tokens on it does not"
    return ""


def even_share(length: int) -> float:
    """Mean weight on the first of so many positions, over the queries, where every query gives all keys it sees the same."""
    return sum(1 / tokens for tokens in range(1, length + 1)) / length if length else 0.0
