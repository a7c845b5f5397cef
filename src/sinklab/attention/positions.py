"""Where a query or key stands: position inside its document, and which document of its row; padding is -1."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sinklab.attention.visibility import Dense, Visibility
from sinklab.errors import InputError

if TYPE_CHECKING:
    from sinklab.attention.forward import Forward
    from sinklab.attention.seam import MaskRecord


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """int64 ``(batch, length)`` each: 0-based position inside the document, running number of the document; -1 for padding."""

    positions: Tensor
    documents: Tensor

    @staticmethod
    def plain(batch: int, length: int, device: torch.device, start: int = 0) -> Positions:
        """One document a row, no padding; kept, since every layer asks for the same."""
        return _plain(batch, length, device, start, torch.is_inference_mode_enabled())

    @staticmethod
    def counted(tokens: Tensor, start: int, length: int, device: torch.device) -> Positions:
        """Of ``length`` tokens from index ``start`` on, counted from the first real token of each row.

        Args:
            tokens: boolean ``(batch, total)``, false for padding.
        """
        tokens = tokens.to(device)
        counted = torch.where(tokens, torch.cumsum(tokens, dim=1) - 1, -1)[:, start : start + length]
        # A static cache is longer than what has been written to it; what is not written yet is not a token.
        counted = nn.functional.pad(counted, (0, length - counted.shape[1]), value=-1)
        return Positions(counted, torch.where(counted >= 0, 0, -1))

    def without(self, tokens: Tensor) -> Positions:
        """The same with padding where ``tokens``, boolean ``(batch, length)``, is false."""
        return Positions(self.positions.masked_fill(~tokens, -1), self.documents.masked_fill(~tokens, -1))


@functools.lru_cache(maxsize=8)
def _plain(batch: int, length: int, device: torch.device, start: int, inference: bool) -> Positions:
    row = torch.arange(start, start + length, device=device)
    return Positions(row.expand(batch, length), torch.zeros(1, 1, dtype=torch.int64, device=device).expand(batch, length))


def read_positions(
    record: MaskRecord | None,
    visible: Visibility,
    forward: Forward,
    shape: tuple[int, int, int],
    *,
    cross: bool,
    position_ids: Tensor | None,
    device: torch.device,
) -> tuple[Positions, Positions]:
    """Positions of the queries and of the keys of one call.

    Args:
        record: what the host said about the mask; offsets of cached and sliding keys are known only from there.
        forward: that the call is part of, for calls whose mask the host did not build. Documents that a mask of four dimensions
            from its caller keeps apart are documents, whatever the position ids. (Masks that a model makes of itself hold other
            things apart: the windows of Swin.)
        shape: samples, queries and keys.
        cross: cross-attention; the host's padding then speaks of the keys alone.
        position_ids: of the model's call; a restart of the count begins a new document if the mask agrees.

    Raises:
        InputError: documents of one row that share keys, such as learned tokens in front of the row.
    """
    batch, q_len, kv_len = shape
    token_masks, cached = forward.token_masks, forward.cached
    if record is not None:
        q_offset = record.q_offset
    elif cross:
        q_offset = 0
    else:  # a cache made beforehand is longer than what has been written to it, one with a window shorter
        q_offset = max(kv_len - q_len, 0) if cached is None else min(cached, max(kv_len - q_len, 0))
    kv_offset = record.kv_offset if record is not None else 0
    padding = record.padding if record is not None and record.padding is not None else None
    if padding is not None and padding.shape[0] != batch:
        padding = None  # the batch was unfolded (beams, windows); the mask itself still hides the padding
    if cross:
        keys = padding if padding is not None else _fitting(token_masks, batch, kv_len)
        decoded = forward.decoded(q_len)
        return (
            _count(_fitting(token_masks, batch, decoded + q_len), batch, decoded, q_len, device),
            _count(keys, batch, 0, kv_len, device),
        )
    if padding is None and record is None:
        padding = _fitting(token_masks, batch, kv_len)
    whole = padding is None and q_len == kv_len > 1 and q_offset == 0
    if whole and record is None and isinstance(visible, Dense):
        padding = _seen(visible.mask, batch, alone=forward.masked_by_caller)
        if forward.masked_by_caller:
            packed = _kept_apart(visible.mask, batch, padding)
            if packed is not None:
                return packed, packed
            position_ids = None  # branches behind one prefix count from where it ends, and see it: one document
    if whole and position_ids is not None:
        packed = _documents(position_ids, visible, batch, q_len, padding, device)
        if packed is not None:
            return (packed, packed) if padding is None else (packed.without(padding), packed.without(padding))
    of_keys = _count(padding, batch, kv_offset, kv_len, device)
    written = q_offset + q_len - kv_offset
    if padding is None and written < kv_len and visible.state(0, q_len, written, kv_len) == "none":
        # The empty slots of a static cache; where the host is given padding, it ends before them.
        of_keys = of_keys.without((torch.arange(kv_len, device=device) < written).expand(batch, -1))
    return _count(padding, batch, q_offset, q_len, device), of_keys


def _count(tokens: Tensor | None, batch: int, start: int, length: int, device: torch.device) -> Positions:
    if tokens is None:
        return Positions.plain(batch, length, device, start)
    return Positions.counted(tokens, start, length, device)


def _seen(mask: Tensor, batch: int, *, alone: bool) -> Tensor | None:
    """Keys that some query sees, boolean ``(batch, kv_len)``; ``None`` where all are."""
    pairs = mask.any(dim=1)
    seen = pairs.any(dim=1)
    if alone and pairs.shape[1] > 1:
        others = pairs & ~torch.eye(pairs.shape[1], dtype=torch.bool, device=pairs.device)
        linked = others.any(dim=1) | others.any(dim=2)
        seen = torch.where(linked.any(dim=1, keepdim=True), seen & linked, seen) & ~_filled(pairs)
    return None if bool(seen.all()) else seen.expand(batch, -1)


def _filled(pairs: Tensor) -> Tensor:
    """Tokens in front that see everything and that only such see, boolean ``(batch or 1, length)``."""
    front = pairs.all(dim=2).long().cumprod(dim=1).bool()
    behind = pairs & ~front[:, :, None]
    causal = ~behind.triu(1).flatten(1).any(dim=1, keepdim=True)
    unseen = ~(behind.any(dim=1) & front).any(dim=1, keepdim=True)
    return front & causal & unseen & ~front.all(dim=1, keepdim=True)


def _fitting(masks: list[Tensor], batch: int, length: int) -> Tensor | None:
    return next((mask for mask in reversed(masks) if tuple(mask.shape) == (batch, length)), None)


def _documents(
    position_ids: Tensor, visible: Visibility, batch: int, length: int, tokens: Tensor | None, device: torch.device
) -> Positions | None:
    if position_ids.ndim != 2 or position_ids.shape[1] != length:
        return None
    restarts = (position_ids[:, 1:] != position_ids[:, :-1] + 1).to(device)
    if not bool(restarts.any()):
        return None
    # The count alone does not hide anything: only where the query really cannot see its predecessor does a document begin.
    starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
    starts[:, 0] = True
    for query in (restarts.any(0).nonzero()[:, 0] + 1).tolist():
        before = visible.block(query, query + 1, 0, query)[:, 0, 0]
        begins = restarts[:, query - 1] & ~before[:, -1]
        # A key of all documents has no document and no position of one: what each gave it cannot be told apart in its column.
        shares = begins & before.any(dim=1)
        if bool(shares.any() if tokens is None else (shares & tokens[:, query].to(device)).any()):
            raise InputError(
                f"a row holds several documents, and the one that begins at index {query} sees earlier keys but not the "
                "document before it, as learned tokens in front of a row are seen by all: what each document gives to such a "
                "key cannot be told apart. Give every document a row of its own"
            )
        starts[:, query] = begins
    index = torch.arange(length, device=device).expand(batch, length)
    first = torch.where(starts, index, 0).cummax(dim=1).values
    return Positions(index - first, torch.cumsum(starts, dim=1) - 1)


def _kept_apart(mask: Tensor, batch: int, tokens: Tensor | None) -> Positions | None:
    """Positions in documents that no query looks out of or into; ``None`` where every row is one document."""
    seen = mask.any(dim=1).expand(batch, -1, -1)
    length = seen.shape[-1]
    index = torch.arange(length, device=seen.device)
    tokens = torch.ones(batch, length, dtype=torch.bool, device=seen.device) if tokens is None else tokens
    linked = (seen | seen.mT) & tokens[:, :, None] & tokens[:, None]
    # The first token that each one is linked with, itself at the latest; a document begins where none behind reaches before.
    first = torch.where(linked.any(-1), linked.byte().argmax(-1), index).minimum(index)
    reached = first.flip(-1).cummin(-1).values.flip(-1)
    starts = (reached == index) & tokens
    if not bool((starts.sum(1) > 1).any()):
        return None
    before = torch.cumsum(tokens, dim=1) - tokens.long()
    positions = before - torch.where(starts, before, 0).cummax(dim=1).values
    return Positions(positions, torch.cumsum(starts, dim=1) - 1).without(tokens)


def by_position(values: Tensor, positions: Tensor) -> Tensor:
    """Sum over batch rows and documents of what sits at the same position.

    Args:
        values: ``(batch, heads, length)``.
        positions: int64 ``(batch, length)``; -1 marks padding, which is left out whatever its value.

    Returns:
        float64 ``(heads, last position + 1)``, on the CPU.
    """
    positions = positions.cpu()
    # To the CPU first: some devices have no float64.
    values = values.detach().cpu().double().masked_fill(positions[:, None] < 0, 0.0)
    size = int(positions.max()) + 1 if positions.numel() else 0
    sums = values.new_zeros(values.shape[1], max(size, 0))
    if size > 0:
        sums.index_add_(1, positions.clamp(min=0).flatten(), values.transpose(0, 1).flatten(1))
    return sums
