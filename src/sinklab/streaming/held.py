"""Held layer: what the layers of all bounded caches share, and what transformers asks of each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from sinklab.streaming.cache import PolicyCache

__all__ = ["HeldLayer"]


class HeldLayer(CacheLayerMixin):
    """One layer of a :class:`~sinklab.streaming.cache.PolicyCache`, whose books say what is where.

    Attributes:
        buffers: names of the tensors that last from step to step; rows of the batch first, allocated at the first call.
        cache: the cache that the layer belongs to.
    """

    is_sliding = False
    buffers: ClassVar[tuple[str, ...]] = ("keys", "values")

    def __init__(self, cache: PolicyCache) -> None:
        super().__init__()
        self.cache = cache

    @property
    def batch_size(self) -> int:
        """Rows of the buffers; -1 before the first call."""
        return len(getattr(self, self.buffers[0])) if self.is_initialized else -1

    def bytes_held(self) -> int:
        """Bytes of the buffers, as allocated."""
        return sum(getattr(self, name).nbytes for name in self.buffers) if self.is_initialized else 0

    def restore(self, buffers: dict[str, Tensor]) -> None:
        """Take over what another layer of this kind held, by the names in :attr:`buffers`."""
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
        return self.cache.mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """What the cache says: tokens seen, padding included, and not the tokens held."""
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        """-1: there is no end."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Nothing: what the books do not list is not visible."""
