"""Insert a token in front, such as the BOS that a model was trained with and a text comes without."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.intervention import InputIntervention, ModelInputs
from sinklab.errors import ConfigurationError
from sinklab.interventions._tokens import put_in
from sinklab.registry import interventions


@interventions.register("insert_bos")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class InsertBos(InputIntervention):
    """``count`` tokens in front of the first token of every row, behind its padding; all others move up by as many positions.

    Whether BOS is there decides, in some models, whether there is a sink at all and where. What the model gives for old tokens
    stands ``count`` places later.

    Args:
        token: id of the token.
        count: how many of it, 0 or more.

    Raises:
        ConfigurationError: a negative count; labels, a cache or positions of one's own (see docs/interventions.md).
    """

    example: ClassVar[dict[str, object]] = {"token": 1, "count": 1}
    neutral: ClassVar[dict[str, object]] = {"token": 1, "count": 0}

    token: int
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigurationError(f"{self.name}: count must be 0 or more, got {self.count}")

    @property
    def changes_nothing(self) -> bool:
        return self.count == 0

    def edit_inputs(self, inputs: ModelInputs) -> ModelInputs:
        return put_in(self, inputs, torch.full((self.count,), self.token, device=inputs[self.tokens].device), 0)

    def kept(self, seq_len: int) -> Tensor:
        return torch.arange(seq_len) + self.count
