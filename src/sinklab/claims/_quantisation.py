"""What the claims about outliers and eight bits share: variants of Bondarenko et al. 2023 and bounds."""

from __future__ import annotations

from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import BASELINE, Changes, Part, Variant
from sinklab_claims.contract.effect import Value

__all__ = ["GATED", "HALF", "OUTLIERS", "SAME", "UNQUANTISABLE", "clipped"]

HALF = 0.5
"""Ratio of kurtosis or of the largest norm below which outliers have been cut; published are 0.01 to 0.22."""

SAME = 0.02
"""Nats: a difference of losses below it is none."""

GATED = Variant("gated heads", {"model.operation": {"name": "gated_heads", "opening": 0.25}})
"""The gate of the paper's OPT models: linear, a quarter open at the start."""

OUTLIERS = Part("the baseline has outliers", Value("kurtosis", BASELINE), more_than=20.0)
"""Published baselines have 1,018 to 3,076, and the models that are called free of outliers 18.9 (OPT, gated) to 201."""

UNQUANTISABLE = Part("the baseline loses by eight bits", Value("int8_gap", BASELINE), more_than=SAME)
"""Published: 5.7 nats for BERT-base, 0.29 for OPT-125m."""


def clipped(alpha: float) -> Variant:
    """Clipped softmax with ``gamma = -alpha / T``, T the context of the training."""

    def changes(config: PretrainingConfig) -> Changes:
        gamma = -alpha / config.model.max_position_embeddings
        return {"model.operation": {"name": "clipped_softmax", "gamma": gamma}}

    return Variant(f"clipped softmax, gamma -{alpha:g}/T", changes)
