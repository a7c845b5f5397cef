"""Entropy of the attention rows, with the sink column and without it: a sink and a sharp retrieval both look concentrated."""

from __future__ import annotations

from typing import ClassVar

import torch

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import weights_of_keys
from sinklab.attention.probe import by_head, filled
from sinklab.probes._shared import SinkProbe
from sinklab.registry import probes
from sinklab.results.metric import Metric

_LEAST_REST = 1e-3
"""Rows whose other keys hold less than this share are left out of ``entropy_without_sink``.

The identity divides the error of the row entropy, some 1e-6 nats in float32, by that share: kept rows are good to 1e-2 nats.
"""


ENTROPY = Metric(
    "entropy",
    "nats",
    "Mean over counted queries of -sum w ln w, w being the weights on visible keys divided by their sum.",
    paper="Zhai et al. 2023 (arXiv 2303.06296)",
    range=(0.0, float("inf")),
)
ENTROPY_WITHOUT_SINK = Metric(
    "entropy_without_sink",
    "nats",
    "The same with the sink's column taken out and the rest divided by its sum, over the queries that leave at least "
    f"{_LEAST_REST} of their weight to the other keys.",
    range=(0.0, float("inf")),
)
SINK_COLUMN_WEIGHT = Metric(
    "sink_column_weight",
    "weight",
    "Mean over counted queries of the weight on the sink's column; the weight itself, not divided by the row sum; "
    "queries that do not see the sink count as 0.",
)


@probes.register("entropy")
class Entropy(SinkProbe):
    """Mean row entropy per layer and head, and the same after the sink column is taken out and the rest renormalised.

    With ``p`` the sink's share of its row and ``H`` the entropy of the row, the entropy of the rest is
    ``(H + p ln p) / (1 - p) + ln(1 - p)``: no second look at the weights is needed. Of a sink of several
    keys all are taken out: ``p ln p`` is summed over them, and ``p`` elsewhere is their sum. Attention entropy follows Zhai
    et al. 2023 (arXiv 2303.06296); rows of operations that do not normalise are divided by their sum first.

    Args:
        sink_position: position of the sink inside each document; 0 is the first token.
    """

    apart = frozenset({ENTROPY})
    needs: ClassVar[frozenset[str]] = frozenset({"entropy", "mass", "log_sum_exp"})
    metrics: ClassVar[tuple[Metric, ...]] = (ENTROPY, ENTROPY_WITHOUT_SINK, SINK_COLUMN_WEIGHT)

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        entropy, mass = filled(statistics, "row_entropy", "row_mass")
        # 1 - p is formed, and float32 would spend its digits on it; on the CPU, because some devices have no float64.
        whole, queries = mass.cpu().double(), call.counted[:, None].cpu()
        counted = queries & (whole > 0)
        self._means.add(ENTROPY, call.site, *by_head(entropy, counted))
        main = self.asked.require()
        if main.kind == "null" and call.sink_scores is None:
            return
        if main.kind == "null":  # rows of real keys are divided by their sum as it is
            (weight,) = filled(statistics, "null_mass")
            without, rest = entropy.cpu().double(), whole
        else:
            weights = weights_of_keys(call, self.asked.all_keys(call), statistics.log_sum_exp)
            shares = (weights.cpu().double() / whole[..., None]).clamp(0.0, 1.0)
            weight, rest = weights.sum(-1), (1.0 - shares.sum(-1)).clamp(min=0.0)
            without = (entropy.cpu().double() + torch.xlogy(shares, shares).sum(-1)) / rest + torch.log(rest)
        self._means.add(ENTROPY_WITHOUT_SINK, call.site, *by_head(without.clamp(min=0.0), counted & (rest >= _LEAST_REST)))
        self._means.add(SINK_COLUMN_WEIGHT, call.site, *by_head(weight, queries))
