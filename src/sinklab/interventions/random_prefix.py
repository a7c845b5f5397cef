"""Random prefix: meaningless tokens in front of a text, or after its BOS, so that the first token is no longer first."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.intervention import InputIntervention, ModelInputs
from sinklab.errors import ConfigurationError
from sinklab.interventions._tokens import put_in
from sinklab.registry import interventions


@interventions.register("random_prefix")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RandomPrefix(InputIntervention):
    """``count`` tokens, drawn evenly from the ids below ``vocab_size``, behind the first ``behind`` of every row.

    All rows get the same ones. The following tokens move up by ``count`` positions. If the sink is a position it stays at 0
    and is another token; if it is a token it moves along.

    Args:
        vocab_size: at most that of the model.
        count: 0 or more.
        behind: 0 in front of everything, 1 behind BOS.
        seed: another one gives other tokens.

    Raises:
        ConfigurationError: a negative number, or no id to draw from; a row shorter than ``behind``; labels, a cache or
            positions of one's own (see docs/interventions.md).
    """

    example: ClassVar[dict[str, object]] = {"vocab_size": 40, "count": 2}
    neutral: ClassVar[dict[str, object]] = {"vocab_size": 40, "count": 0}

    vocab_size: int
    count: int = 1
    behind: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.count < 0 or self.behind < 0:
            raise ConfigurationError(
                f"random_prefix: vocab_size must be positive, count and behind 0 or more; got {self.vocab_size}, {self.count} "
                f"and {self.behind}"
            )

    @property
    def changes_nothing(self) -> bool:
        return self.count == 0

    def edit_inputs(self, inputs: ModelInputs) -> ModelInputs:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(self.vocab_size, (self.count,), generator=generator)
        return put_in(self, inputs, drawn.to(inputs[self.tokens].device), self.behind)

    def kept(self, seq_len: int) -> Tensor:
        places = torch.arange(seq_len)
        return places + self.count * (places >= self.behind)
