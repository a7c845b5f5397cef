"""What the certificate found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sinklab.results.blocks import Block, Grid, Say

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


SHOWN = 12
"""Heads that a terminal lists, those with the largest gaps."""


def show(found: Certificate) -> Iterator[Block]:
    """The finding, a row a head, the largest gap first, and how to read it."""
    yield Say(finding(found))
    layers = [layer for _, layer in {(head.module, head.layer) for head in found.heads}]
    delta = f"{found.delta:g}"
    headings = ["Head", "Weight on the sink", f"Needed for {delta}", "Least output", "Without the sink", "Gap"]
    rows = [
        [
            f"{head.layer if layers.count(head.layer) == 1 else head.module}.{head.head}",
            head.sink_weight, head.needed_sink_weight, head.least_output, head.least_output_without_sink, head.gap, head.output,
            _known(head), "yes" if head.forced else "no",
        ]
        for head in sorted(found.heads, key=lambda head: -(head.gap or 0.0))
    ]  # fmt: skip
    yield Grid([*headings, "Measured output", "Queries", "Forced"], rows, limit=SHOWN)
    yield Say(
        f"The first {found.samples} samples; means over queries, norms in units of the longest projected value that a query "
        f"sees. Needed: the least weight on the sink with which some weights write at most {delta}, over the queries where any "
        f"do. A head is forced if it gives its sink more than {found.threshold:g} and needs more than that, known at half of "
        f"its queries and {LEAST_QUERIES} at least. Needing less does not say that its queries and keys could do without. A "
        "gate behind a head is left out.",
        small=True,
    )


def finding(found: Certificate) -> str:
    """How many heads are forced to have their sink, in one sentence."""
    sink = found.sink if found.sink_found else f"{found.sink} (no sink was found)"
    if not found.normalized:
        return f"No head is forced to have a sink: weights of this operation need not sum to one ({sink})."
    given = f"{found.sink_heads} of {len(found.heads)} heads give {sink} more than {found.threshold:g}"
    return f"{given}; {found.forced_heads or 'none'} of them {'is' if found.forced_heads < 2 else 'are'} forced to."


def _known(head: CertifiedHead) -> str:
    return f"{head.needed_queries:,} of {head.queries:,}"
