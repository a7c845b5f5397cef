"""Layer: keys and values of one layer of a bounded cache; to decode a token nothing is copied."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from sinklab.errors import ConfigurationError
from sinklab.results.environment import require_memory
from sinklab.streaming.step import StaticStep, Step
from sinklab.streaming.table import SlotTable
from sinklab.streaming.traits import Rotation, restore_states, states_of


class SlotLayer(CacheLayerMixin):
    """One layer of a :class:`~sinklab.streaming.cache.PolicyCache`, whose table says what is where; written in place.

    Attention depends on differences of positions, so keys stay as they were rotated when they were written; only pinned keys,
    whose distance to the query is not their distance in the text, are rotated anew at every step, each from its first form: no
    error adds up.

    Attributes:
        buffers: names of the tensors that last from step to step; rows of the batch first, allocated at the first call.
        rotation: of the layer's keys; ``None`` where positions do not rotate them.
        fixed: pinned slots, at the beginning, whose keys do not move with the others.
        keys, values: ``(batch, num_kv_heads, slots, head_dim)``, pinned slots first.
        masters: pinned keys as they were written, ``(batch, num_kv_heads, pinned, head_dim)``, float32 or float64.
        static_matrices: rotations of a :class:`~sinklab.streaming.step.StaticStep`, ``(pinned, head_dim, head_dim)``.
    """

    is_sliding = False
    buffers: ClassVar[tuple[str, ...]] = ("keys", "values", "masters")
    keys: Tensor
    values: Tensor
    masters: Tensor

    def __init__(self, table: SlotTable, rotation: Rotation | None) -> None:
        super().__init__()
        self.table, self.rotation, self.fixed = table, rotation, len(table.policy.pinned)
        self.static_matrices: Tensor | None = None

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
        self.masters = self.keys[:, :, : self.fixed].to(torch.promote_types(self.dtype, torch.float32), copy=True)
        if self.keys.is_cuda and not torch.compiler.is_compiling():
            # CUDA graphs are not made of a step that writes into tensors which might be elsewhere the next time.
            for held in (self.keys, self.values, self.masters):
                torch._dynamo.mark_static_address(held)

    def require(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys ``(batch, num_kv_heads, length, head_dim)`` that do not go with the step at hand; allocate at first."""
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
        assert step.shifts is not None
        if step.shifts.shape[1:].numel() == 1 and (step.at is not None or len(step.shifts) == 1):
            return (masters @ step.rotation_matrices(self.rotation, masters.dtype)[0, 0, 0])[:, :, None]
        # A matrix for each copy would be more to read than what it moves.
        return self.rotation.turned(masters[:, :, None], *step.waves(self.rotation, masters.dtype))

    def _chunk(self, step: Step, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, masters = self.keys, self.values, self.masters
        assert step.source is not None
        # Of the ring as it is before the chunk: its queries may still see tokens whose slots the chunk takes.
        ring = slice(self.fixed, self.fixed + step.used)
        seen = torch.cat((keys[:, :, ring], key_states), dim=2), torch.cat((values[:, :, ring], value_states), dim=2)
        masters.copy_(_received(masters, key_states, step.source[:, : self.fixed]))
        for held, given in ((keys, key_states), (values, value_states)):
            if step.received is None:
                held.copy_(_received(held, given, step.source))
            else:  # the slots that receive alone: a chunk of few tokens would copy all that is held
                held.index_copy_(2, step.received, given.index_select(2, step.source[0, step.received]))
        if step.shifts is None:
            return seen
        copies = step.shifts.shape[1]
        if self.rotation is None:
            sinks = masters[:, :, None].expand(-1, -1, copies, -1, -1)
        else:
            sinks = self._rotated(step, masters)
            keys[:, :, : self.fixed] = sinks[:, :, -1]  # as the last query sees them
        if step.which is not None:
            self.table.leave(sinks[:, :, step.which], values[:, :, : self.fixed])
            return seen
        copied = sinks.flatten(2, 3).to(keys.dtype)
        repeated = values[:, :, : self.fixed].repeat(1, 1, copies, 1)
        return torch.cat((copied, seen[0]), dim=2), torch.cat((repeated, seen[1]), dim=2)


def _received(held: Tensor, given: Tensor, source: Tensor) -> Tensor:
    """``held`` with ``given`` at ``source``, ``(1 or batch, slots)``, in each slot, or what it had, where that is -1."""
    index = source.clamp(min=0)[:, None, :, None].expand(len(held), held.shape[1], -1, held.shape[3])
    return torch.where((source >= 0)[:, None, :, None], given.gather(2, index).to(held.dtype), held)


class LatentLayer(SlotLayer):
    """Holds what is rotated as its keys and the latent as its values, and is given and gives them the other way round.

    DeepSeek-V2 (arXiv 2405.04434) and its successors cache two tensors of one head each: the latent, from which the keys and
    values of all heads are made, and the rotated coordinates of the keys, which all heads share. The second takes the place
    that values have elsewhere. It is the one that moves with positions.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Of new tokens latents ``(batch, 1, length, rank)`` and rotated coordinates ``(batch, 1, length, rotary_dim)``."""
        rotated, latent = super().update(value_states, key_states)
        return latent, rotated


class HybridLayer(SlotLayer, LinearAttentionLayer):
    """Keys and values in slots, and states of linear attention beside them on the same tokens (Falcon-H1, Zamba2)."""

    def __init__(self, *settings: Any, states: int) -> None:
        super().__init__(*settings)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Allocate buffers for keys and values, or make room for a state."""
        if keys_and_values:
            super().lazy_initialization(*keys_and_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def bytes_held(self) -> int:
        return super().bytes_held() + sum(state.nbytes for state in states_of(self).values())

    def release(self) -> None:
        super().release()
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def state(self) -> dict[str, Tensor]:
        return super().state() | states_of(self)

    def restore(self, buffers: dict[str, Tensor]) -> None:
        super().restore(buffers)
        restore_states(self, buffers)

    def take(self, rows: Tensor) -> None:
        super().take(rows)
        LinearAttentionLayer.reorder_cache(self, rows)

    def reset(self) -> None:
        super().reset()
        LinearAttentionLayer.reset(self)


class RecurrentLayer(LinearAttentionLayer):
    """The states of one layer, none or several, with what a :class:`~sinklab.streaming.cache.PolicyCache` asks of layers."""

    @property
    def batch_size(self) -> int:
        """Rows of the states; -1 before the first call."""
        return next((len(state) for state in states_of(self).values()), -1)

    def bytes_held(self) -> int:
        """Bytes of the states."""
        return sum(state.nbytes for state in states_of(self).values())

    def move(self, steps: Tensor) -> None:
        """Nothing: a state has no positions."""

    def release(self) -> None:
        """Give the states back: the next text has another number of rows."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def state(self) -> dict[str, Tensor]:
        """The tensors that a saved cache has of it."""
        return states_of(self)

    def restore(self, buffers: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` of another layer of this kind gave."""
        restore_states(self, buffers)

    def take(self, rows: Tensor) -> None:
        """Rows of the batch are taken again, left out or reordered."""
        self.reorder_cache(rows)
