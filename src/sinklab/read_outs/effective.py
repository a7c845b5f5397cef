"""Effective: what a head takes from the first token: the weight that is really there, times the gate on what comes out."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, scores_of_keys, weights_of_keys
from sinklab.attention.probe import Watcher
from sinklab.read_outs._attention import THRESHOLD, first_text, look, sum_by_document
from sinklab.registry import read_outs
from sinklab.results.intervals import just_above
from sinklab.results.metric import PERCENTAGE, Metric
from sinklab_claims.contract.trained import MeasuredModel

__all__ = ["METRICS", "EffectiveWeight", "effective"]

_WEIGHT = (
    "the absolute weight as it is, not divided by the sum of its row, times the gate on the output of the head at the query, "
    "of a gate with many coordinates the mean magnitude"
)

METRICS = (
    Metric(
        "effective_sink_rate",
        "percent",
        "Share of (row, layer, head) in which the mean effective weight of the first token, over the queries that see it, "
        f"exceeds {THRESHOLD}; effective weight: {_WEIGHT}.",
        range=PERCENTAGE,
    ),
    Metric(
        "effective_first",
        "weight",
        "Mean effective weight of the first token over rows, layers, heads and the queries that see it.",
    ),
)
"""Metrics. Without a gate, where rows sum to one, they are ``sink_rate`` and ``first_attention`` of the read-out ``sinks``."""


class EffectiveWeight(Watcher):
    """The mean effective weight of the first token over the queries that see it, by row, layer and head.

    Args:
        front: learned tokens in front of every row, which are not the first token.
    """

    name = "effective_weight"
    needs: ClassVar[frozenset[str]] = frozenset({"log_sum_exp"})

    def __init__(self, front: int) -> None:
        self.front = front
        self.means: list[Tensor] = []
        """A tensor ``(rows, num_heads)`` of each call, float64; a row of each document where rows hold several."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        first = keys_of_document(call, self.front)
        weight = weights_of_keys(call, first, statistics.log_sum_exp)[..., 0].double()
        sees = scores_of_keys(call, first)[1][..., 0] & call.counted[:, None]
        if call.gain is not None:
            weight = weight * call.gain.double().abs().mean(-1)
        self.means.append(sum_by_document(call, weight * sees) / sum_by_document(call, sees))


@read_outs.register("effective")
def effective(trained: MeasuredModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on 100 held-out rows of 64 tokens (fewer where there are not so many), as in training."""
    watched = EffectiveWeight(trained.front)
    look(trained.loaded.model, first_text(trained), (watched,))
    means = torch.cat([part.flatten() for part in watched.means])
    above = means > just_above(THRESHOLD)
    return {"effective_sink_rate": 100.0 * above.double().mean().item(), "effective_first": means.mean().item()}
