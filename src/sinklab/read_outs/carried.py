"""Carried: what heads write of one of the first tokens: a share of their rows and a weight, both above the threshold."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.accumulate import filled
from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, scores_of_keys, weights_of_keys
from sinklab.attention.operation import row_share
from sinklab.attention.probe import Watcher
from sinklab.read_outs._attention import THRESHOLD, first_text, look, sum_by_document
from sinklab.registry import read_outs
from sinklab.results.intervals import just_above
from sinklab.results.metric import PERCENTAGE, Metric
from sinklab_claims.contract.trained import MeasuredModel

__all__ = ["METRICS", "TOKENS", "CarriedRate", "carried"]

TOKENS = 5
"""First tokens of which one may be the sink: as many as the prefix has."""

METRICS = (
    Metric(
        "carried_rate",
        "percent",
        "Share of (row, layer, head) in which one of the first five tokens has, over the queries that see it, a mean share of "
        "more than 0.3 of its rows and a mean weight of more than 0.3 too: the weight itself, not divided by the sum of its "
        "row, times the gate on the output of the head.",
        range=PERCENTAGE,
    ),
)


class CarriedRate(Watcher):
    """Share of the heads of single rows that carry more than the threshold from one of the first tokens to their outputs.

    Args:
        front: learned tokens in front of every row.
    """

    name = "carried_rate"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "log_sum_exp"})

    def __init__(self, front: int) -> None:
        self.keys = tuple(range(front, front + TOKENS))
        self.hits: list[Tensor] = []
        """Of each call, ``(rows, heads)``, 0 or 1; a row of each document where rows hold several."""

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        first = keys_of_document(call, *self.keys)
        weights = weights_of_keys(call, first, statistics.log_sum_exp)
        (mass,) = filled(statistics, "row_mass")
        shares = row_share(weights, mass[..., None], call.operation)
        if call.gain is not None:
            weights = weights * call.gain.mean(-1, keepdim=True)
        seen = sum_by_document(call, scores_of_keys(call, first)[1] & call.counted[:, None, :, None])
        both = torch.minimum(sum_by_document(call, weights), sum_by_document(call, shares)) / seen.clamp_min(1)
        self.hits.append((both.amax(-1) > just_above(THRESHOLD)).double().cpu())

    def rate(self) -> float:
        """Percent of all rows and heads."""
        return 100 * float(torch.cat([hits.flatten() for hits in self.hits]).mean())


@read_outs.register("carried")
def carried(trained: MeasuredModel) -> dict[str, float]:
    """Number of :data:`METRICS` on 100 held-out rows of 64 tokens (fewer where there are not so many), as in training."""
    watcher = CarriedRate(trained.front)
    look(trained.loaded.model, first_text(trained), (watcher,))
    return {"carried_rate": watcher.rate()}
