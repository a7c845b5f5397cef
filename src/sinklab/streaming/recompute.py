"""Recompute reader: a model that reads every token at the end of a window of its own, many windows at a time."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sinklab.attention.forward_arguments import cache_argument
from sinklab.attention.placement import input_device
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.lengths import learned_positions
from sinklab.policies.recompute import Recompute
from sinklab.streaming.base import Reader, forget_media
from sinklab.streaming.limits import warn_of_length

__all__ = ["RecomputeReader"]

_TOKENS = 8192
"""Tokens of one forward at most, unless one window has more: the memory that is needed does not depend on the text."""


class RecomputeReader(Reader):
    """Reads under :class:`~sinklab.policies.recompute.Recompute`.

    Between calls it keeps the last ``window`` token ids, and while a block of several tokens is under way the keys and values
    of its window. Logits that nobody asks for (``keep``) are not computed, nor the windows that only they need.

    Once a row has padding, rows are read one after the other; logits of padding are 0.

    Raises:
        ConfigurationError: a window that is longer than the model's table of positions.
        UnsupportedModelError: an encoder-decoder.
    """

    policy: Recompute

    def __init__(self, model: PreTrainedModel, policy: Recompute) -> None:
        super().__init__(model, policy)
        name, size = type(model).__name__, policy.window + 1
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(f"{name} is an encoder-decoder; its decoder does not read a text by itself")
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
        self._cache: DynamicCache | None = None
        self._rows: list[RecomputeReader] = []

    @property
    def position(self) -> int:
        return self._columns

    def bytes_held(self) -> int:
        """Bytes of token ids, keys and values that are kept between calls; during one a window or more is encoded besides."""
        held = [] if self._ids is None else [self._ids]
        layers = [] if self._cache is None else self._cache.layers
        held += [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
        return sum(tensor.nbytes for tensor in held) + sum(row.bytes_held() for row in self._rows)

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
        tokens = tokens.to(self.model.device)
        ids = tokens if self._ids is None else torch.cat((self._ids, tokens), dim=1)
        self._ids, self._cache = ids[:, -self.policy.window :].clone(), None  # the cache would lack these tokens
        self._columns += tokens.shape[1]
        self._read += tokens.shape[1]

    # --- rows that agree -----------------------------------------------------------------------------------------------------

    def _read_alike(self, tokens: Tensor, keep: int) -> Tensor:
        policy, length = self.policy, tokens.shape[1]
        ids = tokens if self._ids is None else torch.cat((self._ids, tokens), dim=1)
        offset = self._read - (ids.shape[1] - length)  # index of the token in the first column of ids
        requested = self._read + length - keep  # index of the first token whose logits the caller wants
        end, parts = self._read + length, []
        while self._read < end:
            first, block = policy.first(self._read), self._block_end()
            whole = (end - self._read) // policy.every
            if first > 0 and self._read % policy.every == 0 and whole:
                stop = self._read + whole * policy.every
                skip = max(0, min(requested, stop) - self._read) // policy.every * policy.every
                self._read += skip
                if self._read < stop:
                    windows = ids[:, policy.first(self._read) - offset : stop - offset]
                    parts.append(self._windows(windows))
            else:
                stop = min(block, end)
                if stop <= requested:
                    self._cache = None  # it would lack these tokens
                else:
                    parts.append(self._go_on(ids[:, first - offset : stop - offset], stop - self._read, stop < block))
            self._read = stop
        self._ids = ids[:, -policy.window :].clone()
        return torch.cat(parts, dim=1)[:, -keep:]

    def _block_end(self) -> int:
        """Index behind the last token that shares the window of the next one; the first window is shared by all that fit."""
        policy = self.policy
        if policy.first(self._read):
            return (self._read // policy.every + 1) * policy.every
        return (policy.window + 1) // policy.every * policy.every

    def _windows(self, ids: Tensor) -> Tensor:
        """Logits of the last ``every`` tokens of every window in ``ids``; ``(batch, windows · every, vocab_size)``."""
        size, every = self.policy.window + 1, self.policy.every
        windows = ids.unfold(1, size, every).flatten(0, 1)
        parts = [self._logits(part, every) for part in windows.split(max(1, _TOKENS // size))]
        return torch.cat(parts).unflatten(0, (len(ids), -1)).flatten(1, 2)

    def _go_on(self, window: Tensor, new: int, more: bool) -> Tensor:
        """Logits of the ``new`` last tokens of a window; ``more`` of the same window come in a later call."""
        if more or self._cache is not None:
            if self._cache is None:
                self._cache = DynamicCache(config=self.model.config)
                forget_media(self.model)
            else:
                window = window[:, -new:]
            logits = self._logits(window, new, **cache_argument(self.model, self._cache), use_cache=True)
        else:
            logits = self._logits(window, new)
        if not more:
            self._cache = None
        return logits

    def _logits(self, ids: Tensor, last: int, **arguments: object) -> Tensor:
        if self._keeps:
            arguments["logits_to_keep"] = last
        logits: Tensor = self.model(input_ids=ids, **{"use_cache": False, **arguments}).logits
        return logits[:, -last:]

    # --- rows that do not ----------------------------------------------------------------------------------------------------

    def _read_rows(self, tokens: Tensor, valid: Tensor, keep: int) -> Tensor:
        if not self._rows:
            for row in range(len(tokens)):
                reader = RecomputeReader(self.model, self.policy)
                reader._read, reader._ids = self._read, None if self._ids is None else self._ids[row : row + 1]
                self._rows.append(reader)
            self._ids = self._cache = None
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
