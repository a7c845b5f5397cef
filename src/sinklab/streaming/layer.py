"""Slot layer: keys and values of one layer in slots of their own, written in place; to decode a token nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.streaming.held import HeldLayer
from sinklab.streaming.rotation import Rotation
from sinklab.streaming.static import StaticStep

if TYPE_CHECKING:
    from sinklab.streaming.cache import PolicyCache
    from sinklab.streaming.step import Step

__all__ = ["SlotLayer"]


class SlotLayer(HeldLayer):
    """One layer of a :class:`~sinklab.streaming.cache.PolicyCache` under a slot policy.

    Attention depends on differences of positions, so keys stay as they were turned when they were written; only pinned keys,
    whose distance to the query is not their distance in the text, are turned anew at every step, each from its first form: no
    error adds up.

    Attributes:
        keys, values: ``(batch, num_kv_heads, slots, head_dim)``, pinned slots first; allocated at the first call.
        masters: pinned keys as they were written, ``(batch, num_kv_heads, pinned, head_dim)``, float32 or float64.
        turning: matrices of a static step, ``(pinned, head_dim, head_dim)``; see :class:`~sinklab.streaming.static.StaticStep`.
    """

    buffers: ClassVar[tuple[str, ...]] = ("keys", "values", "masters")

    def __init__(self, cache: PolicyCache, rotation: Rotation | None) -> None:
        super().__init__(cache)
        self.rotation = rotation
        self.pinned = len(cache.policy.pinned)
        self.masters: Tensor | None = None
        self.turning: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, size = key_states.shape
        slots = self.cache.policy.num_slots
        wide = torch.promote_types(self.dtype, torch.float32)
        with torch.inference_mode(False):  # tensors made in that mode could not be written outside of it
            self.keys = key_states.new_zeros(batch, heads, slots, size)
            self.values = value_states.new_zeros(batch, heads, slots, value_states.shape[-1])
            self.masters = torch.zeros(batch, heads, self.pinned, size, dtype=wide, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values, ``(batch, num_kv_heads, length, head_dim)``; those that this step's queries may see."""
        step = self.cache.step
        if step is None or key_states.shape[2] != step.length:
            raise ConfigurationError(self.cache.misuse(key_states.shape[2]))
        if key_states.requires_grad:
            raise ConfigurationError("a bounded cache is written in place and has no gradient; run under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif key_states.dtype != self.dtype:
            raise ConfigurationError(
                f"the cache holds keys of {self.dtype} and is given {key_states.dtype}: its model was cast since; make another"
            )
        if isinstance(step, StaticStep):
            return self._static(step, key_states, value_states)
        if step.slot is None:
            return self._chunk(step, key_states, value_states)
        return self._one(step, step.slot, key_states, value_states)

    def _one(self, step: Step, slot: int | Tensor, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, masters = self.keys, self.values, self.masters
        assert keys is not None
        assert values is not None
        assert masters is not None
        if isinstance(slot, int):
            keys[:, :, slot] = key_states[:, :, 0]
            values[:, :, slot] = value_states[:, :, 0]
            if slot < self.pinned:
                masters[:, :, slot] = key_states[:, :, 0]
        else:
            rows = torch.arange(len(slot), device=slot.device)
            keys[rows, :, slot] = key_states[:, :, 0]
            values[rows, :, slot] = value_states[:, :, 0]
            pins = (slot[:, None] == torch.arange(self.pinned, device=slot.device))[:, None, :, None]
            masters.copy_(torch.where(pins, key_states.to(masters.dtype), masters))
        if step.turns is not None and self.rotation is not None:
            keys[:, :, : self.pinned] = self._turned(step, masters)[:, :, 0]
        if step.filled == keys.shape[2]:
            return keys, values
        return keys[:, :, : step.filled], values[:, :, : step.filled]

    def _static(self, step: StaticStep, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`_one`, in operations that depend on no number: one write for the pinned keys and the new one together."""
        keys, values, masters = self.keys, self.values, self.masters
        assert keys is not None
        assert values is not None
        assert masters is not None
        pinned = step.slots[: self.pinned]
        masters.copy_(torch.where((pinned == step.slot)[:, None], key_states.to(masters.dtype), masters))
        turned = masters if self.turning is None else (masters[:, :, :, None] @ self.turning)[:, :, :, 0]
        # A pinned token that comes in has its slot twice, and the same key for both: it is not turned yet.
        keys.index_copy_(2, step.slots, torch.cat((turned.to(keys.dtype), key_states), dim=2))
        values.index_copy_(2, step.slot, value_states)
        return keys, values

    def _turned(self, step: Step, masters: Tensor) -> Tensor:
        """Copies of the pinned keys as this step's queries see them, ``(batch, num_kv_heads, copies, pinned, head_dim)``."""
        assert self.rotation is not None
        matrices = step.rotation_matrices(self.rotation, masters.dtype)[:, None]  # (rows, 1, copies, 1 or pinned, size, size)
        if matrices.shape[:4].numel() == 1:  # one product instead of one for every head
            return (masters @ matrices[0, 0, 0, 0])[:, :, None]
        if matrices.shape[3] == 1:
            return masters[:, :, None] @ matrices[:, :, :, 0]
        return (masters[:, :, None, :, None] @ matrices)[..., 0, :]

    def _chunk(self, step: Step, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, masters = self.keys, self.values, self.masters
        assert keys is not None
        assert values is not None
        assert masters is not None
        assert step.source is not None
        pinned = self.pinned
        source = step.source.expand(len(keys), -1)
        # Keys of the ring as they were before the chunk: its queries may still see tokens whose slots the chunk takes.
        ring = slice(pinned, pinned + step.used)
        old = keys[:, :, ring].clone(), values[:, :, ring].clone()
        masters.copy_(_received(masters, key_states, source[:, :pinned]))
        keys.copy_(_received(keys, key_states, source))
        values.copy_(_received(values, value_states, source))
        if step.turns is None:
            return torch.cat((old[0], key_states), dim=2), torch.cat((old[1], value_states), dim=2)
        copies = step.turns.shape[1]
        if self.rotation is None:
            sinks = masters[:, :, None].expand(-1, -1, copies, -1, -1)
        else:
            sinks = self._turned(step, masters)
            keys[:, :, :pinned] = sinks[:, :, -1]  # as the last query sees them
        copied = sinks.flatten(2, 3).to(keys.dtype)
        repeated = values[:, :, :pinned].repeat(1, 1, copies, 1)
        return torch.cat((copied, old[0], key_states), dim=2), torch.cat((repeated, old[1], value_states), dim=2)

    def move(self, steps: Tensor) -> None:
        """Turn all keys of the ring by ``steps`` positions, ``(1 or batch,)``, because positions are counted from elsewhere."""
        if self.keys is None or self.rotation is None:
            return
        wide = torch.promote_types(self.dtype, torch.float32)
        matrices = self.rotation.matrices(steps.to(self.device), wide)
        ring = self.keys[:, :, self.pinned :]
        ring.copy_(ring.to(wide) @ matrices[:, None])


def _received(held: Tensor, given: Tensor, source: Tensor) -> Tensor:
    """``held`` with what each slot receives: ``given`` at ``source``, ``(batch, slots)``, or what it had, where that is -1."""
    index = source.clamp(min=0)[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
    return torch.where((source >= 0)[:, None, :, None], given.gather(2, index).to(held.dtype), held)
