"""Ordered: the cache of models whose bias goes by the order of the keys; what is held stays in the order of the text.

ALiBi (Press et al. 2022, arXiv 2108.12409) and its relatives rotate no keys. They add to each score a number that depends on
how many columns lie between key and query. So keys must be in the order of the text, without holes, and then in-cache
positions as StreamingLLM has them come for free: when a token is evicted, later keys shift left. One copy of the cache for
every token is the price.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import UnsupportedModelError
from sinklab.policies.base import BoundedPolicy
from sinklab.streaming.held import HeldLayer
from sinklab.streaming.host import decoder_of
from sinklab.streaming.table import IndexedTable

__all__ = ["OrderedLayer", "OrderedStep", "OrderedTable", "has_ordered_bias", "require_ordered"]


def has_ordered_bias(model: PreTrainedModel) -> bool:
    """Whether the scores of a model depend on the order of the keys in its cache."""
    position = getattr(model, "position", None)  # SinkLM
    if getattr(position, "biased", False):
        return True
    if model.config.is_encoder_decoder:  # the family of T5: buckets of distances, counted in the cache
        return any(getattr(module, "has_relative_attention_bias", False) for module in decoder_of(model).modules())
    config = model.config.get_text_config()
    # Nothing in a config says so in general: these are the families of transformers that build ALiBi from columns.
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


def require_ordered(policy: BoundedPolicy, model: PreTrainedModel) -> None:
    """Refuse a policy that a model with an ordered bias cannot have.

    Raises:
        UnsupportedModelError: original positions of tokens with others between them that have left, or more tokens than the
            model's table of biases has columns.
    """
    name = type(model).__name__
    consecutive = not policy.pinned and policy.reach == policy.num_slots  # as far from each other in the cache as in the text
    if policy.positions != "in_cache" and not consecutive:
        raise UnsupportedModelError(
            f"{name} adds a bias that counts the keys between key and query, and those that have left cannot be counted: what "
            f"is held has its positions in the cache, and policy {policy.describe()!r} wants those in the text, with gaps. "
            "Choose one with positions='in_cache'"
        )
    table = int(getattr(model.config.get_text_config(), "max_seq_len", None) or sys.maxsize)  # MPT
    if policy.num_slots > table:
        raise UnsupportedModelError(
            f"{name} has biases for {table:,} keys and the policy holds {policy.num_slots:,}; choose a smaller window"
        )


@dataclasses.dataclass(eq=False)
class OrderedStep:
    """One forward of ``length`` new columns.

    Attributes:
        length: columns of the forward, padding included.
        held: columns in front of the new ones.
        source: which columns of before these are: ``None`` for all of them, int64 ``(held,)`` alike for all rows, or
            ``(rows, held)``.
        filled: both, the keys that a layer returns.
        attention_mask: 2-D ``(rows, held + length)``, 1 for tokens; ``None`` where there is no padding.
    """

    length: int
    held: int
    source: Tensor | None
    filled: int
    attention_mask: Tensor | None


class OrderedTable(IndexedTable):
    """Which token is in which column; no position is counted.

    Columns of a row are in the order of the text and end with its newest token; a row that has fewer tokens than another has
    padding in front, wherever it was in the batch. As long as no row has had padding, the tables have one row for all.

    Attributes:
        index: token in every column, int64 ``(rows, columns held)``, -1 for padding.
        ids: likewise, ``(batch, columns held)``.
    """

    in_order: ClassVar[bool] = True
    counts_room: ClassVar[bool] = True
    per_row: ClassVar[tuple[str, ...]] = ("seen", "index")
    numbers: ClassVar[tuple[str, ...]] = ("columns", "rebases")
    step: OrderedStep | None

    def clear(self) -> None:
        super().clear()
        self.index = torch.zeros(1, 0, dtype=torch.long)

    @property
    def highest_position(self) -> None:
        return None

    @property
    def seq_length(self) -> int:
        return self.columns if self.step is None else self.step.held

    def distances(self, row: int, visible: Tensor) -> tuple[list[int], int]:
        # Columns are counted: those that stay, the next token last.
        return visible.long().flip(0).cumsum(0).flip(0).tolist(), int(visible.sum())

    def room(self, length: int, valid: Tensor | None) -> int:
        """So many that no token leaves on the way, and that all rows end with padding in front only.

        Within a forward the columns of all its queries are the same.
        """
        tokens = self.tokens(valid, length)
        keys = torch.cat((self.index, tokens), dim=1)[:, None]
        queries = tokens[:, :, None]
        visible = self.policy.visible(queries.clamp(min=0), keys.clamp(min=0)) | (keys > queries) | (keys < 0) | (queries < 0)
        inside = (tokens >= 0).long().cumsum(dim=1) + self.seen[:, None] > 0
        fine = (visible.all(dim=2) & ((tokens >= 0) | ~inside)).all(dim=0)
        return max(1, int(fine.long().cumprod(dim=0).sum()))

    def plan(self, length: int, valid: Tensor | None) -> OrderedStep:
        tokens = self.tokens(valid, length)
        newest = tokens.amax(dim=1, keepdim=True).where((tokens >= 0).any(dim=1, keepdim=True), self.seen[:, None] - 1)
        stays = (self.index >= 0) & self.policy.visible(newest.clamp(min=0), self.index.clamp(min=0))
        held = int(stays.sum(dim=1).max()) if stays.numel() else 0
        # Stable: columns that stay keep their order, at the end; in front of them shorter rows get any other column as padding.
        order = stays.long().argsort(dim=1, stable=True)[:, stays.shape[1] - held :]
        held_index = self.index.gather(1, order).where(stays.gather(1, order), -1)
        everything = held == self.index.shape[1] and bool((order == torch.arange(held)).all())
        source = None if everything else (order[0] if self.rows == 1 else order).to(self.device)
        self.index = torch.cat((held_index, tokens), dim=1)
        self.seen = self.seen + (tokens >= 0).sum(dim=1)
        self.count(tokens >= 0)
        there = self.index >= 0
        mask = None if self.rows == 1 and bool(there.all()) else there.long().to(self.device)
        return OrderedStep(length, held, source, held + length, mask)

    def note(self, ids: Tensor | None, batch: int) -> None:
        step = self.step
        assert step is not None
        if ids is None:
            ids = torch.full((batch, step.length), -1)
        if self.ids is not None and step.held:
            before = self.ids if step.source is None else self.ids.gather(1, step.source.expand(batch, -1))
            ids = torch.cat((before, ids), dim=1)
        self.ids = ids

    def rebase(self) -> Tensor:
        return torch.zeros(1, dtype=torch.long)


class OrderedLayer(HeldLayer):
    """One layer of a :class:`~sinklab.streaming.cache.PolicyCache` whose columns are in the order of the text.

    Attributes:
        keys, values: ``(batch, num_kv_heads, columns held, head_dim)``, oldest first.
    """

    table: OrderedTable

    def allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Append new keys and values ``(batch, num_kv_heads, length, head_dim)``; all that are held."""
        step = self.table.step
        if step is not None and self.table.columns == step.length:  # a text begins
            self.is_initialized = False
        self.require(key_states, value_states)
        assert step is not None
        self.keys = torch.cat((_gathered(self.keys, step.source), key_states), dim=2)
        self.values = torch.cat((_gathered(self.values, step.source), value_states), dim=2)
        return self.keys, self.values


def _gathered(held: Tensor, source: Tensor | None) -> Tensor:
    if source is None:
        return held
    source = source.to(held.device)  # of a layer of a model that is spread over devices
    if source.ndim == 1:
        return held[:, :, source]
    return held.gather(2, source[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))
