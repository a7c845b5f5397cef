"""Full: every token stays; the unmodified model, and the reference for all other policies."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.policies.base import Policy, Positions
from sinklab.registry import policies


@policies.register("full")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """A query sees every token up to itself, at its position in the text; memory grows with the text.

    It is called "dense" in Xiao et al. 2024 (arXiv 2309.17453), where it fails past the trained length. Layers with a window of
    their own keep it.
    """

    bounded: ClassVar[bool] = False
    positions: Positions = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions != "original":
            raise ConfigurationError(f"policy 'full' evicts nothing, so positions are original; got {self.positions!r}")

    def max_held(self, seq_len: int) -> int:
        return seq_len

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Whether each query sees each key; token indices that broadcast against each other, boolean of the common shape."""
        return key_positions <= query_positions
