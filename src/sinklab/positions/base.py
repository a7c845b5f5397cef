"""What a position scheme is: a module that may add to the embeddings, rotate queries and keys, or add to the scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from sinklab.configuration import Section
from sinklab.errors import ConfigurationError

Rotation = tuple[Tensor, Tensor]
"""Tables by which queries and keys are rotated, each broadcastable to ``(batch, heads, q_len, head_dim)``."""


class DecoderShape(Protocol):
    """What a scheme may ask of the architecture it serves."""

    hidden_size: int
    num_attention_heads: int

    @property
    def head_size(self) -> int:
        """Size of a head."""

    @property
    def num_positions(self) -> int:
        """Positions that training uses: the context and the tokens that the operation puts in front of it."""

    @property
    def embedding_std(self) -> float:
        """Standard deviation of the token embeddings at the start."""


class PositionScheme(nn.Module):
    """How a decoder knows where a token stands; one instance serves all layers.

    A scheme overrides those of :meth:`embed`, :meth:`rotation` with :meth:`rotate`, and :meth:`score_bias` that it needs; what
    is left alone does nothing. Positions are 0-based int64, ``(batch or 1, length)``.

    Args:
        architecture: the decoder.
        settings: the fields of :attr:`Settings` by name.

    Attributes:
        Settings: fields of the scheme next to its name in the config; none by default.
        biased: :meth:`score_bias` returns a tensor.

    Raises:
        ConfigurationError: a setting that the scheme does not have, a value that it does not take, or an architecture that it
            cannot serve.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[Section]] = Section
    biased: ClassVar[bool] = False

    def __init__(self, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().__init__()
        self.check(architecture, settings)
        self.settings: Any = self.Settings(**settings)

    @classmethod
    def check(cls, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        """Refuse settings that the scheme does not take, and architectures that it cannot serve."""
        try:
            cls.Settings(**settings)
        except ConfigurationError as error:
            raise ConfigurationError(f"position scheme {cls.name!r}: {error}") from None

    def reset_parameters(self) -> None:
        """Initial values; called for parameters that are not read from a checkpoint."""

    def embed(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        """Embeddings ``(batch, q_len, hidden_size)`` with their positions; same shape and dtype."""
        return hidden_states

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> Rotation | None:
        """Tables for :meth:`rotate`, made once for all layers, or ``None`` where queries and keys are left as they are.

        Args:
            dtype: of the hidden states; the tables are of the same.
        """
        return None

    def rotate(self, queries: Tensor, keys: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries ``(batch, num_heads, q_len, head_dim)`` and keys ``(batch, num_kv_heads, q_len, head_dim)``, rotated."""
        return queries, keys

    def score_bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """What is added to the scaled scores, float32 ``(batch or 1, num_heads, q_len, kv_len)``, or ``None``.

        Keys ahead of the query, which only the prefix of a prefix LM shows, are at distance 0.
        """
        return None


def distances(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """How far each key lies behind each query, int64 ``(batch or 1, 1, q_len, kv_len)``; 0 for keys ahead of it."""
    return (query_positions[:, None, :, None] - key_positions[:, None, None, :]).clamp(min=0)
