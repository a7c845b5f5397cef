"""The sink before and after the softmax: how far its score stands above the others, beside the weight that comes of it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import scores_of_keys, weights_of_keys
from sinklab.attention.probe import by_head, filled
from sinklab.probes._shared import SinkProbe, keys_seen
from sinklab.registry import probes
from sinklab.results.metric import Metric

_WELL_BELOW = -1e-3
"""``ln p`` above this leaves the other keys less than 0.1 %, and ``ln(1 - p)`` from float32 fewer than three good digits."""


SINK_SCORE = Metric("sink_score", "score", "Mean score (scaled, capped and biased) of the sink.")
OTHER_SCORE = Metric("other_score", "score", "Mean over queries of the mean score of the other visible keys.")
GAP = Metric("gap", "score", "Mean of the sink score minus the mean score of the other visible keys.")
GAP_TO_REST_LSE = Metric(
    "gap_to_rest_lse", "nats", "Mean of the sink score minus ln sum exp(score) over the other visible keys; softmax only."
)
SINK_WEIGHT = Metric("sink_weight", "weight", "Mean weight on the sink, over the queries that see it and another key.")


@probes.register("score_gap")
class ScoreGap(SinkProbe):
    """Sink score, mean of the other scores, their gap, and the weight, over counted queries that see the sink and another key.

    The softmax turns differences of scores into ratios of weights, so a sink of weight 0.99 may stand 5 or 35 above the rest:
    only the scores tell. ``gap_to_rest_lse`` is the score minus the log-sum-exp of all other visible scores, which is the
    logit ``ln(p / (1 - p))`` of the sink's share ``p`` of the real keys; where ``p`` is so near one that its float32 has lost
    the rest, those rows are computed from their scores. Of a sink of several keys the score is the mean of theirs, the weight
    and ``p`` are their sums.

    Args:
        sink_position: position of the sink inside each document; 0 is the first token.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"scores", "mass", "log_sum_exp"})
    metrics: ClassVar[tuple[Metric, ...]] = (SINK_SCORE, OTHER_SCORE, GAP, GAP_TO_REST_LSE, SINK_WEIGHT)

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        (mean,) = filled(statistics, "score_mean")
        seen = keys_seen(call)
        if self.asked.require().kind == "null":
            self._update_null(call, statistics, mean, seen)
            return
        index = self.asked.all_keys(call)
        each, visible = scores_of_keys(call, index)
        number = visible.sum(-1)
        scores = each.sum(-1) / number.clamp(min=1)  # those that are hidden are 0
        counted = call.counted[:, None] & (number > 0) & (seen > number)
        other = (seen * mean - each.sum(-1)) / (seen - number)
        by_metric = {
            SINK_SCORE: scores,
            OTHER_SCORE: other,
            GAP: scores - other,
            SINK_WEIGHT: weights_of_keys(call, index, statistics.log_sum_exp).sum(-1),
        }
        if statistics.log_sum_exp is not None:
            together = torch.logsumexp(each.masked_fill(~visible, float("-inf")), dim=-1)
            by_metric[GAP_TO_REST_LSE] = self._gap_to_rest(call, together, statistics.log_sum_exp, index, counted)
        for metric, values in by_metric.items():
            self._means.add(metric, call.site, *by_head(values, counted))

    def _update_null(self, call: AttentionCall, statistics: Statistics, mean: Tensor, seen: Tensor) -> None:
        """The null score is the sink: all real keys are the others."""
        if call.sink_scores is None:
            return
        scores = call.sink_scores.to(mean.dtype).expand(mean.shape)
        (mass,) = filled(statistics, "null_mass")
        by_metric = {SINK_SCORE: scores, OTHER_SCORE: mean, GAP: scores - mean, SINK_WEIGHT: mass}
        if statistics.log_sum_exp is not None:
            by_metric[GAP_TO_REST_LSE] = scores - statistics.log_sum_exp
        for metric, values in by_metric.items():
            self._means.add(metric, call.site, *by_head(values, call.counted[:, None] & (seen > 0)))

    def _gap_to_rest(self, call: AttentionCall, scores: Tensor, total: Tensor, index: Tensor, counted: Tensor) -> Tensor:
        # float64 on the CPU, because some devices have none.
        log_share = (scores - total).cpu().double()
        rest = total.cpu().double() + torch.log(-torch.expm1(log_share.clamp(max=_WELL_BELOW)))
        lost = counted.cpu() & (log_share > _WELL_BELOW)
        for start, stop in call.blocks():
            block = slice(start, stop)
            if bool(lost[:, :, block].any()):
                hidden = ~call.visible.block(start, stop, 0, call.kv_len)
                keys = torch.arange(call.kv_len, device=index.device)
                sink = (keys == index[:, None, block, :, None]).any(-2)
                exact = torch.logsumexp(call.scores(start, stop).masked_fill(hidden | sink, float("-inf")), dim=-1)
                rest[:, :, block] = torch.where(lost[:, :, block], exact.cpu().double(), rest[:, :, block])
        return scores.cpu().double() - rest
