"""What the no-op certificate of an audit found: of every head, what it gives to its sink and what it needs to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LEAST_QUERIES", "LEAST_SHARE_OF_QUERIES", "Certificate", "CertifiedHead"]

LEAST_QUERIES, LEAST_SHARE_OF_QUERIES = 8, 0.5
"""At how many queries the need of a head must be known for a verdict, and at what share of them: half, as a sink must be seen
by half of the queries to count; of fewer than eight a mean says little."""


@dataclass(frozen=True, kw_only=True)
class CertifiedHead:
    """One head; norms are in units of the longest projected value that the query sees, numbers means over queries.

    Attributes:
        sink_weight: mean weight on the sink.
        needed_sink_weight: least weight with which some weights write at most ``delta``, over the queries where any do.
        least_output, least_output_without_sink: the least that any weights on the visible keys could make the head write.
        gap: how much less the sink makes possible.
        queries, needed_queries: how many there are, and at how many the need is known.
        forced: whether it gives the sink more than the threshold and needs to.
    """

    module: str
    layer: int
    head: int
    sink_weight: float
    needed_sink_weight: float | None = None
    least_output: float | None = None
    least_output_without_sink: float | None = None
    gap: float | None = None
    output: float | None = None
    queries: int = 0
    needed_queries: int = 0
    forced: bool = False


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The entry ``certificate`` of an audit's ``summary.json``.

    Attributes:
        sink_position: a position, ``"null"``, or another place in words; ``sink`` is its name.
        sink_found: whether it is a sink that was found; without any, position 0 is asked about.
        delta: the output norm asked about.
        normalized: whether rows of weights sum to one; others force nothing.
    """

    sink_position: int | str
    sink: str
    sink_found: bool
    delta: float
    threshold: float
    samples: int
    normalized: bool
    sink_heads: int
    forced_heads: int
    heads: list[CertifiedHead]
