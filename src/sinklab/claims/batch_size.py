"""Batch size: at the same number of steps, half and double the rows of a step leave the sink as it is."""

from __future__ import annotations

from sinklab.claims._architecture import UNCHANGED, has_sink
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part, Times, Variant
from sinklab_claims.contract.effect import Difference

__all__ = ["batch_size"]


SAME = 0.05
"""Of a row: a difference of the mean weight on the first token within which it is the same, a fifth of what models of the
smallest scale have. The published rates differ by an eighth of theirs."""

HALF = Variant("batch x1/2", {"training.batch_size": Times(0.5)})
DOUBLE = Variant("batch x2", {"training.batch_size": Times(2)})


@claims.register("batch_size")
def batch_size() -> Claim:
    """Claimed is that nothing changes, so both differences must lie within a margin.

    Judged by the share of a row that the first token has on average; the rates, which the paper reports, are in the table.
    """
    return Claim(
        statement="At the same number of steps, the batch size has no effect on the sink.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 4",
        published="Sink rates with steps of 0.25, 0.5, 1 and 2 million tokens: 16.45, 17.19, 18.18, 16.19.",
        variants=(HALF, UNCHANGED, DOUBLE),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=tuple(
            Part(
                f"{variant.label} leaves it as it is",
                Difference("first_attention", variant.label, UNCHANGED.label),
                more_than=-SAME,
                less_than=SAME,
            )
            for variant in (HALF, DOUBLE)
        ),
    )
