"""Repeat a token: from some position on every token is the same, so that only positions tell them apart."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from sinklab.attention.intervention import InputIntervention, ModelInputs
from sinklab.errors import ConfigurationError
from sinklab.interventions._tokens import token_positions
from sinklab.registry import interventions

__all__ = ["RepeatToken"]


@interventions.register("repeat_token")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RepeatToken(InputIntervention):
    """The ``count`` tokens from position ``start`` on become ``token``.

    Without a position scheme that breaks the tie, all queries of a row of one repeated token give the same output, and no
    position can be the sink (Gu et al. 2024, arXiv 2410.10781). In decoding with a cache, new tokens are edited as they come.

    Args:
        token: id of the token.
        start: first position, padding not counted; 1 keeps BOS.
        count: how many tokens; ``None`` for all that follow.

    Raises:
        ConfigurationError: a negative number.
    """

    example: ClassVar[dict[str, object]] = {"token": 7, "start": 1}
    neutral: ClassVar[dict[str, object]] = {"token": 7, "count": 0}

    token: int
    start: int = 0
    count: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.count is not None and self.count < 0):
            raise ConfigurationError(f"repeat_token: start and count must be 0 or more, got {self.start} and {self.count}")

    @property
    def changes_nothing(self) -> bool:
        return self.count == 0

    def edit_inputs(self, inputs: ModelInputs) -> ModelInputs:
        ids, positions = inputs[self.tokens], token_positions(self, inputs)
        chosen = positions >= self.start
        if self.count is not None:
            chosen &= positions < self.start + self.count
        inputs[self.tokens] = torch.where(chosen, ids.new_tensor(self.token), ids)
        return inputs
