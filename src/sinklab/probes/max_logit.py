"""Largest attention logit: the score before the softmax that QK-Clip (MuonClip) watches and clips, per head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.probe import Probe, filled
from sinklab.registry import probes
from sinklab.results.metric import Metric, Row

MAX_LOGIT = Metric(
    "max_logit",
    "score",
    "Largest score (scaled, capped and biased) of a visible pair of query and key, over all documents; softmax only.",
    paper="Kimi Team 2025 (arXiv 2507.20534)",
)


@probes.register("max_logit")
class MaxLogit(Probe):
    """Largest score of a head over all counted queries and the keys that they see; without layer, of the whole model.

    It is that of QK-Clip (Kimi Team 2025, arXiv 2507.20534), which shrinks a head's queries and keys where it is above a
    threshold. No score is computed again: the largest weight of a row is exp(score - log-sum-exp) times the mass on keys, so
    the score is ``ln(largest / mass) + log_sum_exp``, as exact as the float32 of the log-sum-exp. ``count`` is of queries.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_sum_exp", "mass", "maximum", "vectors"})  # not of weights alone
    metrics: ClassVar[tuple[Metric, ...]] = (MAX_LOGIT,)

    def __init__(self) -> None:
        self._largest: dict[str, tuple[Site, Tensor, int]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if statistics.log_sum_exp is None:
            return
        largest, mass = filled(statistics, "row_max", "row_mass")
        seen = call.counted[:, None] & (mass > 0)  # a null score may take all there is
        scores = torch.log(largest / mass) + statistics.log_sum_exp
        found = scores.masked_fill(~seen, float("-inf")).amax((0, 2)).double().cpu()
        site, before, queries = self._largest.get(call.site.module, (call.site, found, 0))
        self._largest[site.module] = site, torch.maximum(before, found), queries + int(call.counted.sum())

    def rows(self) -> Iterator[Row]:
        wholes: dict[str, tuple[float, int]] = {}
        for site, found, queries in self._largest.values():
            largest, count = wholes.get(site.part, (float("-inf"), 0))
            wholes[site.part] = max(largest, float(found.max())), count + queries * len(found)
        for part, (value, count) in wholes.items():
            if value > float("-inf"):
                yield {"metric": MAX_LOGIT, "value": value, "count": count, **({"part": part} if part else {})}
        for site, found, queries in self._largest.values():
            for head, value in enumerate(found.tolist()):
                if value > float("-inf"):
                    at: Row = {"metric": MAX_LOGIT, "value": value, "count": queries, "module": site.module}
                    yield {**at, "layer": site.layer, "head": head}
