"""Quantised layers: a cache ring in eight or four bits, its sinks and newest tokens whole; and the kind each layer has."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.float_grids import FORMATS, FloatFormat
from sinklab.models.integer_linear import affine_grid
from sinklab.results.environment import require_memory
from sinklab.streaming.layer import HybridLayer, LatentLayer, RecurrentLayer, SlotLayer
from sinklab.streaming.step import Step
from sinklab.streaming.table import SlotTable, WindowedTable
from sinklab.streaming.traits import KeyRotations, Rotation, hybrid_layers, keyless_layers

GROUP = 64
"""Most slots that share the grid of a channel of the keys; a ring of fewer than four times as many has smaller groups."""

Side = Literal["key", "value"]
SIDES: tuple[Side, Side] = ("key", "value")
PARTS = ("codes", "scales", "zeros")


Parts = tuple[Tensor, Tensor, Tensor]
"""Codes, scales and zeros (of floats, scales of the whole), ``(batch, num_kv_heads, groups, …)`` each."""


@dataclasses.dataclass(frozen=True)
class Integers:
    """Codes of integers: a grid of keys belongs to one channel of a group of slots, and a grid of values to one token."""

    bits: int

    def require(self, size: int, what: str) -> None:
        """Refuse heads whose channels do not fill bytes."""
        if self.bits == 4 and size % 2:
            raise ConfigurationError(f"`quantized` int4 puts two channels into a byte; {what} have {size}, use int8")

    def encode(self, side: Side, states: Tensor) -> Parts:
        """Of whole groups, ``(batch, num_kv_heads, groups, group, head_dim)``."""
        axis = 3 if side == "key" else 4
        grid = affine_grid(states.amin(dim=axis, keepdim=True), states.amax(dim=axis, keepdim=True), self.bits)
        scales = grid.scale.clamp(min=2**-24).to(torch.float16)
        grid = dataclasses.replace(grid, scale=scales.float())  # numbers are rounded on the grid that is kept
        codes = grid.codes(states)
        if self.bits == 4:
            lower, upper = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
            codes = lower | (upper << 4)
        return codes, scales, grid.zero.to(torch.int8)

    def widen(self, ring: Tensor, parts: Parts) -> None:
        """Write what codes stand for into ``ring``, of the dtype of the model."""
        codes, scales, zeros = parts
        # A copy converts integers several times as fast as arithmetic of two dtypes does.
        if self.bits == 8:
            ring.copy_(codes)
            ring -= zeros.to(ring.dtype)
        else:  # the two numbers of a byte move into two bytes, and stay in these as long as they are integers
            numbers = codes.to(torch.int16)
            numbers.add_(numbers & 0xF0, alpha=15)
            ring.copy_(numbers.view(torch.int8).sub_(zeros + 8))
        ring *= scales.to(ring.dtype)


Kind = Integers | FloatFormat
"""How numbers of the ring are kept: of floats blocks are channels of a token, and the whole is a head's group of slots."""

KINDS: dict[str, Kind] = {"int8": Integers(8), "int4": Integers(4), **FORMATS}
"""What ``quantized`` may be."""


def read_kind(quantized: str | None) -> Kind | None:
    """How numbers of the ring are kept; ``None`` for one that is not quantised."""
    if quantized is not None and (not isinstance(quantized, str) or quantized not in KINDS):
        raise ConfigurationError(f"`quantized` {quantized!r} is none of {', '.join(KINDS)}; None keeps the dtype of the model")
    return None if quantized is None else KINDS[quantized]


Workspace = dict[Side, Tensor]
"""Tensors that the layers of one cache widen their codes into, one layer after the other."""


