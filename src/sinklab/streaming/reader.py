"""Readers: from a policy to what reads a model under it, with a key-value cache or a window of its own for every token."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from sinklab.attention.host_arguments import cache_argument
from sinklab.attention.modules import input_device
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.loading import GivenModel, model_alone
from sinklab.models.losses import is_causal_lm
from sinklab.models.positions import learned_positions
from sinklab.policies.base import Policy, PolicySpec, SlotPolicy
from sinklab.policies.full import Full
from sinklab.policies.recompute import Recompute
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies
from sinklab.streaming.base import Reader, Telemetry, forget_media
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.limits import inside, require_integers, warn_of_length
from sinklab.streaming.traits import continues_in_chunks, has_states, states_of, tokens_in_front, without_autocast

_AT_ONCE = 8192
"""Tokens of one forward at most, unless one window has more: the memory that is needed does not depend on the text."""


class RecomputeReader(Reader):
    """Reads under :class:`~sinklab.policies.recompute.Recompute`, with a window that fits into the model's table of positions.

    Between calls it keeps the last ``window`` token ids alone. Logits that nobody asks for are not computed, nor the windows
    that only they need. Once a row has padding, rows are read one after the other; logits of padding are 0.
    """

    policy: Recompute

    def __init__(self, model: PreTrainedModel, policy: Recompute) -> None:
        super().__init__(model, policy)
        name, size = type(model).__name__, policy.window + 1
        table = learned_positions(model)
        if table is not None and size > table:
            raise ConfigurationError(
                f"{name} has {table:,} learned positions and a window has {size:,} tokens; choose a smaller one"
            )
        warn_of_length(model, policy)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.reset()

    def reset(self) -> None:
        self._columns = self._read = 0
        self._ids: Tensor | None = None
        self._rows: list[RecomputeReader] = []

    @property
    def position(self) -> int:
        return self._columns

    def bytes_held(self) -> int:
        """Bytes of token ids that are kept between calls; during one a window or more is encoded besides."""
        return (0 if self._ids is None else self._ids.nbytes) + sum(row.bytes_held() for row in self._rows)

    @torch.no_grad()
    def read(self, tokens: Tensor, attention_mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
        tokens = tokens.to(input_device(self.model))
        length = tokens.shape[1]
        self._columns += length
        keep = min(keep or length, length)
        valid = None if attention_mask is None else attention_mask.to(tokens.device).bool()
        if self._rows or (valid is not None and not bool(valid.all())):
            return self._read_rows(tokens, torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid, keep)
        return self._read_alike(tokens, keep)

    def pass_over(self, tokens: Tensor) -> None:
        if self._rows:
            super().pass_over(tokens)
            return
        self._follow(tokens.to(self.model.device))
        self._columns += tokens.shape[1]

    def _follow(self, tokens: Tensor) -> Tensor:
        """Ids of these tokens behind those that are kept; the last window of them is kept from now on."""
        ids = tokens if self._ids is None else torch.cat((self._ids, tokens), dim=1)
        self._ids = ids[:, -self.policy.window :].clone()
        self._read += tokens.shape[1]
        return ids

    def _read_alike(self, tokens: Tensor, keep: int) -> Tensor:
        size, read, length = self.policy.window + 1, self._read, tokens.shape[1]
        ids, parts = self._follow(tokens), []
        first = max(0, min(length, size - read))  # so many of the tokens share the first window
        if first > length - keep:
            parts.append(self._logits(ids[:, : read + first], first))
        if whole := min(keep, length - first):
            parts.append(self._windows(ids[:, ids.shape[1] - whole - size + 1 :]))
        return torch.cat(parts, dim=1)[:, -keep:]

    def _windows(self, ids: Tensor) -> Tensor:
        """Logits of the last token of every window in ``ids``; ``(batch, windows, vocab_size)``."""
        size = self.policy.window + 1
        windows = ids.unfold(1, size, 1).flatten(0, 1)
        parts = [self._logits(part, 1) for part in windows.split(max(1, _AT_ONCE // size))]
        return torch.cat(parts).unflatten(0, (len(ids), -1)).flatten(1, 2)

    def _logits(self, ids: Tensor, last: int) -> Tensor:
        more = {"logits_to_keep": last} if self._keeps else {}
        logits: Tensor = self.model(input_ids=ids, use_cache=False, **more).logits
        return logits[:, -last:]

    def _read_rows(self, tokens: Tensor, valid: Tensor, keep: int) -> Tensor:
        if not self._rows:
            for row in range(len(tokens)):
                reader = RecomputeReader(self.model, self.policy)
                reader._read, reader._ids = self._read, None if self._ids is None else self._ids[row : row + 1]
                self._rows.append(reader)
            self._ids = None
        result: Tensor | None = None
        for row, reader in enumerate(self._rows):
            row_valid, row_kept = valid[row], valid[row, -keep:]
            if not bool(row_valid.any()):
                continue
            logits = reader.read(tokens[row : row + 1, row_valid], keep=max(1, int(row_kept.sum())))[0]
            if result is None:
                result = logits.new_zeros(len(tokens), keep, logits.shape[-1])
            if bool(row_kept.any()):
                result[row, row_kept] = logits
        if result is None:
            raise ConfigurationError("the attention mask hides all tokens that are given; there is nothing to read")
        return result


class CacheReader(Reader):
    """Reads with ``cache``, any transformers cache that follows the policy; it may have read something."""

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

    def take_over(self, ids: Tensor, held: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin behind tokens ``(batch, length)`` of which the policy has evicted none: keys at positions from 0 on, and
        values, ``(batch, num_kv_heads, length, head_dim)`` of each layer, are those of another cache."""
        cache, (rows, length) = self.cache, ids.shape
        planned = isinstance(cache, PolicyCache)
        if planned:
            for layer in cache.layers:
                layer.release()  # of another number of rows
            cache.table.apart = cache.table.watched = False  # no attention follows
            cache.table.step = cache.table.plan(length, None)
            cache.table.note(ids, rows)
        for number, layer in enumerate(held):
            cache.layers[number].update(*layer) if planned else cache.update(*layer, number)
        if planned:
            cache.table.finish()
        self._columns += length

    @property
    def forks(self) -> bool:
        """Whether rows of the cache may be taken again while a text is read, as for texts with a common beginning."""
        return not has_states(self.model)

    def _require_positions(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Refuse to read past the end of a table of positions, where a GPU would be lost to the process."""
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


def open_reader(
    model: GivenModel, policy: PolicySpec, *, chunk: int = 128, quantized: str | None = None, **loading: Any
) -> Reader:
    """A reader of ``model``, which ``loading`` is about if it is named, under a policy: the object, its name, or
    ``{"name": …, setting: …}``.

    ``chunk`` is the most tokens that a cache takes at once, on which the result does not depend; ``quantized`` as for
    :class:`~sinklab.streaming.cache.PolicyCache`, which says, too, which models cannot have a policy of slots.
    """
    model = inside(model_alone(model, **loading))
    made = policies.make(policy)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder, whose decoder does not read a text by itself"
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
    raise ConfigurationError(f"policy {policy.name!r} is no SlotPolicy, and no reader is registered for it; see reader_of")


@reader_of.register(SlotPolicy)
def _(policy: SlotPolicy, model: PreTrainedModel, *, chunk: int) -> Reader:
    verify_model(model)
    return CacheReader(model, policy, PolicyCache(policy, model, chunk=chunk))


@reader_of.register(Full)
def _(policy: Full, model: PreTrainedModel, *, chunk: int) -> Reader:
    return CacheReader(model, policy, DynamicCache(config=model.config))


@reader_of.register(Recompute)
def _(policy: Recompute, model: PreTrainedModel, *, chunk: int) -> Reader:
    return RecomputeReader(model, policy)


# --- a model proves itself --------------------------------------------------------------------------------------------------


_TOKENS, _WINDOW, _REBASE_AT = 12, 2, 8
"""Tokens that a model reads to prove itself, under which window, and where their positions are counted anew."""

_MARGIN = {torch.float64: 1e-3, torch.float32: 1e-2}
"""Largest distance of two logits, relative to their standard deviation. Rounding is below 1e-3 in float32 and below 0.2 in
bfloat16 for trained models; a mask that is not followed moves logits by a good part of the deviation."""

_verified: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@torch.no_grad()
def verify_model(model: PreTrainedModel) -> None:
    """Read a few tokens at once and one by one under a narrow policy: the logits must agree. Once for a model.

    A chunk needs the mask and the copies of the sinks that the cache makes, single tokens need neither; one reading counts its
    positions anew on the way. A model that ignores the mask or the positions gives other logits, without an error.
    """
    if model in _verified:
        return
    training = model.training
    model.eval()
    try:
        with without_autocast(model):
            chunk, single = _read_a_few(model, _TOKENS), _read_a_few(model, 1)
    finally:
        model.train(training)
    distance = float((chunk - single).abs().max() / single.std().clamp(min=1e-12))
    margin = _MARGIN.get(model.dtype, 0.5)
    if not distance <= margin:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not follow the masks of a bounded cache: {_TOKENS} tokens read at once and one by "
            f"one give logits that differ by {distance:.2g} standard deviations; at most {margin:g} is rounding"
        )
    _verified.add(model)


def _read_a_few(model: PreTrainedModel, chunk: int) -> Tensor:
    """Logits ``(tokens, vocab_size)`` of a few tokens, ``chunk`` at a time."""
    rebase_at = _REBASE_AT + tokens_in_front(model) if chunk == 1 else None
    cache = PolicyCache(SinkWindow(num_sinks=1, window=_WINDOW), model, chunk=chunk, rebase_at=rebase_at)
    tokens = (torch.arange(_TOKENS, device=input_device(model)) * 7 + 5).remainder(model.config.get_text_config().vocab_size)[
        None
    ]
    logits: Tensor = model(input_ids=tokens, **cache_argument(model, cache), use_cache=True).logits
    return logits[0].to(torch.promote_types(logits.dtype, torch.float32))
