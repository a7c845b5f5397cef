"""Ordered: the cache of models whose bias goes by the order of the keys; what is held stays in the order of the text.

ALiBi (Press et al. 2022, arXiv 2108.12409) and its relatives turn no keys. They add to each score a number that depends on how
many columns lie between key and query. So keys must stand in the order of the text, without holes, and then in-cache positions
as StreamingLLM has them come for free: whoever leaves closes the ranks. One copy of the cache for every token is the price.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.streaming.held import HeldLayer
from sinklab.streaming.policy import SlotPolicy

if TYPE_CHECKING:
    pass

__all__ = ["OrderedBooks", "OrderedLayer", "OrderedStep", "has_ordered_bias", "require_ordered"]


def has_ordered_bias(model: PreTrainedModel) -> bool:
    """Whether the scores of a model depend on the order of the keys in its cache."""
    position = getattr(model, "position", None)  # SinkLM
    if getattr(position, "biased", False):
        return True
    config = model.config.get_text_config()
    # Nothing in a config says so in general: these are the families of transformers that build ALiBi from columns.
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


def require_ordered(policy: SlotPolicy, model: PreTrainedModel) -> None:
    """Refuse a policy that a model with an ordered bias cannot have.

    Raises:
        UnsupportedModelError: original positions, or more tokens than the model's table of biases has columns.
    """
    name = type(model).__name__
    if policy.positions != "in_cache":
        raise UnsupportedModelError(
            f"{name} adds a bias that counts the keys between key and query, so the positions of what is held are those in the "
            f"cache; policy {policy.describe()!r} has original positions. Choose one with positions='in_cache'"
        )
    table = int(getattr(model.config.get_text_config(), "max_seq_len", None) or sys.maxsize)  # MPT
    if policy.num_slots > table:
        raise UnsupportedModelError(
            f"{name} has biases for {table} keys and the policy holds {policy.num_slots}; choose a smaller window"
        )


@dataclasses.dataclass(eq=False)
class OrderedStep:
    """One forward of ``length`` new columns.

    Attributes:
        length: columns of the forward, padding included.
        held: columns in front of the new ones.
        source: which columns of before these are: ``None`` for all of them, int64 ``(held,)`` alike for all rows, or
            ``(rows, held)``.
        attention_mask: 2-D ``(rows, held + length)``, 1 for tokens; ``None`` where there is no padding.
    """

    length: int
    held: int
    source: Tensor | None
    attention_mask: Tensor | None


class OrderedBooks:
    """Which token is in which column; the counterpart of :class:`~sinklab.streaming.step.Books`.

    Columns of a row are in the order of the text and end with its newest token; a row that has fewer tokens than another has
    padding in front, wherever it was in the batch. As long as no row has had padding, the tables have one row for all.

    Attributes:
        seen: tokens of every row, int64 ``(rows,)``, on the CPU.
        columns: columns fed so far, padding included.
        index: token in every column, int64 ``(rows, columns held)``, -1 for padding; on the CPU.
        base, rebases: 0, since no position is counted.
    """

    base = 0
    rebases = 0
    next_position = 0

    def __init__(self, policy: SlotPolicy, device: torch.device) -> None:
        self.policy, self.device = policy, device
        self.clear()

    def clear(self) -> None:
        """Back to an empty cache."""
        self.seen = torch.zeros(1, dtype=torch.long)
        self.index = torch.zeros(1, 0, dtype=torch.long)
        self.columns = 0

    @property
    def rows(self) -> int:
        """Rows of the tables: 1 as long as all rows of the batch agree."""
        return len(self.seen)

    def spread(self, batch: int) -> None:
        """Give every row of the batch its own table, because one of them has padding."""
        if self.rows != batch:
            self.seen, self.index = self.seen.expand(batch).clone(), self.index.expand(batch, -1).clone()

    def tables(self) -> tuple[Tensor, Tensor]:
        """``seen`` and ``index``."""
        return self.seen, self.index

    def take(self, rows: Tensor) -> None:
        """Rows of the batch are taken again, left out or reordered."""
        if self.rows > 1:
            self.seen, self.index = self.seen[rows.cpu()], self.index[rows.cpu()]

    def _tokens(self, valid: Tensor | None, length: int) -> Tensor:
        """Index of every new token, ``(rows, length)``, -1 for padding."""
        if valid is None:
            return self.seen[:, None] + torch.arange(length)
        return torch.where(valid, self.seen[:, None] + valid.long().cumsum(dim=1) - 1, -1)

    def room(self, length: int, valid: Tensor | None) -> int:
        """How many of ``length`` new columns can be taken at once, at least 1.

        That many, of which none makes a token leave, and which leave all rows with padding in front only: within a forward
        the columns of all its queries are the same.
        """
        tokens = self._tokens(valid, length)
        keys = torch.cat((self.index, tokens), dim=1)[:, None]
        queries = tokens[:, :, None]
        visible = self.policy.visible(queries.clamp(min=0), keys.clamp(min=0)) | (keys > queries) | (keys < 0) | (queries < 0)
        inside = (tokens >= 0).long().cumsum(dim=1) + self.seen[:, None] > 0
        fine = (visible.all(dim=2) & ((tokens >= 0) | ~inside)).all(dim=0)
        return max(1, int(fine.long().cumprod(dim=0).sum()))

    def plan(self, length: int, valid: Tensor | None) -> OrderedStep:
        """What a forward of ``length`` columns does; ``valid`` is boolean ``(rows, length)`` if some of them are padding.

        The books are those behind the step when this returns.
        """
        tokens = self._tokens(valid, length)
        newest = tokens.amax(dim=1, keepdim=True).where((tokens >= 0).any(dim=1, keepdim=True), self.seen[:, None] - 1)
        stays = (self.index >= 0) & self.policy.visible(newest.clamp(min=0), self.index.clamp(min=0))
        held = int(stays.sum(dim=1).max()) if stays.numel() else 0
        # Stable: columns that stay keep their order, at the end; in front of them shorter rows get any other column as padding.
        order = stays.long().argsort(dim=1, stable=True)[:, stays.shape[1] - held :]
        kept = self.index.gather(1, order).where(stays.gather(1, order), -1)
        everything = held == self.index.shape[1] and bool((order == torch.arange(held)).all())
        source = None if everything else (order[0] if self.rows == 1 else order).to(self.device)
        self.index = torch.cat((kept, tokens), dim=1)
        self.seen = self.seen + (tokens >= 0).sum(dim=1)
        self.columns += length
        mask = None if self.rows == 1 else (self.index >= 0).long().to(self.device)
        return OrderedStep(length, held, source, mask)

    def crop(self, keep: int) -> None:
        """Forget all but the first ``keep`` tokens.

        Raises:
            ConfigurationError: rows do not agree on their tokens, or some that would be held again have been evicted.
        """
        if self.rows > 1:
            raise ConfigurationError("a padded batch cannot be cropped: its rows do not agree on their last tokens")
        kept = self.index[0] < keep
        if keep:
            needed = int(self.policy.visible(torch.tensor(keep - 1), torch.arange(keep)).sum())
            if int(kept.sum()) < needed:
                raise ConfigurationError(
                    f"cannot go back to {keep} tokens: {needed - int(kept.sum())} of the {needed} that the policy held then "
                    "have been evicted since. Save the state before, and load it"
                )
        self.index = torch.where(kept, self.index, -1)
        self.seen.fill_(keep)
        self.columns = keep

    def rebase(self) -> Tensor:
        """Nothing moves; 0."""
        return torch.zeros(1, dtype=torch.long)


class OrderedLayer(HeldLayer):
    """One layer of a :class:`~sinklab.streaming.cache.PolicyCache` whose columns are in the order of the text.

    Attributes:
        keys, values: ``(batch, num_kv_heads, columns held, head_dim)``, oldest first.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values ``(batch, num_kv_heads, length, head_dim)``; all that are held."""
        step = self.cache.step
        if step is None or key_states.shape[2] != step.length:
            raise ConfigurationError(self.cache.misuse(key_states.shape[2]))
        if key_states.requires_grad:
            raise ConfigurationError("a bounded cache has no gradient; run under torch.no_grad()")
        if not self.is_initialized or not self.cache.books.columns - step.length:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys = torch.cat((_gathered(self.keys, step.source), key_states), dim=2)
        self.values = torch.cat((_gathered(self.values, step.source), value_states), dim=2)
        return self.keys, self.values

    def move(self, steps: Tensor) -> None:
        """Nothing: no key is turned."""


def _gathered(held: Tensor, source: Tensor | None) -> Tensor:
    if source is None:
        return held
    if source.ndim == 1:
        return held[:, :, source]
    return held.gather(2, source[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))
