"""The no-op certificate of an audit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NotRequired, TypedDict

__all__ = [
    "LEAST_QUERIES",
    "LEAST_SHARE_OF_QUERIES",
    "Certificate",
    "CertifiedHead",
    "queries_words",
    "verdict_queries",
]

LEAST_QUERIES, LEAST_SHARE_OF_QUERIES = 8, 0.5
"""At how many queries the need of a head must be known for a verdict, and at what share of them: half, as a sink must be seen
by half of the queries to count; of fewer than eight a mean says little."""


class CertifiedHead(TypedDict):
    """One head of a no-op certificate; a number that no query has is null."""

    module: str
    layer: int
    head: int
    sink_weight: float
    needed_sink_weight: float | None
    least_output: float
    least_output_without_sink: float
    gap: float
    output: float
    queries: int
    needed_queries: int
    forced: bool


class Certificate(TypedDict):
    """The entry ``certificate`` of an audit's ``summary.json``."""

    sink_position: int | str
    sink: NotRequired[str]
    sink_found: NotRequired[bool]
    delta: float
    threshold: float
    samples: int
    normalized: bool
    sink_heads: int
    forced_heads: int
    heads: list[CertifiedHead]
    text: NotRequired[str]


def queries_words(head: CertifiedHead) -> str:
    """At how many queries the need of a head is known, of how many: ``100 of 124``."""
    return f"{head['needed_queries']:,} of {head['queries']:,}"


def verdict_queries(heads: Iterable[CertifiedHead]) -> str:
    """On how many queries the verdicts on the forced heads rest, in brackets; nothing where none is, or it is not recorded."""
    forced = [head for head in heads if head["forced"] and "needed_queries" in head]
    if not forced:
        return ""
    fewest = queries_words(min(forced, key=lambda head: head["needed_queries"]))
    return f" (at {fewest} queries)" if len(forced) == 1 else f" (each at {fewest} queries or more)"
