"""StreamingLLM's published rule, slowly: keys are held unrotated, and all of them are rotated anew for every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

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
        if len(self.plain) > self.num_sinks + self.window:  # the trim after the last step
            for held in (self.plain, self.held_values):
                del held[self.num_sinks]
        assert key_states.shape[2] == 1 or len(self.plain) + key_states.shape[2] <= self.num_sinks + self.window
        for key, value in zip(key_states.split(1, dim=2), value_states.split(1, dim=2), strict=True):
            self.plain.append(self.rotated(key, -len(self.plain)))
            self.held_values.append(value)
        keys = [self.rotated(key, index) for index, key in enumerate(self.plain)]
        return torch.cat(keys, dim=2), torch.cat(self.held_values, dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = min(len(self.plain), self.num_sinks + self.window)
        return held + query_length, 0

    def get_seq_length(self) -> int:
        return min(len(self.plain), self.num_sinks + self.window)

    def get_max_length(self) -> int:
        return -1


class SlowLatentLayer(SlowLayer):
    """Latent attention: the second tensor is what rotates."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rotated, latent = super().update(value_states, key_states)
        return latent, rotated


class SlowHybridLayer(SlowLayer, LinearAttentionLayer):
    """Attention and linear attention side by side; the state is as transformers keeps it."""

    def __init__(self, rotation: Rotation | None, num_sinks: int, window: int) -> None:
        SlowLayer.__init__(self, rotation, num_sinks, window)
        LinearAttentionLayer.__init__(self)

    def lazy_initialization(self, **states: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, **states)


@torch.no_grad()
def slow_logits(
    model: PreTrainedModel, tokens: Tensor, num_sinks: int, window: int, *, front: int = 0, first: int = 1
) -> Tensor:
    """Logits ``(batch, seq_len, vocab_size)``, one token at a time.

    Args:
        front: tokens that the model itself puts in front of the first one; they stay besides the sinks.
        first: tokens that are given at once to begin with.
    """
    rotations = read_rotations(model)
    layers: list[Any] = list(DynamicCache(config=model.config).layers)  # those of linear attention stay
    for index, rotation in rotations.layers.items():
        beside = isinstance(layers[index], LinearAttentionLayer) if index < len(layers) else False
        kind = SlowLatentLayer if index in rotations.latent else SlowHybridLayer if beside else SlowLayer
        layers[index : index + 1] = [kind(rotation, front + num_sinks, window)]
    cache = Cache(layers=layers)
    found = []
    for piece in torch.arange(tokens.shape[1]).split([first, *[1] * (tokens.shape[1] - first)]):
        positions = piece.clamp(max=num_sinks + window).expand(len(tokens), -1)
        found.append(model(input_ids=tokens[:, piece], position_ids=positions, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, dim=1)
