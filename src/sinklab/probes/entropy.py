"""Entropy of the attention rows, with the sink column and without it: a sink and a sharp retrieval both look concentrated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, weights_of_keys
from sinklab.attention.probe import Definition, Probe
from sinklab.probes._accumulate import Means, by_head, filled, require_same
from sinklab.registry import probes

__all__ = ["Entropy"]

_LEAST_REST = 1e-3
"""Rows whose other keys hold less than this share are left out of ``entropy_without_sink``.

The identity divides the error of the row entropy, some 1e-6 nats in float32, by that share: kept rows are good to 1e-2 nats.
"""


@probes.register("entropy")
class Entropy(Probe):
    """Mean row entropy per layer and head, and the same after the sink column is taken out and the rest renormalised.

    With ``p`` the sink's share of its row and ``H`` the entropy of the row, the entropy of the rest is
    ``(H + p ln p) / (1 - p) + ln(1 - p)``: no second look at the weights is needed. Attention entropy follows Zhai et al. 2023
    (arXiv 2303.06296); rows of operations that do not normalise are divided by their sum first.

    Args:
        sink_position: position of the sink inside each document; 0 is the first token.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"entropy", "mass", "log_sum_exp"})
    definitions: ClassVar[dict[str, Definition]] = {
        "entropy": Definition(
            "Mean over counted queries of -sum w ln w, w being the weights on visible keys divided by their sum.",
            "nats",
            "Zhai et al. 2023 (arXiv 2303.06296)",
            (0.0, float("inf")),
        ),
        "entropy_without_sink": Definition(
            "The same with the sink's column taken out and the rest divided by its sum, over the queries that leave at least "
            f"{_LEAST_REST} of their weight to the other keys.",
            "nats",
            "",
            (0.0, float("inf")),
        ),
        "sink_weight": Definition(
            "Mean over counted queries of the weight on the sink's column; the weight itself, not divided by the row sum; "
            "queries that do not see the sink count as 0.",
            "weight",
        ),
    }

    def __init__(self, sink_position: int = 0) -> None:
        self.sink_position = sink_position
        self._means = Means("head")

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        entropy, mass = filled(statistics, "row_entropy", "row_mass")
        weight = weights_of_keys(call, keys_of_document(call, self.sink_position), statistics.log_sum_exp)[..., 0]
        # 1 - p is formed, and float32 would spend its digits on it; on the CPU, because some devices have no float64.
        whole = mass.cpu().double()
        share = (weight.cpu().double() / whole).clamp(0.0, 1.0)
        rest = 1.0 - share
        without = (entropy.cpu().double() + torch.xlogy(share, share)) / rest + torch.log(rest)
        queries = call.counted[:, None].cpu()
        counted = queries & (whole > 0)
        self._means.add("entropy", call.site, *by_head(entropy, counted))
        self._means.add("entropy_without_sink", call.site, *by_head(without.clamp(min=0.0), counted & (rest >= _LEAST_REST)))
        self._means.add("sink_weight", call.site, *by_head(weight, queries))

    def merge(self, other: Self) -> None:
        require_same(self, other, "sink_position")
        self._means.merge(other._means)

    def rows(self) -> Iterator[dict[str, Any]]:
        yield from self._means.pooled(self.definitions)
        yield from self._means.rows(self.definitions)
