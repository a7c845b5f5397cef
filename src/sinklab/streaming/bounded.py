"""Bounded cache: what a cache in the hands of transformers answers and obeys; which tokens it holds is its table's to say."""

from __future__ import annotations

import abc
import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex

import pandas as pd
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from sinklab.errors import ConfigurationError
from sinklab.policies.base import BoundedPolicy
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.held import HeldLayer
from sinklab.streaming.host import Planner, copied_together, generating_model, join, kept_tensors
from sinklab.streaming.recurrent import RecurrentLayer
from sinklab.streaming.table import IndexedTable, PlannedStep, Table
from sinklab.streaming.telemetry import Telemetry, describe_slots

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

__all__ = ["BoundedCache"]


class BoundedCache(Cache, Planner):
    """Layers and the one table that they share, for one model; :class:`~sinklab.streaming.cache.PolicyCache` fills them.

    Attributes:
        policy: what is held.
        layers: one for each layer of the model; empty until there is one.
        keys_in_slots: what attention is given is not in the order of the text, which a session asks for.
    """

    layers: list[HeldLayer | RecurrentLayer]
    keys_in_slots: ClassVar[bool] = True

    def __init__(self, policy: BoundedPolicy) -> None:
        super().__init__(layers=[])
        self.policy = policy
        self._table: Table | None = None
        self._outputs: list[ModelOutput] = []  # of the chunks before the last, with the number of logits that the caller gets
        self._front = 0  # learned tokens that the model puts in front of every text
        self._prefix = 0  # tokens of the text that see each other both ways
        self._unfinished = False  # a forward has begun and not ended: some layers hold its tokens and others do not

    @property
    def model(self) -> PreTrainedModel | None:
        """The model that the cache belongs to."""
        return None if self._table is None else self._table.model

    @property
    def batch_size(self) -> int:
        """Rows of what the layers hold; -1 before the first forward. A layer that holds nothing has none to say."""
        return next((rows for layer in self.layers if (rows := layer.batch_size) >= 0), -1)

    @property
    def table(self) -> Table:
        """Which token is where; see :class:`~sinklab.streaming.table.Table`."""
        if self._table is None:
            self.bind(generating_model())
        assert self._table is not None
        return self._table

    @property
    def is_croppable(self) -> bool:
        """Always: where :meth:`crop` cannot go back, it says itself why not, and what to do."""
        return True

    @property
    def step(self) -> PlannedStep | None:
        """What the forward at hand does; ``None`` between forwards."""
        return None if self._table is None else self._table.step

    def __repr__(self) -> str:
        known = (
            f"{self.policy.describe()}, of no model yet"
            if self.model is None
            else f"{type(self.model).__name__}; {self.telemetry()}"
        )
        return f"{type(self).__name__}({known})"

    @abc.abstractmethod
    def bind(self, model: PreTrainedModel) -> BoundedCache:
        """Take the model's layers, rotations and limits."""

    def rebase(self) -> None:
        """Count positions from the oldest token in the ring; scores stay what they are up to rounding."""
        steps = self.table.rebase()
        for layer in self.layers:
            layer.move(-steps)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache of the same model that goes on by itself, as for texts with a common beginning; the model is not copied.

        Raises:
            ConfigurationError: the model is being copied too, of which the copy could not be the cache.
        """
        model = self.model
        shared = {} if model is None else {id(module): module for module in model.modules()}
        if any(memo.get(key, module) is not module for key, module in shared.items()):
            raise ConfigurationError(copied_together(f"the {type(model).__name__}"))
        memo.update(shared)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        try:
            for name, value in vars(self).items():
                setattr(copied, name, copy.deepcopy(value, memo))
        finally:  # or a model that is copied after the cache would be the first one itself
            for key in shared:
                memo.pop(key, None)
        if model is not None:
            join(model, copied)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self._table is not None:
            raise ConfigurationError(
                "a cache belongs to its model and cannot be pickled; save_state of sinklab.streaming.state writes what it "
                "holds, and copy.deepcopy copies it"
            )
        return super().__reduce_ex__(protocol)

    # --- what it holds -------------------------------------------------------------------------------------------------------

    def bytes_held(self) -> int:
        """Bytes of keys and values, and of what is kept beside them, as allocated."""
        return sum(layer.bytes_held() for layer in self.layers)

    def telemetry(self) -> Telemetry:
        """What is held, and what has gone, in figures."""
        table, rows = self.table, max(1, self.batch_size)
        return Telemetry(
            policy=self.policy.describe(),
            seen=tuple(table.seen.expand(rows).tolist()),
            held=tuple(table.held.expand(rows).tolist()),
            capacity=table.policy.num_slots,
            bytes=self.bytes_held(),
            rebases=table.rebases,
            highest_position=table.highest_position,
        )

    def describe(self, tokenizer: Tokenizer | None = None) -> pd.DataFrame:
        """The tokens held, one a line, with slot, position and distance; see :func:`describe_slots`."""
        assert isinstance(self.table, IndexedTable)
        return describe_slots(self.table, max(1, self.batch_size), tokenizer)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, in the forward that was planned for; see :class:`~sinklab.streaming.held.HeldLayer`.

        Raises:
            ConfigurationError: no model has planned a forward with this cache, as for cross-attention.
        """
        if self._table is None:
            raise ConfigurationError(
                f"a {type(self).__name__} was given keys by no model that it belongs to, as those of cross-attention are. "
                "It holds the self-attention of a decoder: EncoderDecoderCache(SinkCache(…), DynamicCache())"
            )
        updated: tuple[Tensor, Tensor] = super().update(*args, **kwargs)
        return updated

    # --- what transformers asks of a cache -----------------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:
        """False: transformers must not compile a model for its sake; see :func:`~sinklab.streaming.static.compile_steps`.

        It is asked before the first forward, when :meth:`bind` is still in time; so does assisted decoding, which asks nothing
        else.
        """
        if self._table is None:
            self.bind(generating_model())
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Tokens seen, padding included; during a forward, those before it: a tensor, as static caches have it, if compiled.

        Learned tokens in front are counted by the model, during its forward, and by nobody else.
        """
        table = self.table
        return table.seq_length if table.step is not None else max(0, table.columns - self._front)

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """See :meth:`Table.mask_sizes`."""
        return self.table.mask_sizes(query_length if isinstance(query_length, int) else len(query_length))

    def reset(self) -> None:
        """Forget everything; buffers stay as long as the number of rows does."""
        self._unfinished, self._outputs = False, []
        if self._table is not None:
            with kept_tensors():
                self._table.clear()
        for layer in self.layers:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in another order, as beam search wants them."""
        with kept_tensors():
            self.table.take(beam_idx)
            for layer in self.layers:
                layer.take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch ``repeats`` times."""
        rows = max(self.batch_size, self.table.rows)
        self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, counted as transformers does: a negative number of them, or the length to keep.

        Raises:
            ConfigurationError: tokens that would be held again have been evicted, a padded batch, padding among what is taken
                back, or more than there is.
        """
        columns, count = max(0, self.table.columns - self._front), int(tokens_to_remove)  # some releases hand in a tensor
        keep = columns + count if count <= 0 else count
        if keep < 0:
            raise ConfigurationError(f"{-count} tokens cannot be taken back: the cache has been given {columns}")
        if keep < columns:
            with kept_tensors():
                self.table.crop(keep + self._front)
