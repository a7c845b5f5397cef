"""Operations that fail: four ways to normalise, or not to, under which the training of Gu et al. broke down."""

from __future__ import annotations

from sinklab.claims._architecture import operation
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Value

__all__ = ["operations_that_fail"]

FAILING = (
    operation("elu, normalised", "elu", normalize=True),
    operation("elu kernel", "elu_kernel", normalize=False),
    operation("identity, normalised", "identity", normalize=True),
    operation("softmax over the 2-norm", "p_normalized", p=2.0),
)


@claims.register("operations_that_fail")
def operations_that_fail() -> Claim:
    """Divergence is what the run calls so: a loss that is no number, or twice its best and a nat above it.

    That a training fails is said of that training: so it is run with the set-up of the paper, and with no other.
    """
    return Claim(
        statement="Training fails with elu + 1 over its row sum, with the elu kernel as it is, with the score over the size of "
        "its row sum, and with exponentials over their 2-norm.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), section 7",
        published="Training failed in all four, at 60 million parameters and 20,000 steps.",
        variants=FAILING,
        bases=("no-bos", "bos"),
        parts=tuple(
            Part(f"training diverges with {variant.label}", Value("diverged", variant.label), more_than=0.5)
            for variant in FAILING
        ),
        costs={"60m": "gpu", "1b": "gpu"},
    )
