"""Held layer: what the layers of all bounded caches share, and what transformers asks of each of them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sinklab.errors import ConfigurationError
from sinklab.results.requirements import require_memory
from sinklab.streaming.rotation import Rotation
from sinklab.streaming.table import Table

__all__ = ["HeldLayer"]


class HeldLayer(CacheLayerMixin):
    """One layer of a :class:`~sinklab.streaming.cache.PolicyCache`, whose table says what is where.

    Attributes:
        buffers: names of the tensors that last from step to step; rows of the batch first, allocated at the first call.
        table: of the cache that the layer belongs to.
        rotation: of the layer's keys; ``None`` where positions do not rotate them.
        fixed: slots at the beginning whose keys do not move with the others.
    """

    is_sliding = False
    buffers: ClassVar[tuple[str, ...]] = ("keys", "values")
    keys: Tensor
    values: Tensor

    def __init__(self, table: Table, rotation: Rotation | None = None, fixed: int = 0) -> None:
        super().__init__()
        self.table, self.rotation, self.fixed = table, rotation, fixed

    @property
    def batch_size(self) -> int:
        """Rows of the buffers; -1 before the first call."""
        return len(getattr(self, self.buffers[0])) if self.is_initialized else -1

    def bytes_held(self) -> int:
        """Bytes of the buffers, as allocated."""
        return sum(getattr(self, name).nbytes for name in self.buffers) if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for keys and values such as these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        with torch.inference_mode(False):  # tensors made in that mode could not be written outside of it
            self.allocate(key_states, value_states)
        self.is_initialized = True

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers, ``(batch, num_kv_heads, slots, …)``."""
        batch, heads, _, size = key_states.shape
        slots = self.table.policy.num_slots
        if key_states.device.type == "cpu":
            needed = batch * heads * slots * (size + value_states.shape[-1]) * key_states.element_size()
            require_memory(needed, f"one layer of a cache of {slots} tokens")
        self.keys = key_states.new_zeros(batch, heads, slots, size)
        self.values = value_states.new_zeros(batch, heads, slots, value_states.shape[-1])

    def require(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys ``(batch, num_kv_heads, length, head_dim)`` that do not go with the step at hand; allocate at first.

        Raises:
            ConfigurationError: no step was planned for them, they have a gradient, or another dtype than before.
        """
        step = self.table.step
        if step is None or key_states.shape[2] != step.length:
            raise ConfigurationError(self.table.misuse(key_states.shape[2]))
        if key_states.requires_grad:
            raise ConfigurationError("a bounded cache is written in place and has no gradient; run under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif key_states.dtype != self.dtype:
            raise ConfigurationError(
                f"the cache holds keys of {self.dtype} and is given {key_states.dtype}: its model was cast since; make another"
            )

    def move(self, steps: Tensor) -> None:
        """Rotate keys by ``steps`` positions, ``(1 or batch,)``, because positions are counted from elsewhere."""
        if self.is_initialized and self.rotation is not None:
            wide = torch.promote_types(self.dtype, torch.float32)
            matrices = self.rotation.matrices(steps.to(self.device), wide)
            moving = self.keys[:, :, self.fixed :]
            moving.copy_(moving.to(wide) @ matrices[:, None])

    def release(self) -> None:
        """Give the buffers back: the next text has another number of rows."""
        for name in ("keys", "values", *self.buffers):
            setattr(self, name, None)
        self.is_initialized = False

    def state(self) -> dict[str, Tensor]:
        """The tensors that a saved cache has of it."""
        return {name: getattr(self, name) for name in self.buffers}

    def restore(self, buffers: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` of another layer of this kind gave."""
        for name in self.buffers:
            setattr(self, name, buffers[name])
        first = buffers[self.buffers[0]]
        self.dtype, self.device, self.is_initialized = first.dtype, first.device, True

    def take(self, rows: Tensor) -> None:
        """Rows of the batch are taken again, left out or reordered."""
        if self.is_initialized:
            for name in self.buffers:
                held: Tensor = getattr(self, name)
                setattr(self, name, held[rows.to(held.device)])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that ``update`` returns, and the index of the first of them as the host's causal rule counts."""
        return self.table.mask_sizes(query_length)

    def get_seq_length(self) -> int | Tensor:
        """Tokens seen, padding included, and not the tokens held."""
        return self.table.seq_length

    def get_max_length(self) -> int:
        """-1: there is no end."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Nothing: what the table does not list is not visible."""
