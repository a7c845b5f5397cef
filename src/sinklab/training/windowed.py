"""Windowed losses: what predicting beyond a window costs when the sinks are hidden, against when they are kept.

                  window=3        window=3, sink 0 kept
    0  ■ ⬚ ⬚ ⬚ ⬚ ⬚      ■ ⬚ ⬚ ⬚ ⬚ ⬚
    1  ■ ■ ⬚ ⬚ ⬚ ⬚      ■ ■ ⬚ ⬚ ⬚ ⬚
    2  ■ ■ ■ ⬚ ⬚ ⬚      ■ ■ ■ ⬚ ⬚ ⬚
    3  ⬚ ■ ■ ■ ⬚ ⬚      ■ ■ ■ ■ ⬚ ⬚
    4  ⬚ ⬚ ■ ■ ■ ⬚      ■ ⬚ ■ ■ ■ ⬚
    5  ⬚ ⬚ ⬚ ■ ■ ■      ■ ⬚ ⬚ ■ ■ ■

A sink rate says where attention goes; this says whether the model needs it (Xiao et al. 2023, arXiv 2309.17453, measure the
same at inference). The two part early in training: the loss may depend on a sink that few heads have.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import on_seam_modules
from sinklab.errors import UnsupportedModelError
from sinklab.models.losses import cross_entropies
from sinklab.training.rows import TextRows

__all__ = ["limited_attention", "token_losses", "windowed_losses"]


@contextlib.contextmanager
def limited_attention(
    model: nn.Module, window: int, kept: Sequence[int] = (), position_ids: Tensor | None = None
) -> Iterator[None]:
    """Hide from every query all keys but the last ``window`` (its own included) and those at positions ``kept``.

    Args:
        position_ids: ``(rows, seq_len)`` of the rows that are read, where positions are those in a document and not in a row.

    Holds for self-attention over whole sequences, in all layers, in addition to the model's own mask: what the model hides by
    itself stays hidden, kept positions outside a window of its own included.

    Raises:
        UnsupportedModelError: inside the block, a call with a cache, or one whose kernel takes no 4-D mask (flash, flex).
    """
    with seam.shadow(_Limit(model, window, kept, position_ids)):
        yield


class _Limit(seam.Observer):
    """Narrows the mask of every call before the model's own function gets it."""

    def __init__(self, model: nn.Module, window: int, positions: Sequence[int], position_ids: Tensor | None = None) -> None:
        self._owned = {id(module) for module in on_seam_modules(model).values()}
        self._window, self._kept, self._position_ids = window, list(positions), position_ids

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self._owned

    def on_attention(
        self,
        native: seam.Native,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object = None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:
        name = getattr(native, "__name__", type(native).__name__)
        if query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(
                f"{type(module).__name__} has {query.shape[2]} queries and {key.shape[2]} keys; a window is laid over "
                "self-attention without a cache only"
            )
        visible = self._visible(query.shape[2], query.device)
        if isinstance(mask, Tensor) and mask.ndim == 4:
            mask = mask & visible if mask.dtype == torch.bool else torch.where(visible, mask, torch.finfo(mask.dtype).min)
        elif mask is None and ("sdpa" in name or name.startswith("sinklab_")):
            # No mask means "the module says whether it is causal" to these two.
            mask = visible.tril() if getattr(module, "is_causal", True) else visible
        else:
            raise UnsupportedModelError(
                f"{type(module).__name__} runs {name}, which takes no 4-D mask; load the model with "
                'attn_implementation="sdpa" or "eager" to lay a window over it'
            )
        return native(module, query, key, value, mask, **kwargs)

    def _visible(self, length: int, device: torch.device) -> Tensor:
        positions = torch.arange(length, device=device)
        visible = positions[:, None] - positions < self._window
        if self._position_ids is None:
            visible[:, [position for position in self._kept if position < length]] = True
            return visible[None, None]
        # Learned tokens in front have positions of their own, which those of the tokens come behind.
        front = length - self._position_ids.shape[1]
        of_keys = nn.functional.pad(self._position_ids.to(device) + front, (front, 0))
        of_keys[:, :front] = positions[:front]
        kept = torch.isin(of_keys, torch.tensor(self._kept, dtype=torch.int64, device=device))
        return (visible | kept[:, None])[:, None]


def token_losses(model: PreTrainedModel, rows: Tensor | TextRows, after: int = 0) -> Tensor:
    """Next-token loss in nats of every token behind position ``after``, ``(rows, seq_len - 1 - after)``, float32.

    Of rows in documents :meth:`TextRows.scored` says which of them count.

    Args:
        rows: int64 ``(rows, seq_len)``, or with the documents in them, on the model's device.
    """
    rows = TextRows.of(rows)
    wanted = rows.ids.shape[1] - after
    fewer = {"logits_to_keep": wanted} if after and "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(**rows.inputs, use_cache=False, **fewer).logits[:, -wanted:]
    # The last logits predict nothing; to take their loss of some token and drop it costs less than to copy all the others.
    targets = rows.ids[:, after:].roll(-1, dims=1)
    return cross_entropies(logits, targets)[:, :-1]


def windowed_losses(
    model: PreTrainedModel, rows: Tensor | TextRows, window: int, sinks: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Losses of the tokens beyond the window with the sinks kept and with them hidden, ``(rows, seq_len - 1 - window)`` each.

    These are the tokens that are predicted from a position of at least ``window``, for which the first token of the row lies
    outside. Of rows in documents, ``(tokens,)`` each: those for which the first token of their document does.
    """
    losses, rows = [], TextRows.of(rows)
    for visible_sinks in (sinks, ()):
        with limited_attention(model, window, visible_sinks, rows.position_ids):
            losses.append(rows.scored(token_losses(model, rows, after=window), after=window))
    return losses[0], losses[1]
