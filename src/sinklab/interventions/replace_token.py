"""Replace tokens: one word becomes another, and what changes further on shows how far the change spreads."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from sinklab.attention.intervention import InputIntervention, ModelInputs, Place, names_nothing, tokens_at
from sinklab.errors import ConfigurationError
from sinklab.interventions._tokens import token_positions
from sinklab.registry import interventions


@interventions.register("replace_token")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReplaceToken(InputIntervention):
    """The tokens at some positions become ``token``; with and without a sink, the perturbation of Barbero et al. 2025
    (arXiv 2504.02732), who find that the sink keeps it from spreading.

    Rows that have no such position are left as they are. In decoding with a cache a position is edited when its token comes.

    Args:
        place: positions in the row, padding not counted, or a row of them for each sample.
        token: id of the new token.

    Raises:
        ConfigurationError: a place that is no position.
    """

    example: ClassVar[dict[str, object]] = {"place": (2, 5), "token": 7}
    neutral: ClassVar[dict[str, object]] = {"place": (), "token": 7}

    place: Place = 0
    token: int

    def __post_init__(self) -> None:
        if isinstance(self.place, str):
            raise ConfigurationError(f"replace_token: {self.place!r} is no token; give positions")

    @property
    def changes_nothing(self) -> bool:
        return names_nothing(self.place)

    def edit_inputs(self, inputs: ModelInputs) -> ModelInputs:
        ids = inputs[self.tokens]
        chosen = tokens_at(token_positions(self, inputs), self.place, self.name)
        inputs[self.tokens] = torch.where(chosen, ids.new_tensor(self.token), ids)
        return inputs
