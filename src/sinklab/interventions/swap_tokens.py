"""Swap the tokens at two positions: a sink that moves with its token depends on the token, one that stays does not."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.intervention import InputIntervention, ModelInputs
from sinklab.errors import ConfigurationError
from sinklab.interventions._tokens import cached_tokens, token_positions
from sinklab.registry import interventions

__all__ = ["SwapTokens"]


@interventions.register("swap_tokens")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SwapTokens(InputIntervention):
    """The tokens at positions ``first`` and ``second`` change places. Rows that lack one of the two are left as they are.

    Args:
        first, second: positions in the row, padding not counted.

    Raises:
        ConfigurationError: a negative position; or one of the two is in a cache and the other still to come.
    """

    example: ClassVar[dict[str, object]] = {"first": 0, "second": 2}
    neutral: ClassVar[dict[str, object]] = {"first": 0, "second": 0}

    first: int = 0
    second: int = 1

    def __post_init__(self) -> None:
        if min(self.first, self.second) < 0:
            raise ConfigurationError(f"swap_tokens: positions must be 0 or more, got {self.first} and {self.second}")

    @property
    def changes_nothing(self) -> bool:
        return self.first == self.second

    def edit_inputs(self, inputs: ModelInputs) -> ModelInputs:
        ids, positions = inputs[self.tokens], token_positions(self, inputs)
        there = [positions == position for position in (self.first, self.second)]
        both = there[0].any(1) & there[1].any(1)
        one_alone = (there[0].any(1) != there[1].any(1)).any()
        if cached_tokens(self, inputs) and bool(one_alone):
            raise ConfigurationError(
                f"swap_tokens: of positions {self.first} and {self.second} one is in the cache already; run both in one forward"
            )
        index = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        for here, other in (there, there[::-1]):
            index = torch.where(here & both[:, None], other.int().argmax(1, keepdim=True), index)
        inputs[self.tokens] = ids.gather(1, index)
        return inputs

    def kept(self, seq_len: int) -> Tensor:
        places = torch.arange(seq_len)
        if max(self.first, self.second) < seq_len:
            places[[self.first, self.second]] = places[[self.second, self.first]]
        return places
