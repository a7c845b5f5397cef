"""Other kernels: similarities that are not divided by their sum have no sink, whatever they are; one that is has a sink."""

from __future__ import annotations

from sinklab.claims._architecture import ELU, IDENTITY, UNCHANGED, has_no_sink, has_sink, operation
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim

__all__ = ["other_kernels"]

MLP = operation("MLP kernel", "mlp_kernel", normalize=False)
ELU_KERNEL = operation("elu kernel, normalised", "elu_kernel")


@claims.register("other_kernels")
def other_kernels() -> Claim:
    """The settings with which the paper's runs trained; those that failed are ``operations_that_fail``.

    The rates are the paper's proxy: absolute weights, where they have signs, over their sum in the row.
    """
    return Claim(
        statement="Attention with elu + 1, with the plain score or with an MLP kernel has no sink if not normalised; linear "
        "attention divided by its row sum has one.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Sink rates: elu + 1 of the score 0.80, the score itself 0.00, MLP kernel 0.74; elu kernel over its row sum "
        "53.65; softmax 18.18.",
        variants=(UNCHANGED, ELU, IDENTITY, MLP, ELU_KERNEL),
        bases=("no-bos", "bos"),
        read_outs=("sinks",),
        presupposes=(has_sink(),),
        parts=(
            has_no_sink(ELU.label),
            has_no_sink(IDENTITY.label),
            has_no_sink(MLP.label),
            has_sink(ELU_KERNEL.label),
        ),
    )
