"""Heavy hitter (H2O): the tokens with the most accumulated attention, and the most recent ones."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from sinklab.policies.base import PREDECESSORS, ScoredPolicy
from sinklab.registry import policies

__all__ = ["HeavyHitter"]


@policies.register("heavy_hitter")
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyHitter(ScoredPolicy):
    """Each key-value head keeps the ``heavy`` tokens of the largest score, the ``recent`` tokens before the query, and itself.

    The score of a token is the attention that it has been given, summed over all queries since its own, and over the query
    heads of the group: ``score(k) = sum_{q >= k} weight(q, k)``, with the weights among the tokens held. H2O, Zhang et al. 2023
    (arXiv 2306.14048), greedy algorithm 1, at every token from the first one on; in the paper the prompt is attended to densely
    and its tokens are evicted behind it. First tokens are not pinned: where there is a sink, it is the heaviest hitter. With
    original positions the distance to the hitters grows without bound, so the policy fails past the trained length.

    Attributes:
        heavy: tokens that stay for their score, 1 or more.
        recent: tokens before the query that are held besides, 0 or more.
        positions: ``in_cache`` or ``original``; the heads hold different tokens, and each has positions of its own.
    """

    heavy: int = 512
    recent: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("heavy", 1, "; policy 'window' holds recent tokens alone")
        self._require("recent", 0, PREDECESSORS)

    @property
    def needs_weights(self) -> bool:
        return True

    @property
    def num_slots(self) -> int:
        return self.heavy + self.recent + 1

    @property
    def protected(self) -> int:
        return self.recent + 1

    def score(self, previous: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None) -> Tensor:
        assert weights is not None
        return previous + weights

    def growth(self, keys: Tensor, values: Tensor) -> Tensor | float:
        return 1.0

    def describe(self) -> str:
        return f"{self.heavy} heavy+{self.recent}{self._mode}"
