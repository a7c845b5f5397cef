"""Move positions apart: insert a gap in the positions after the sink; how far away may it be?"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from sinklab.attention.host_arguments import given_cache
from sinklab.attention.intervention import InputIntervention, ModelInputs
from sinklab.errors import ConfigurationError
from sinklab.interventions._tokens import cached_tokens, names_beside, token_positions
from sinklab.registry import interventions

__all__ = ["MoveApart"]


@interventions.register("move_apart")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MoveApart(InputIntervention):
    """Position ids of all tokens behind position ``place`` grow by ``gap``; tokens, order and visibility stay.

    Under relative positions every other distance stays too. A sink works at any distance, which is why streaming may keep it
    at a fixed one (Xiao et al. 2023, arXiv 2309.17453). Without positions given, they are counted from 0 by index, padding
    included, as the models that take ``position_ids`` do. In decoding with a cache, new tokens are moved like the others. A
    row is one document: what is packed by ``position_ids`` alone, without a mask, is refused.

    Args:
        place: last position before the gap, padding not counted.
        gap: 0 or more; with learned positions it must stay inside the table.

    Raises:
        ConfigurationError: a negative number; or documents packed in a row, that is, ``position_ids`` that start anew and no
            mask.
        UnsupportedModelError: the model takes no ``position_ids``, or counts in a way of its own and none were given.
    """

    example: ClassVar[dict[str, object]] = {"place": 0, "gap": 5}
    neutral: ClassVar[dict[str, object]] = {"gap": 0}

    place: int = 0
    gap: int = 1

    def __post_init__(self) -> None:
        if self.place < 0 or self.gap < 0:
            raise ConfigurationError(f"move_apart: place and gap must be 0 or more, got {self.place} and {self.gap}")

    @property
    def changes_nothing(self) -> bool:
        return self.gap == 0

    def edit_inputs(self, inputs: ModelInputs) -> ModelInputs:
        mask, positions = names_beside(self)
        ids, start = inputs[self.tokens], cached_tokens(self, inputs)
        given = inputs.get(positions)
        if given is None:
            given = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape)
        alone = inputs.get(mask) is None and given_cache(inputs) is None
        if alone and given.ndim == 2 and bool((given[:, 1:] <= given[:, :-1]).any()):
            raise ConfigurationError(
                f"move_apart: {positions} start anew inside a row, which packs several documents, and a gap would merge them; "
                f"give each document a row of its own, and a {mask} where rows are padded"
            )
        inputs[positions] = given + self.gap * (token_positions(self, inputs) > self.place)
        if alone:
            # Without a mask transformers takes a gap in the positions for the beginning of another document.
            inputs[mask] = torch.ones_like(ids)
        return inputs
