"""Sink token: a learned token in front of every sequence, for heads that must do nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("sink_token")
@dataclass(frozen=True, kw_only=True)
class SinkToken(Softmax):
    """Softmax attention in a model that puts learned embeddings in front of every sequence; in [0, 1], rows sum to one.

    The "learnable sink" of Xiao et al. 2023 (arXiv 2309.17453) and the sink token of Gu et al. 2024 (arXiv 2410.10781). The
    network computes queries, keys and values of the token like those of any other, so what it receives is weight on the first
    ``count`` keys and not null mass, of which there is none.

    Works in :class:`~sinklab.models.language_model.SinkLM`, which holds the embeddings. In another model, add a token to the
    vocabulary and put it in front of every sample.

    Args:
        count: learned tokens in front, at least 1.
    """

    count: int = 1

    def __post_init__(self) -> None:
        self.require(self.count >= 1, f"count = {self.count} must be at least 1; without one, use softmax")

    @property
    def tokens_in_front(self) -> int:
        return self.count
