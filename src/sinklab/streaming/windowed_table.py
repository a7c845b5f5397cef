"""Windowed table: the slot table of a model some of whose layers see fewer tokens than a policy holds.

Models such as Gemma 3 and gpt-oss have layers of full attention and, between them, layers with a sliding window. Where that
window is narrower than what a policy holds, these layers keep the window that they were trained with, and the policy bounds the
others. Both count positions alike, since all layers of a forward have the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.policies.base import SlotPolicy
from sinklab.streaming.slot_table import SlotTable
from sinklab.streaming.step import Step

__all__ = ["WindowedTable"]

_NARROW = "narrow."
"""What the names of the narrow table begin with in a saved state."""


class WindowedTable(SlotTable):
    """The table of the layers that a policy bounds, which takes that of the narrow layers along.

    Args:
        window: what the narrow layers hold.

    Attributes:
        narrow: the table of the narrow layers.
    """

    def __init__(self, policy: SlotPolicy, window: SlotPolicy, device: torch.device, model: PreTrainedModel) -> None:
        self.narrow = SlotTable(window, device, model)
        super().__init__(policy, device, model)

    def clear(self) -> None:
        super().clear()
        self.narrow.clear()

    def finish(self) -> None:
        super().finish()
        self.narrow.finish()

    def spread(self, batch: int) -> None:
        super().spread(batch)
        self.narrow.spread(batch)

    def take(self, rows: Tensor) -> None:
        super().take(rows)
        self.narrow.take(rows)

    def plan(self, length: int, valid: Tensor | None) -> Step:
        self.narrow.step = self.narrow.plan(length, valid)
        return super().plan(length, valid)

    def rebase(self) -> Tensor:
        """Count positions from the oldest token in the ring of the policy, in all layers."""
        steps = super().rebase()
        self.narrow.base = self.base.clone()
        return steps

    def crop(self, keep: int) -> None:
        copy.deepcopy(self.narrow).crop(keep)  # which raises where that is not possible, before anything has changed
        super().crop(keep)
        self.narrow.crop(keep)
        self.narrow.base = self.base.clone()

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"{_NARROW}{name}": tensor for name, tensor in self.narrow.state().items()}

    def counts(self) -> dict[str, bool | int]:
        return super().counts() | {f"{_NARROW}{name}": count for name, count in self.narrow.counts().items()}

    def restore(self, state: dict[str, Tensor], counts: dict[str, bool | int]) -> None:
        super().restore(state, counts)
        self.narrow.restore(_below(state), _below(counts))

    def masks(self, mask: object, narrow: object) -> dict[str, object]:
        """The masks of a forward by the kinds of layers in the model's config: that of the narrow layers, and of the others."""
        model = self.model
        assert model is not None
        kinds = model.config.get_text_config(decoder=True).layer_types
        return {kind: narrow if kind == "sliding_attention" else mask for kind in kinds}


def _below(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_NARROW): value for name, value in named.items() if name.startswith(_NARROW)}
