"""Gu et al. 2024, objective and mechanism crossed: whether there is a sink is decided by how weights come about."""

from __future__ import annotations

from sinklab.claims._architecture import SIGMOID, SINK, UNCHANGED
from sinklab.claims._gates import HEAD_WISE
from sinklab.read_outs.carried import TOKENS
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Value

__all__ = ["objective_and_mechanism"]


PREFIX = Variant("prefix of 5", {"model.prefix": TOKENS})


def _with_prefix(variant: Variant) -> Variant:
    assert isinstance(variant.changes, dict), "the variants that are crossed change fields to values"
    return Variant(f"{variant.label}, {PREFIX.label}", {**variant.changes, "model.prefix": TOKENS})


CAUSAL = (UNCHANGED, SIGMOID, HEAD_WISE)
PREFIXED = (PREFIX, _with_prefix(SIGMOID), _with_prefix(HEAD_WISE))


def _has(variant: Variant) -> Part:
    return Part(f"there is a sink with {variant.label}", Value("carried_rate", variant.label), more_than=SINK)


@claims.register("objective_and_mechanism")
def objective_and_mechanism() -> Claim:
    """Two objectives by three mechanisms; the third objective, tokens that are hidden, is that of ``masked_objective``.

    What is compared is the weight that a head carries to its output, which is defined alike for all three.
    """
    return Claim(
        statement="The mechanism decides and not the objective: as a causal and as a prefix language model alike, softmax has "
        "a sink, sigmoid has none, and with a gate on each head less is carried from it.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), sections 6 and 7",
        published="Softmax 18.18, with a prefix 19 to 24 on one of its tokens, sigmoid 0.44; not crossed. A gate on each head "
        "lowers the mean weight on the first token from 0.467 to 0.073 in Qiu et al. 2025 (arXiv 2505.06708).",
        variants=(*CAUSAL, *PREFIXED),
        bases=("no-bos", "bos"),
        read_outs=("carried",),
        presupposes=(_has(UNCHANGED),),
        parts=(
            _has(PREFIX),
            *(
                Part(f"there is no sink with {variant.label}", Value("carried_rate", variant.label), less_than=SINK)
                for variant in (SIGMOID, PREFIXED[1])
            ),
            *(
                Part(
                    f"less is carried with {gate.label} than with {softmax.label}",
                    Difference("carried_rate", gate.label, softmax.label),
                    less_than=-SINK,
                )
                for gate, softmax in ((HEAD_WISE, UNCHANGED), (PREFIXED[2], PREFIX))
            ),
        ),
    )
