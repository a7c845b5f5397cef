"""Slot layer: keys and values of one layer in slots of their own, written in place; to decode a token nothing is copied."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.streaming.held import HeldLayer
from sinklab.streaming.rotation import Rotation
from sinklab.streaming.slot_table import SlotTable
from sinklab.streaming.step import StaticStep, Step

__all__ = ["SlotLayer"]


class SlotLayer(HeldLayer):
    """One layer of a :class:`~sinklab.streaming.cache.PolicyCache` under a slot policy.

    Attention depends on differences of positions, so keys stay as they were rotated when they were written; only pinned keys,
    whose distance to the query is not their distance in the text, are rotated anew at every step, each from its first form: no
    error adds up.

    Attributes:
        keys, values: ``(batch, num_kv_heads, slots, head_dim)``, pinned slots first; allocated at the first call.
        masters: pinned keys as they were written, ``(batch, num_kv_heads, pinned, head_dim)``, float32 or float64.
        static_matrices: rotations of a static step, ``(pinned, head_dim, head_dim)``; see
            :class:`~sinklab.streaming.step.StaticStep`.
    """

    buffers: ClassVar[tuple[str, ...]] = ("keys", "values", "masters")
    table: SlotTable
    masters: Tensor

    def __init__(self, table: SlotTable, rotation: Rotation | None) -> None:
        super().__init__(table, rotation, fixed=len(table.policy.pinned))
        self.static_matrices: Tensor | None = None

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        super().allocate(key_states, value_states)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.masters = self.keys[:, :, : self.fixed].to(wide, copy=True)
        if self.keys.is_cuda and not torch.compiler.is_compiling():
            # CUDA graphs are not made of a step that writes into tensors which might be elsewhere the next time.
            for held in (self.keys, self.values, self.masters):
                torch._dynamo.mark_static_address(held)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write new keys and values, ``(batch, num_kv_heads, length, head_dim)``; those that this step's queries may see."""
        self.require(key_states, value_states)
        step = self.table.step_at(self.device)
        if isinstance(step, StaticStep):
            return self._static(step, key_states, value_states)
        assert step is not None
        if step.slot is None:
            result = self._chunk(step, key_states, value_states)
            if self.table.watched:
                self.table.given = result
            return result
        return self._token(step, step.slot, key_states, value_states)

    def _token(self, step: Step, slot: int | Tensor, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, masters = self.keys, self.values, self.masters
        if isinstance(slot, int):
            keys[:, :, slot] = key_states[:, :, 0]
            values[:, :, slot] = value_states[:, :, 0]
            if slot < self.fixed:
                masters[:, :, slot] = key_states[:, :, 0]
        else:
            rows = torch.arange(len(slot), device=slot.device)
            keys[rows, :, slot] = key_states[:, :, 0]
            values[rows, :, slot] = value_states[:, :, 0]
            pins = (slot[:, None] == torch.arange(self.fixed, device=slot.device))[:, None, :, None]
            masters.copy_(torch.where(pins, key_states.to(masters.dtype), masters))
        if step.shifts is not None and self.rotation is not None:
            keys[:, :, : self.fixed] = self._rotated(step, masters)[:, :, 0]
        if step.filled == keys.shape[2]:
            return keys, values
        return keys[:, :, : step.filled], values[:, :, : step.filled]

    def _static(self, step: StaticStep, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`_token`, in operations that depend on no number: one write for the pinned keys and the new one together."""
        keys, values, masters = self.keys, self.values, self.masters
        pinned = step.slots[: self.fixed]
        masters.copy_(torch.where((pinned == step.slot)[:, None], key_states.to(masters.dtype), masters))
        rotated = masters
        if self.static_matrices is not None:
            rotated = (masters[:, :, :, None] @ self.static_matrices)[:, :, :, 0]
        # A pinned token that comes in has its slot twice, and the same key for both: it is not moved yet.
        keys.index_copy_(2, step.slots, torch.cat((rotated.to(keys.dtype), key_states), dim=2))
        values.index_copy_(2, step.slot, value_states)
        return keys, values

    def _rotated(self, step: Step, masters: Tensor) -> Tensor:
        """Copies of the pinned keys as this step's queries see them, ``(batch, num_kv_heads, copies, pinned, head_dim)``."""
        assert self.rotation is not None
        matrices = step.rotation_matrices(self.rotation, masters.dtype)[:, None]  # (rows, 1, copies, 1 or pinned, size, size)
        if matrices.shape[:4].numel() == 1:  # one product instead of one for every head
            return (masters @ matrices[0, 0, 0, 0])[:, :, None]
        # Heads, and rows of the batch that move alike, are rows of one product: broadcast, each would copy the matrices.
        batch, heads, pinned, size = masters.shape
        rows = matrices.shape[0]
        alike = masters.reshape(rows, batch // rows, heads, pinned, size)
        if matrices.shape[3] == 1:
            moved = alike.flatten(1, 3)[:, None] @ matrices[:, 0, :, 0]  # (rows, copies, alike · heads · pinned, size)
            return moved.unflatten(2, (-1, heads, pinned)).movedim(1, 3).flatten(0, 1)
        moved = alike.flatten(1, 2).transpose(1, 2)[:, None] @ matrices[:, 0]  # (rows, copies, pinned, alike · heads, size)
        return moved.unflatten(3, (-1, heads)).permute(0, 3, 4, 1, 2, 5).flatten(0, 1)

    def _chunk(self, step: Step, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, masters = self.keys, self.values, self.masters
        assert step.source is not None
        source = step.source
        # Keys of the ring as they were before the chunk: its queries may still see tokens whose slots the chunk takes.
        ring = slice(self.fixed, self.fixed + step.used)
        old = keys[:, :, ring].clone(), values[:, :, ring].clone()
        masters.copy_(_received(masters, key_states, source[:, : self.fixed]))
        keys.copy_(_received(keys, key_states, source))
        values.copy_(_received(values, value_states, source))
        if step.plain:
            return key_states, value_states
        if step.shifts is None:
            return torch.cat((old[0], key_states), dim=2), torch.cat((old[1], value_states), dim=2)
        copies = step.shifts.shape[1]
        if self.rotation is None:
            sinks = masters[:, :, None].expand(-1, -1, copies, -1, -1)
        else:
            sinks = self._rotated(step, masters)
            keys[:, :, : self.fixed] = sinks[:, :, -1]  # as the last query sees them
        if step.which is not None:
            self.table.leave(sinks[:, :, step.which], values[:, :, : self.fixed])
            return torch.cat((old[0], key_states), dim=2), torch.cat((old[1], value_states), dim=2)
        copied = sinks.flatten(2, 3).to(keys.dtype)
        repeated = values[:, :, : self.fixed].repeat(1, 1, copies, 1)
        return torch.cat((copied, old[0], key_states), dim=2), torch.cat((repeated, old[1], value_states), dim=2)


def _received(held: Tensor, given: Tensor, source: Tensor) -> Tensor:
    """``held`` with what each slot receives: ``given`` at ``source``, ``(1 or batch, slots)``, or what it had, where that is
    -1."""
    index = source.clamp(min=0)
    if len(source) == 1:  # whole keys are copied much faster than numbers are gathered
        received = given.index_select(2, index[0])
    else:
        received = given.gather(2, index[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))
    return torch.where((source >= 0)[:, None, :, None], received.to(held.dtype), held)
