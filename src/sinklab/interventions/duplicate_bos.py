"""Duplicate the first token: is the sink the position, the token, or the first token of its kind?"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.intervention import InputIntervention, ModelInputs
from sinklab.errors import ConfigurationError
from sinklab.interventions._tokens import first_tokens, put_in
from sinklab.registry import interventions

__all__ = ["DuplicateBos"]


@interventions.register("duplicate_bos")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DuplicateBos(InputIntervention):
    """``count`` more copies of the first token of every row, directly behind it; what follows moves up by as many positions.

    Args:
        count: 0 or more.

    Raises:
        ConfigurationError: a negative count; labels, a cache or positions of one's own (see docs/interventions.md).
    """

    example: ClassVar[dict[str, object]] = {"count": 1}
    neutral: ClassVar[dict[str, object]] = {"count": 0}

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigurationError(f"duplicate_bos: count must be 0 or more, got {self.count}")

    @property
    def changes_nothing(self) -> bool:
        return self.count == 0

    def edit_inputs(self, inputs: ModelInputs) -> ModelInputs:
        first = inputs[self.tokens].gather(1, first_tokens(self, inputs)[:, None])
        return put_in(self, inputs, first.expand(-1, self.count), 1)

    def kept(self, seq_len: int) -> Tensor:
        places = torch.arange(seq_len)
        return places + self.count * (places > 0)
