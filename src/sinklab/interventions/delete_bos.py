"""Delete the first token: where does the sink go when BOS is not there?"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.intervention import InputIntervention, ModelInputs
from sinklab.errors import ConfigurationError
from sinklab.interventions._tokens import first_tokens, rearranged, token_positions
from sinklab.registry import interventions


@interventions.register("delete_bos")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeleteBos(InputIntervention):
    """The first ``count`` tokens of every row are taken out; what follows moves down by as many positions.

    Args:
        count: 0 or more.
        token: id that they must have; ``None`` for any.

    Raises:
        ConfigurationError: a negative count; a row that would be empty, or that begins with another token; labels, a cache or
            positions of one's own (see docs/interventions.md).
    """

    example: ClassVar[dict[str, object]] = {"count": 1}
    neutral: ClassVar[dict[str, object]] = {"count": 0}

    count: int = 1
    token: int | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigurationError(f"delete_bos: count must be 0 or more, got {self.count}")

    @property
    def changes_nothing(self) -> bool:
        return self.count == 0

    def edit_inputs(self, inputs: ModelInputs) -> ModelInputs:
        ids, positions = inputs[self.tokens], token_positions(self, inputs)
        shortest = int((positions >= 0).sum(1).min())
        if shortest <= self.count:
            raise ConfigurationError(f"delete_bos: a row of {shortest} tokens would be empty without its first {self.count}")
        gone = ids[(positions >= 0) & (positions < self.count)]
        if self.token is not None and bool((gone != self.token).any()):
            other = int(gone[gone != self.token][0])
            raise ConfigurationError(
                f"delete_bos: token {other} stands where {self.token} was expected; give token=None to delete what is there"
            )
        here = first_tokens(self, inputs)[:, None]
        column = torch.arange(ids.shape[1] - self.count, device=ids.device)[None]
        source = torch.where(column < here, column, column + self.count)
        return rearranged(self, inputs, source, ids.new_zeros(()))

    def kept(self, seq_len: int) -> Tensor:
        return (torch.arange(seq_len) - self.count).clamp_min(-1)
