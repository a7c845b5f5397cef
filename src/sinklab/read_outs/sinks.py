"""Sinks: where the attention of a trained model goes on held-out text, by Gu et al.'s rate and by the mean weight."""

from __future__ import annotations

from sinklab.read_outs._attention import ATTENTION, attention_numbers, first_text
from sinklab.registry import read_outs
from sinklab_claims.contract.trained import MeasuredModel

__all__ = ["METRICS", "sinks"]

METRICS = ATTENTION
"""Metric to unit and definition."""


@read_outs.register("sinks")
def sinks(trained: MeasuredModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on 100 held-out rows of 64 tokens (fewer where there are not so many), as in training."""
    return attention_numbers(trained.loaded.model, first_text(trained), trained.front)
