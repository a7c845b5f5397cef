"""StreamingLLM's published rule, slowly: keys are held unrotated, and all of them are rotated anew for every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from sinklab.streaming.rotation import Rotation, read_rotations

__all__ = ["SlowLayer", "slow_logits"]


class SlowLayer(CacheLayerMixin):
    """Trims after the step, as the released code does; a key's position is its index among the keys that are held."""

    def __init__(self, rotation: Rotation | None, num_sinks: int, window: int) -> None:
        super().__init__()
        self.rotation, self.num_sinks, self.window = rotation, num_sinks, window
        self.plain: list[Tensor] = []
        self.held_values: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def rotated(self, keys: Tensor, steps: int) -> Tensor:
        if self.rotation is None:
            return keys
        return keys @ self.rotation.matrices(torch.tensor(steps), keys.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert key_states.shape[2] == 1
        if len(self.plain) > self.num_sinks + self.window:  # the trim after the last step
            for held in (self.plain, self.held_values):
                del held[self.num_sinks]
        position = len(self.plain)
        self.plain.append(self.rotated(key_states, -position))
        self.held_values.append(value_states)
        keys = [self.rotated(key, index) for index, key in enumerate(self.plain)]
        return torch.cat(keys, dim=2), torch.cat(self.held_values, dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = min(len(self.plain), self.num_sinks + self.window)
        return held + 1, 0

    def get_seq_length(self) -> int:
        return min(len(self.plain), self.num_sinks + self.window)

    def get_max_length(self) -> int:
        return -1


@torch.no_grad()
def slow_logits(model: PreTrainedModel, tokens: Tensor, num_sinks: int, window: int) -> Tensor:
    """Logits ``(batch, seq_len, vocab_size)``, one token at a time."""
    rotations = read_rotations(model).layers
    cache = Cache(layers=[SlowLayer(rotation, num_sinks, window) for rotation in rotations.values()])
    found = []
    for index in range(tokens.shape[1]):
        position = torch.tensor([[min(index, num_sinks + window)]]).expand(len(tokens), -1)
        token = tokens[:, index : index + 1]
        found.append(model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, dim=1)
