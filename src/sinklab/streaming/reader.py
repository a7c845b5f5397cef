"""Open reader: from a policy to what reads a model under it; most policies read with a key-value cache."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from sinklab.attention.forward_arguments import cache_argument
from sinklab.attention.placement import input_device
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.lengths import learned_positions
from sinklab.models.losses import is_causal_lm
from sinklab.policies.base import Policy, PolicySpec, ScoredPolicy, SlotPolicy
from sinklab.policies.full import Full
from sinklab.policies.per_head import PerHead
from sinklab.policies.recompute import Recompute
from sinklab.registry import policies
from sinklab.streaming.base import Reader, forget_media
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.per_head import PerHeadCache, verify_groups
from sinklab.streaming.recompute import RecomputeReader
from sinklab.streaming.recurrent import continues_in_chunks, has_states, states_of
from sinklab.streaming.refusals import inside, require_integers
from sinklab.streaming.scored import ScoredCache
from sinklab.streaming.telemetry import Telemetry
from sinklab.streaming.verify import verify_model

__all__ = ["CacheReader", "open_reader", "reader_of"]


class CacheReader(Reader):
    """Reads with a key-value cache.

    Attributes:
        cache: any transformers cache that follows the policy; it may have read something.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy, cache: Cache) -> None:
        super().__init__(model, policy)
        self.cache = cache
        self._parameters = frozenset(inspect.signature(model.forward).parameters)
        self._columns: int = cache.get_seq_length()
        # A cache of ours sees all it needs in the mask of the new tokens; others want that of all columns if there is padding.
        self._mask: Tensor | None = None
        self._end = None if isinstance(cache, PolicyCache) else learned_positions(model)
        self._forgets = not isinstance(cache, PolicyCache) and has_states(model) and not continues_in_chunks(model)

    @torch.no_grad()
    def read(self, tokens: Tensor, attention_mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
        tokens = tokens.to(input_device(self.model))
        if self._forgets and self._columns and (length := tokens.shape[1]) > 1:
            masks = [None] * length if attention_mask is None else attention_mask.split(1, dim=1)
            pieces = [self.read(token, mask) for token, mask in zip(tokens.split(1, dim=1), masks, strict=True)]
            return torch.cat(pieces, dim=1)[:, -keep:]
        if not self._columns:
            forget_media(self.model)
        more: dict[str, int | Tensor] = {"logits_to_keep": keep} if "logits_to_keep" in self._parameters else {}
        if not isinstance(self.cache, PolicyCache):
            attention_mask = self._mask_of_all(tokens, attention_mask)
            self._require_positions(tokens, attention_mask)
            if attention_mask is not None and "position_ids" in self._parameters:
                more["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits: Tensor = self.model(
            input_ids=tokens, attention_mask=attention_mask, **cache_argument(self.model, self.cache), use_cache=True, **more
        ).logits
        self._columns += tokens.shape[1]
        return logits[:, -keep:] if keep else logits

    def _require_positions(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Refuse to read past the end of a table of positions, where torch reports an index and a GPU is lost to the
        process."""
        read = self._columns + tokens.shape[1] if mask is None else int(mask.sum(dim=1).max())
        if self._end is not None and read > self._end:
            raise ConfigurationError(
                f"{type(self.model).__name__} has embeddings for {self._end:,} positions, and policy {self.policy.name!r} is "
                f"given token {read} of a text; the policy 'recompute' encodes a window anew and has no end"
            )

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
        states = (state for layer in self.cache.layers for state in states_of(layer).values())
        return sum(tensor.nbytes for tensor in (*tensors, *states) if isinstance(tensor, Tensor))

    def reset(self) -> None:
        if isinstance(self.cache, PolicyCache):
            self.cache.reset()
        else:
            self.cache = DynamicCache(config=self.model.config)
            self._mask = None
        self._columns = 0


def open_reader(model: PreTrainedModel, policy: PolicySpec, *, chunk: int = 128, quantized: str | None = None) -> Reader:
    """A reader of ``model`` under a policy: the object, its name, or ``{"name": …, setting: …}``.

    Args:
        chunk: most tokens that a cache takes at once; the result does not depend on it.
        quantized: ``"int8"`` or ``"int4"``: keep what is neither pinned nor new as integers, under a policy of slots.

    Raises:
        UnknownNameError, ConfigurationError: no such policy, a setting it refuses, or one that cannot be quantised.
        UnsupportedModelError: it cannot be had with this model; see :class:`~sinklab.streaming.cache.PolicyCache`.
    """
    model = inside(model)
    made = policies.make(policy)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder, whose decoder does not read a text by itself. A cache for it goes "
            "to generate(), as past_key_values=EncoderDecoderCache(SinkCache(…), DynamicCache())"
        )
    if not is_causal_lm(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} predicts no next token of its own text, under any policy; a stream is for decoders, with "
            "their head"
        )
    if quantized is None:
        return reader_of(made, model, chunk=chunk)
    require_integers(made)
    assert isinstance(made, SlotPolicy)
    return CacheReader(model, made, PolicyCache(made, model, chunk=chunk, quantized=quantized))


@functools.singledispatch
def reader_of(policy: Policy, model: PreTrainedModel, *, chunk: int) -> Reader:
    """The reader for a class of policies; one of another kind than these registers its own, ``@reader_of.register(Mine)``."""
    raise ConfigurationError(
        f"policy {policy.name!r} is neither a SlotPolicy nor a ScoredPolicy, and no reader is registered for it; see reader_of"
    )


@reader_of.register(SlotPolicy)
def _(policy: SlotPolicy, model: PreTrainedModel, *, chunk: int) -> Reader:
    verify_model(model)
    return CacheReader(model, policy, PolicyCache(policy, model, chunk=chunk))


@reader_of.register(ScoredPolicy)
def _(policy: ScoredPolicy, model: PreTrainedModel, *, chunk: int) -> Reader:
    return CacheReader(model, policy, ScoredCache(policy, model, chunk=chunk))


@reader_of.register(PerHead)
def _(policy: PerHead, model: PreTrainedModel, *, chunk: int) -> Reader:
    verify_model(model)
    verify_groups(model)
    return CacheReader(model, policy, PerHeadCache(policy, model, chunk=chunk))


@reader_of.register(Full)
def _(policy: Full, model: PreTrainedModel, *, chunk: int) -> Reader:
    return CacheReader(model, policy, DynamicCache(config=model.config))


@reader_of.register(Recompute)
def _(policy: Recompute, model: PreTrainedModel, *, chunk: int) -> Reader:
    return RecomputeReader(model, policy)