class QuantizedLayer(SlotLayer):
    """A :class:`SlotLayer` whose ring holds codes of eight or four bits between the steps: integers, or floating-point numbers.

    Keys have outliers in a few channels and values have none (Liu et al. 2024, KIVI, arXiv 2402.02750), so a grid of keys
    belongs to one channel of a group of slots that follow each other, and a grid of values to one token.

    Tokens are rounded once, when their group of slots is full; until then they wait in full precision. Pinned tokens never are
    rounded: so much attention rests on their keys that this would cost most. Where positions are counted anew, keys of the ring
    are rotated and rounded once more. A step widens the whole layer into a workspace that all layers share: it takes more time
    than without, and less memory. Tokens of one chunk see each other unrounded.

    Attributes:
        key_codes, value_codes: int8 ``(batch, num_kv_heads, groups, group, head_dim)``; of 4 bits, uint8 with two
            numbers in a byte, that of the even channel in the lower bits: the last axis is half as long.
        key_scales, key_zeros: float16 and int8 ``(batch, num_kv_heads, groups, 1, head_dim)``, of values ``(…, group, 1)``; of
            floats those of blocks ``(…, group, blocks)`` and of the whole, float32 ``(…, 1, 1)``.
        key_newest, value_newest: tokens that wait, ``(batch, num_kv_heads, group, head_dim)``; where: ``waiting``, boolean.
        sinks: values of the pinned tokens, ``(batch, num_kv_heads, pinned, head_dim)``.
    """

    buffers: ClassVar[tuple[str, ...]] = (
        *(f"{side}_{part}" for side in SIDES for part in (*PARTS, "newest")),
        "waiting",
        "masters",
        "sinks",
    )

    waiting: Tensor
    sinks: Tensor

    def __init__(self, table: SlotTable, rotation: Rotation | None, kind: Kind, workspace: Workspace) -> None:
        super().__init__(table, rotation)
        self.kind, self.workspace = kind, workspace
        self.ring = table.policy.num_slots - self.fixed
        self.group = max(1, min(GROUP, self.ring // 4))
        self._open: int | None = None

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        for side, states in zip(SIDES, (key_states, value_states), strict=True):
            self.kind.require(states.shape[-1], f"heads of the {side}s")
        (batch, heads), groups = key_states.shape[:2], -(-self.ring // self.group)
        channels = key_states.shape[-1] + value_states.shape[-1]
        if key_states.device.type == "cpu":
            needed = batch * heads * self.ring * channels * self.kind.bits // 8
            require_memory(needed, f"one layer of a cache of {self.ring} tokens in {self.kind.bits} bits")
        for side, states in zip(SIDES, (key_states, value_states), strict=True):
            size = states.shape[-1]
            empty = self._encoded(side, states.new_zeros(batch, heads, groups, self.group, size))
            newest = states.new_zeros(batch, heads, self.group, size)
            parts = {**dict(zip(PARTS, empty, strict=True)), "newest": newest}
            for part, tensor in parts.items():
                setattr(self, f"{side}_{part}", tensor)
        self.waiting = torch.zeros(batch, groups, self.group, dtype=torch.bool, device=key_states.device)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.masters = key_states.new_zeros(batch, heads, self.fixed, key_states.shape[-1], dtype=wide)
        self.sinks = value_states.new_zeros(batch, heads, self.fixed, value_states.shape[-1])

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._widen()
        try:
            result = super().update(key_states, value_states)
            step = self.table.step_at(self.device)
            assert isinstance(step, Step)
            self._keep(step)
        finally:
            self._drop()
        return result

    def move(self, steps: Tensor) -> None:
        if self.is_initialized and self.rotation is not None:
            self._widen()
            super().move(steps)
            keys = self._grouped(self.keys)
            self._round("key", slice(None), keys)
            self.key_newest.copy_(torch.where(self.waiting[:, None, :, :, None], keys, 0).sum(dim=2))
            self._drop()

    def restore(self, buffers: dict[str, Tensor]) -> None:
        super().restore(buffers)
        self.dtype, self._open = self.sinks.dtype, None

    def take(self, rows: Tensor) -> None:
        super().take(rows)
        self._open = None

    # --- between the steps there are codes -----------------------------------------------------------------------------------

    def _get(self, side: Side, part: str) -> Tensor:
        return cast(Tensor, getattr(self, f"{side}_{part}"))

    def _encoded(self, side: Side, states: Tensor) -> Parts:
        """Of whole groups, ``(batch, num_kv_heads, groups, group, head_dim)``."""
        if isinstance(self.kind, Integers):
            return self.kind.encode(side, states)
        return self.kind.encode(states, states.abs().amax((-1, -2), keepdim=True))

    def _parts(self, side: Side) -> Parts:
        codes, scales, zeros = (self._get(side, part) for part in PARTS)
        return codes, scales, zeros

    def _drop(self) -> None:
        for name in ("keys", "values"):
            setattr(self, name, None)

    def _grouped(self, held: Tensor) -> Tensor:
        """The ring by groups, ``(batch, num_kv_heads, groups, group, head_dim)``; copies of its last slot fill the last one."""
        ring = held[:, :, self.fixed :]
        short = -self.ring % self.group
        ring = torch.cat((ring, ring[:, :, -1:].expand(-1, -1, short, -1)), dim=2) if short else ring
        return ring.unflatten(2, (-1, self.group))

    def _widen(self) -> None:
        """Keys and values of this layer in the dtype of the model, for one step."""
        for side, whole in zip(SIDES, (self.masters, self.sinks), strict=True):
            parts, newest = self._parts(side), self._get(side, "newest")
            batch, heads, groups, size = *parts[0].shape[:3], newest.shape[-1]
            shape, held = (batch, heads, self.fixed + groups * self.group, size), self.workspace.get(side)
            if held is None or (held.shape, held.dtype, held.device) != (shape, newest.dtype, newest.device):
                with torch.inference_mode(False):
                    held = self.workspace[side] = newest.new_empty(shape)
            ring = held[:, :, self.fixed :].unflatten(2, (groups, self.group))
            if isinstance(self.kind, Integers):
                self.kind.widen(ring, parts)
            else:
                ring.copy_(self.kind.decode(*parts))
            if self._open is None:
                ring.copy_(torch.where(self.waiting[:, None, :, :, None], newest[:, :, None], ring))
            else:
                of_group = ring[:, :, self._open]
                of_group.copy_(torch.where(self.waiting[:, None, self._open, :, None], newest, of_group))
            # As long as no pinned key has been moved; a step that moves them does so from the masters too.
            held[:, :, : self.fixed] = whole
            setattr(self, f"{side}s", held[:, :, : self.fixed + self.ring])

    def _round(self, side: Side, groups: slice | Tensor, states: Tensor) -> None:
        """Codes of whole groups, ``(batch, num_kv_heads, chosen groups, group, head_dim)``."""
        for held, fresh in zip(self._parts(side), self._encoded(side, states), strict=True):
            held[:, :, groups] = fresh

    def _keep(self, step: Step) -> None:
        """Take in what a step has written: new tokens wait, and groups that are full are rounded."""
        self.sinks = self.values[:, :, : self.fixed].clone()
        if isinstance(step.slot, int):
            self._keep_token(step.slot - self.fixed)
            return
        slots = self.fixed + self.ring
        if step.source is not None:
            order = step.source.expand(len(self.waiting), -1)
        else:
            assert isinstance(step.slot, Tensor)
            order = torch.nn.functional.one_hot(step.slot, slots).long() - 1
        self._keep_columns(order[:, self.fixed :])

    def _keep_token(self, slot: int) -> None:
        """One token in the same slot of the ring of all rows; a negative slot is a pinned one."""
        if slot < 0:
            return
        group, place = divmod(slot, self.group)
        if group != self._open and (place or bool(self.waiting.any())):  # tokens were taken back, or a state is from elsewhere
            order = torch.full((len(self.waiting), self.ring), -1, device=self.waiting.device)
            order[:, slot] = 0
            self._keep_columns(order)
            return
        self._open = group
        for side, held in zip(SIDES, (self.keys, self.values), strict=True):
            self._get(side, "newest")[:, :, place] = held[:, :, self.fixed + slot]
        self.waiting[:, group, place] = True
        if place == self.group - 1 or slot == self.ring - 1:
            self._close(torch.tensor([group], device=self.waiting.device), None)
            self.waiting[:, group] = False

    def _keep_columns(self, order: Tensor) -> None:
        """Tokens of a chunk, or of rows that do not agree: ``order`` ``(batch, ring)`` is the column written there, or -1."""
        short = -self.ring % self.group
        order = torch.nn.functional.pad(order, (0, short), value=-1)
        newest, any_written = order.argmax(dim=1), (order >= 0).any(dim=1)
        written = (order >= 0).unflatten(1, (-1, self.group))
        before = self.waiting.any(dim=2).int().argmax(dim=1)
        opened = torch.where(any_written, newest // self.group, before)
        is_open = torch.nn.functional.one_hot(opened, self.waiting.shape[1]).bool()[:, :, None]
        ended = any_written & ((newest % self.group == self.group - 1) | (newest == self.ring - 1))
        waiting = self.waiting | written
        full = waiting & (~is_open | ended[:, None, None])
        of_row = full.any(dim=2)
        chosen = of_row.any(dim=0).nonzero()[:, 0]
        now = waiting & ~full
        if len(chosen):
            self._close(chosen, of_row[:, chosen])
        if bool(now.any()):
            for side, held in zip(SIDES, (self.keys, self.values), strict=True):
                rows = torch.arange(len(opened), device=opened.device)
                of_group = self._grouped(held)[rows, :, opened]
                mine = (written & now)[rows, opened]
                buffer = self._get(side, "newest")
                buffer.copy_(torch.where(mine[:, None, :, None], of_group, buffer))
        self.waiting = now
        agreed = bool((opened == opened[0]).all())
        self._open = int(opened[0]) if agreed else None

    def _close(self, groups: Tensor, rows: Tensor | None) -> None:
        """Round groups of slots, of all rows or of those in boolean ``(batch, groups)``."""
        for side, held in zip(SIDES, (self.keys, self.values), strict=True):
            states = self._grouped(held)[:, :, groups]
            parts = {part: self._get(side, part) for part in PARTS}
            old = {} if rows is None else {part: tensor[:, :, groups] for part, tensor in parts.items()}
            self._round(side, groups, states)
            for part, tensor in old.items():
                assert rows is not None
                parts[part][:, :, groups] = torch.where(rows[:, None, :, None, None], parts[part][:, :, groups], tensor)


class QuantizedLatentLayer(LatentLayer, QuantizedLayer):
    """A :class:`~sinklab.streaming.quantized.QuantizedLayer` of latents."""


class QuantizedHybridLayer(HybridLayer, QuantizedLayer):
    """A :class:`~sinklab.streaming.quantized.QuantizedLayer` with states, which stay as they are."""


def make_layers(
    model: PreTrainedModel, slots: SlotTable, rotations: KeyRotations, kind: Kind | None
) -> list[SlotLayer | RecurrentLayer]:
    """The layers of a cache of slots, each of the kind that its layer of the model asks for; ``kind`` of codes."""
    layers: dict[int, SlotLayer | RecurrentLayer] = {
        index: RecurrentLayer(states) for index, states in keyless_layers(model).items()
    }
    hybrid, workspace = hybrid_layers(model), Workspace()
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for index, rotation in rotations.layers.items():
        table = slots
        if isinstance(slots, WindowedTable):
            if index >= len(kinds):  # Dory
                name = type(model).__name__
                raise UnsupportedModelError(f"{name} has windows in layers that its config does not name; hold as few tokens")
            table = slots.narrow if kinds[index] == "sliding_attention" else slots
        settings: tuple[Any, ...] = (table, rotation)
        classes: tuple[Any, ...] = (SlotLayer, LatentLayer, HybridLayer)
        if kind is not None:
            settings = (table, rotation, kind, workspace)
            classes = (QuantizedLayer, QuantizedLatentLayer, QuantizedHybridLayer)
        plain, of_latents, with_states = classes
        if index in hybrid:
            layers[index] = with_states(*settings, states=hybrid[index])
        else:
            layers[index] = (of_latents if index in rotations.latent else plain)(*settings)
    return [layers[index] for index in sorted(layers)]
