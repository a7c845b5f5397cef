"""Reader: a model that reads a text under a policy, as much at a time as one likes; streams, losses and scores rest on it."""

from __future__ import annotations

import abc
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from sinklab.registry import policies
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.policy import Policy
from sinklab.streaming.telemetry import Telemetry, reader_telemetry

__all__ = ["CacheReader", "Reader", "open_reader"]


class Reader(abc.ABC):
    """A model, a policy, and what has been read so far.

    Attributes:
        model: in the mode (training or not) in which it was given.
        policy: what a token may see of those before it.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy) -> None:
        self.model, self.policy = model, policy

    @abc.abstractmethod
    def read(self, tokens: Tensor, attention_mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
        """Logits for the token behind each of these, ``(batch, length or keep, vocab_size)``; no gradient.

        Args:
            tokens: int64 ``(batch, length)``; they go on where the last call ended; how a text is divided among calls does not
                matter.
            attention_mask: ``(batch, length)``, 1 for tokens and 0 for padding; of these tokens only.
            keep: logits of the last so many tokens; 0 for all.
        """

    @property
    @abc.abstractmethod
    def position(self) -> int:
        """Columns read so far, padding included."""

    @abc.abstractmethod
    def bytes_held(self) -> int:
        """Bytes of the keys and values that are kept between calls."""

    def telemetry(self) -> Telemetry:
        """What is held, and what has gone, in figures."""
        return reader_telemetry(self)

    @abc.abstractmethod
    def reset(self) -> None:
        """Begin a new text."""


class CacheReader(Reader):
    """Reads with a key-value cache.

    Attributes:
        cache: any transformers cache that follows the policy; it may have read something.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy, cache: Cache) -> None:
        super().__init__(model, policy)
        self.cache = cache
        self._known = frozenset(inspect.signature(model.forward).parameters)
        self._columns = cache.get_seq_length()
        # A cache of ours sees all it needs in the mask of the new tokens; others want that of all columns if there is padding.
        self._mask: Tensor | None = None

    @torch.no_grad()
    def read(self, tokens: Tensor, attention_mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
        tokens = tokens.to(self.model.device)
        more: dict[str, Any] = {"logits_to_keep": keep} if "logits_to_keep" in self._known else {}
        if not isinstance(self.cache, PolicyCache):
            attention_mask = self._mask_of_all(tokens, attention_mask)
            if attention_mask is not None and "position_ids" in self._known:
                more["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits: Tensor = self.model(
            input_ids=tokens, attention_mask=attention_mask, past_key_values=self.cache, use_cache=True, **more
        ).logits
        self._columns += tokens.shape[1]
        return logits[:, -keep:] if keep else logits

    def _mask_of_all(self, tokens: Tensor, new: Tensor | None) -> Tensor | None:
        """Mask of all columns, ``new`` being that of these tokens; ``None`` as long as there is no padding."""
        if self._mask is None and (new is None or bool(new.all())):
            return None
        before = tokens.new_ones(len(tokens), self._columns) if self._mask is None else self._mask
        self._mask = torch.cat((before, torch.ones_like(tokens) if new is None else new.to(before)), dim=1)
        return self._mask

    @property
    def position(self) -> int:
        return self._columns

    def telemetry(self) -> Telemetry:
        return self.cache.telemetry() if isinstance(self.cache, PolicyCache) else super().telemetry()

    def bytes_held(self) -> int:
        if isinstance(self.cache, PolicyCache):
            return self.cache.bytes_held()
        tensors = (getattr(layer, name, None) for layer in self.cache.layers for name in ("keys", "values"))
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

    def reset(self) -> None:
        if isinstance(self.cache, PolicyCache):
            self.cache.reset()
        else:
            self.cache = DynamicCache(config=self.model.config)
            self._mask = None
        self._columns = 0


def open_reader(model: PreTrainedModel, policy: Policy | str | dict[str, Any], *, chunk: int = 128) -> Reader:
    """A reader of ``model`` under a policy: an object, or what :meth:`~sinklab.registry.Registry.make` takes.

    Args:
        chunk: most tokens that a cache takes at once; the result does not depend on it.

    Raises:
        UnknownNameError, ConfigurationError: no such policy, or a setting it refuses.
        UnsupportedModelError: it cannot be had with this model; see :class:`~sinklab.streaming.cache.PolicyCache`.
    """
    made: Policy = policies.make(policy)
    return made.reader(model, chunk=chunk)
