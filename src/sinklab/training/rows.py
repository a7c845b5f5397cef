"""Rows of text as a model reads them, and losses over them under a window."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import on_seam_modules
from sinklab.errors import UnsupportedModelError
from sinklab.models.losses import cross_entropies
from sinklab.training.tokenizer import TokenStream

KEPT, DRAWN = 0, 1
"""What a draw is for; keeps the draws of one seed apart."""


def kept_rows(total: int, fraction: float, seed: int) -> np.ndarray:
    """Numbers of a share of the rows, int64, ascending: the first ones of a permutation, so that a smaller share of the same
    seed is part of a larger one."""
    if fraction == 1.0:
        return np.arange(total, dtype=np.int64)
    order = np.random.default_rng((seed, KEPT)).permutation(total)
    return np.sort(order[: round(total * fraction)])


class RandomPositions(NamedTuple):
    """Positions ``start`` to ``stop - 1`` hold tokens drawn uniformly from ``ids`` (Gu et al. 2024, arXiv 2410.10781, 4).

    A draw depends on the seed and on the row's number in the stream: a row is the same in every epoch and in every subset.
    """

    start: int
    stop: int
    ids: np.ndarray
    seed: int

    def draw(self, number: int) -> np.ndarray:
        """The tokens of one row, ``(stop - start,)``."""
        generator = np.random.default_rng((self.seed, DRAWN, number))
        return self.ids[generator.integers(len(self.ids), size=self.stop - self.start)]


class RowDataset(Dataset):
    """Rows cut from a stream of documents, map-style.

    Row ``i`` is ``{"input_ids", "labels"}``, int64 ``(context,)``; labels are the ids themselves, for a model that shifts them.

    Args:
        stream: the documents.
        numbers: which of the stream's rows, int64 ``(rows,)``; row ``n`` begins at token ``n × content``.
        context: tokens of a row.
        bos: id in front of every row, which then holds ``content = context - 1`` tokens of the stream; or ``None``.
        random: positions that hold random tokens.
        fixed: position and id of a token that every row holds.
    """

    def __init__(
        self,
        stream: TokenStream,
        numbers: np.ndarray,
        *,
        context: int,
        bos: int | None = None,
        random: RandomPositions | None = None,
        fixed: tuple[int, int] | None = None,
    ) -> None:
        self.stream, self.numbers, self.context, self.bos = stream, numbers, context, bos
        self.random, self.fixed = random, fixed
        self.content = context - (bos is not None)
        self._tokens = stream.tokens()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = int(self.numbers[index])
        begin = number * self.content
        row = self._tokens[begin : begin + self.content].astype(np.int64)
        if self.bos is not None:
            row = np.concatenate(([self.bos], row))
        if self.random is not None:
            row[self.random.start : self.random.stop] = self.random.draw(number)
        if self.fixed is not None:
            position, token = self.fixed
            row[position] = token
        return {"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row.copy())}

    def __getstate__(self) -> dict[str, object]:
        # A memory map would be pickled with all that it maps.
        return {name: value for name, value in vars(self).items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._tokens = self.stream.tokens()


@contextlib.contextmanager
def limited_attention(model: nn.Module, window: int, kept: Sequence[int] = ()) -> Iterator[None]:
    """Hide from every query all keys but the last ``window`` (its own included) and those at positions ``kept``.

    Holds for self-attention over whole sequences, in all layers, in addition to the model's own mask: what the model hides by
    itself stays hidden, kept positions outside a window of its own included.

    Raises:
        UnsupportedModelError: inside the block, a call with a cache, or one whose kernel takes no 4-D mask (flash, flex).
    """
    with seam.shadow(_Limit(model, window, kept)):
        yield


class _Limit(seam.Observer):
    """Narrows the mask of every call before the model's own function gets it."""

    def __init__(self, model: nn.Module, window: int, kept: Sequence[int]) -> None:
        self._owned = {id(module) for module in on_seam_modules(model).values()}
        self._window, self._kept = window, list(kept)

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self._owned

    def on_attention(
        self, native: seam.Native, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object = None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:  # fmt: skip
        name = getattr(native, "__name__", type(native).__name__)
        if query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(
                f"{query.shape[2]} queries and {key.shape[2]} keys; a window is laid over self-attention without a cache only"
            )
        visible = self._visible(query.shape[2], query.device)
        if isinstance(mask, Tensor) and mask.ndim == 4:
            mask = mask & visible if mask.dtype == torch.bool else torch.where(visible, mask, torch.finfo(mask.dtype).min)
        elif mask is None and ("sdpa" in name or name.startswith("sinklab_")):
            # No mask means "the module says whether it is causal" to these two.
            mask = visible.tril() if getattr(module, "is_causal", True) else visible
        else:
            raise UnsupportedModelError(
                f'{type(module).__name__} runs {name}, which takes no 4-D mask; load the model with attn_implementation="sdpa"'
            )
        return native(module, query, key, value, mask, **kwargs)

    def _visible(self, length: int, device: torch.device) -> Tensor:
        positions = torch.arange(length, device=device)
        visible = positions[:, None] - positions < self._window
        visible[:, [position for position in self._kept if position < length]] = True
        return visible[None, None]


def token_losses(model: PreTrainedModel, rows: Tensor, after: int = 0) -> Tensor:
    """Next-token loss in nats of every token behind position ``after``, ``(rows, seq_len - 1 - after)``, float32.

    Args:
        rows: int64 ``(rows, seq_len)``, on the model's device.
    """
    wanted = rows.shape[1] - after
    fewer = {"logits_to_keep": wanted} if after and "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(input_ids=rows, use_cache=False, **fewer).logits[:, -wanted:]
    # The last logits predict nothing; to take their loss of some token and drop it costs less than to copy all the others.
    return cross_entropies(logits, rows[:, after:].roll(-1, dims=1))[:, :-1]


def windowed_losses(model: PreTrainedModel, rows: Tensor, window: int, sinks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Losses of the tokens beyond the window with the sinks kept and with them hidden, ``(rows, seq_len - 1 - window)`` each.

    These are the tokens that are predicted from a position of at least ``window``, for which the first token of the row lies
    outside.
    """
    losses = []
    for visible_sinks in (sinks, ()):
        with limited_attention(model, window, visible_sinks):
            losses.append(token_losses(model, rows, after=window))
    return losses[0], losses[1]
