"""Guo et al. 2024: sinks, unlike outliers, are not Adam's; trained by SGD, a model has a sink as well."""

from __future__ import annotations

from sinklab.claims._sgd import ADAM, SGD, adam_and_sgd, learns
from sinklab.registry import claims
from sinklab.results.metric import FRACTION
from sinklab_claims.contract.claim import Claim, Part
from sinklab_claims.contract.effect import Value

__all__ = ["sgd_keeps_the_sink"]

SINK = 0.3
"""Mean weight on BOS from which a head has its sink there: the threshold of Gu et al. 2024; even weights have 0.1."""


@claims.register("sgd_keeps_the_sink")
def sgd_keeps_the_sink() -> Claim:
    """The paper's own task and depth, on which SGD learns what Adam learns; of the head that copies, off triggers."""
    return Claim(
        statement="Trained by SGD instead of Adam, a model that has learned the task has its sink too.",
        source="guo2024",
        reference="Guo et al. 2024 (arXiv 2410.13835)",
        published="From Adam to SGD residual peaks vanish and sinks stay, in models of three layers on bigram-backcopy.",
        presupposes=(
            learns(ADAM),
            learns(SGD),
            Part("there is a sink with adamw", Value("bos_weight", ADAM, FRACTION), more_than=SINK),
        ),
        parts=(Part("there is a sink with sgd", Value("bos_weight", SGD, FRACTION), more_than=SINK),),
        measure=adam_and_sgd,
        costs={"tiny": "minutes", "small": "hours", "60m": "gpu"},
    )
