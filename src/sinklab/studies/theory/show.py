"""What the no-op certificate shows: how many heads are forced to have their sink, and the numbers of every head."""

from __future__ import annotations

from collections.abc import Iterator

from sinklab.results.blocks import Block, Grid, Say
from sinklab.studies.theory.found import LEAST_QUERIES, Certificate, CertifiedHead

__all__ = ["finding", "show"]

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
