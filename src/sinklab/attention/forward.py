"""One forward: what is learned of it, and reading a call that a module makes in it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sinklab.attention import host_arguments, seam
from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.folding import Hidden, hidden_keys
from sinklab.attention.operation import ATTRIBUTE, state_of
from sinklab.attention.positions import Positions
from sinklab.attention.visibility import Dense, Visibility
from sinklab.errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import Cache


@dataclasses.dataclass(eq=False)
class Forward:
    """The memory of a session for the length of one forward."""

    masks: list[seam.MaskRecord] = dataclasses.field(default_factory=list)  # what the host said when it built them
    # The same for masks built before the forward, which count only for calls that receive that very mask.
    early_masks: list[seam.MaskRecord] = dataclasses.field(default_factory=list)
    starts: Counter[str] = dataclasses.field(default_factory=Counter)  # of the forward of each attention module
    layer_runs: Counter[str] = dataclasses.field(default_factory=Counter)  # counted only where layers run several times
    called: set[str] = dataclasses.field(default_factory=set)  # attention modules whose call has been seen
    scored: tuple[Tensor, Tensor] | None = None  # queries and keys of the last call
    cross: set[str] = dataclasses.field(default_factory=set)  # those that were given keys from elsewhere
    residuals: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # what entered each layer, if a probe needs it
    embeddings: Tensor | None = None  # what entered the first layer, until the positions of its tokens are known
    positions: dict[int, Positions] = dataclasses.field(default_factory=dict)  # of self-attention calls, by length
    token_masks: list[Tensor] = dataclasses.field(default_factory=list)  # 2-D padding masks that the model was called with
    masked_by_caller: bool = False  # with a mask of four dimensions, or one for each kind of layer
    position_ids: Tensor | None = None  # that the model was called with
    cached: int | None = None  # tokens in the cache of the innermost model that has begun; None without a cache
    inner_cache: Cache | None = None  # that one
    token_ids: list[Tensor] = dataclasses.field(default_factory=list)  # 2-D, of every call; -1 for learned tokens in front
    front: int = 0  # learned tokens that the model puts in front of every text
    source_ids: Tensor | None = None  # 2-D, of the encoder of an encoder–decoder in this forward

    def source_tokens(self, key_positions: Tensor) -> Tensor | None:
        """Ids of the tokens of the keys of a cross-attention call, as :meth:`key_tokens`."""
        if self.source_ids is None or self.source_ids.shape != key_positions.shape:
            return None
        return self.source_ids.to(key_positions.device).masked_fill(key_positions < 0, -1)

    def record_of(self, mask: object, q_len: int, kv_len: int) -> seam.MaskRecord | None:
        """What the host said about the mask of a call: about that very mask, or else about the last one of its size, or else
        about one built before the forward that says the same."""
        fitting = [record for record in self.masks if (record.q_length, record.kv_length) == (q_len, kv_len)]
        same = [record for record in (*self.early_masks, *fitting) if record.mask is mask]
        chosen = same or fitting
        if not chosen and isinstance(mask, Tensor):
            # generate() hands on a contiguous copy of what it builds: another tensor, where all rows share one mask.
            chosen = [record for record in self.early_masks if isinstance(record.mask, Tensor) and _equal(record.mask, mask)]
            self.early_masks += [dataclasses.replace(record, mask=mask) for record in chosen[-1:]]  # the next layer's, too
        return chosen[-1] if chosen else None

    def record_of_tokens(self, mask: object, q_len: int, kv_len: int) -> seam.MaskRecord | None:
        """What the host said about the first columns of the mask of a call, behind which the model has put keys that stand for
        several tokens (compressed ones of DeepSeek V4); ``None`` where these columns are not that mask."""
        if not isinstance(mask, Tensor):
            return None
        shorter = [record for record in self.masks if record.q_length == q_len and record.kv_length < kv_len]
        same = (one for one in shorter if isinstance(one.mask, Tensor) and _equal(one.mask, mask[..., : one.kv_length]))
        return next(same, None)

    def key_tokens(self, key_positions: Tensor, q_len: int) -> Tensor | None:
        """Ids of the tokens of the keys of a self-attention call, int64 ``(batch, kv_len)``, -1 where there is none; ``None``
        where the model was not given ids for these queries, and behind a cache, whose tokens are not known.

        Args:
            key_positions: int64 ``(batch, kv_len)``, -1 for padding.
        """
        batch, kv_len = key_positions.shape
        ids = next((ids for ids in reversed(self.token_ids) if tuple(ids.shape) == (batch, q_len)), None)
        if ids is None or self.cached:
            return None
        # A static cache has keys that are not written yet.
        ids = nn.functional.pad(ids.to(key_positions.device), (0, kv_len - q_len), value=-1)
        return ids.masked_fill(key_positions < 0, -1)

    def counted(self, batch: int, length: int, device: torch.device) -> Positions:
        """Positions of the tokens that enter the first layer, before an attention call has given them: behind what is cached,
        and counted from the first token that is not padding."""
        cached = self.cached or 0
        for total in (length, cached + length):
            fitting = [mask for mask in self.token_masks if tuple(mask.shape) == (batch, total)]
            if fitting:
                return Positions.counted(fitting[-1], total - length, length, device)
        return Positions.plain(batch, length, device, cached)

    @property
    def goes_on_from(self) -> int:
        """How many tokens there were before those of this forward; 0 where it reads a cache that it does not write to, as the
        canvas of DiffusionGemma does, which is read anew at every step."""
        if not self.cached or self.inner_cache is None:
            return 0
        return self.cached if int(self.inner_cache.get_seq_length()) > self.cached else 0  # its first layer has been called

    def decoded(self, q_len: int) -> int:
        """How many tokens were cached before the present queries.

        The mask of cross-attention knows nothing of the decoder's cache; that of the self-attention before it does, or the
        cache itself, where that mask was built before the forward or by the caller.
        """
        return max((record.q_offset for record in self.masks if record.q_length == q_len), default=0) or self.goes_on_from


def _equal(mask: Tensor, other: Tensor) -> bool:
    same = (mask.shape, mask.dtype, mask.device) == (other.shape, other.dtype, other.device)
    return same and torch.equal(mask, other)


def read_positions(
    record: seam.MaskRecord | None, visible: Visibility, forward: Forward, shape: tuple[int, int, int], *, cross: bool,
    position_ids: Tensor | None, device: torch.device,
) -> tuple[Positions, Positions]:  # fmt: skip
    """Positions of the queries and of the keys of one call of ``shape`` samples, queries and keys.

    Offsets of cached and sliding keys are known only from what the host said about the mask (``record``); of cross-attention
    its padding speaks of the keys alone. A restart of ``position_ids`` begins a document if the mask agrees. Documents that a
    mask of four dimensions from the caller keeps apart are documents, whatever the position ids. (Masks that a model makes of
    itself hold other things apart: the windows of Swin.) Documents of one row that share keys are refused.
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


def describe_call(
    native: seam.Native, module: nn.Module, site: Site, tensors: tuple[Tensor, Tensor, Tensor, object, Tensor, Tensor | None],
    kwargs: host_arguments.Keywords, forward: Forward,
) -> AttentionCall:  # fmt: skip
    """The call that a module has just made, with nothing that only some probes need (``residual``, ``projection``).

    ``tensors`` are queries, keys, values and mask as the function received them, its head outputs ``(batch, q_len, num_heads,
    value_dim)``, and its log-sum-exp where the kernel gave one. Keys that are not there yet, or may have been dropped unseen,
    and masks that cannot be read are refused.
    """
    if kwargs.get("cache") is not None:
        raise UnsupportedModelError(
            f"{site.module}: a paged cache fills the keys inside the kernel; measure without continuous batching"
        )
    query, key, value, mask, outputs, log_sum_exp = tensors
    query, key, value, outputs = query.detach(), key.detach(), value.detach(), outputs.detach()
    batch, num_heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    implementation = getattr(native, "__name__", "")
    record = forward.record_of(mask, q_len, kv_len)
    tokens = forward.record_of_tokens(mask, q_len, kv_len) if record is None else None
    left_to_kernel = record is not None and record.mask is None
    visible, bias = host_arguments.read_mask(
        mask, kwargs, module, implementation, q_len, kv_len, query.device, left_to_kernel=left_to_kernel
    )
    decoded = forward.decoded(q_len)
    known_before = record.q_offset if record is not None else forward.goes_on_from
    held, window = kv_len - q_len, kwargs.get("sliding_window")
    if record is None and tokens is None and site.kind == "self" and window is not None and held >= max(window - 1, 1):
        # DiffusionGemma: a canvas behind a prompt, of which a sliding layer holds the end.
        raise UnsupportedModelError(
            f"{site.module} has {held:,} keys from before the call under a window of {window:,}, and the model built no mask "
            "that says which ones it has dropped, so that positions are not known; measure texts of fewer than "
            f"{window - 1:,} tokens in front"
        )
    given_ids = kwargs.get("position_ids")
    kept = kv_len if tokens is None else tokens.kv_length
    queries, keys = read_positions(
        record or tokens,
        visible,
        forward,
        (batch, q_len, kept),
        cross=site.kind == "cross",
        position_ids=forward.position_ids if given_ids is None else given_ids,
        device=query.device,
    )
    keys = keys.padded(kv_len - kept)
    scaling = kwargs.get("scaling")
    scaling = head_dim**-0.5 if scaling is None else float(scaling)
    operation = seam.operation_of(module, native)
    state = state_of(module, operation, kwargs.get("layer_input"))
    query, key = operation.features(query, key, state)
    own = getattr(module, ATTRIBUTE, None)
    if operation.folds and own is not None and own.shape.folded != ():
        visible = visible & Hidden(hidden_keys(key, own.shape), own.passing.sinks)
    sinks = host_arguments.read_sink_scores(kwargs)
    sinks = operation.null_scores(query, scaling, state) if sinks is None else sinks.to(query.device)
    if log_sum_exp is not None and tuple(log_sum_exp.shape) != (batch, num_heads, q_len):
        # The host folds the groups of a single query into the query axis; the numbers are the same.
        log_sum_exp = log_sum_exp.reshape(batch, num_heads, q_len) if log_sum_exp.numel() == batch * num_heads * q_len else None
    return AttentionCall(
        site=site,
        queries=query,
        keys=key,
        values=value,
        scaling=scaling,
        visible=visible,
        operation=operation,
        query_positions=queries.positions,
        key_positions=keys.positions,
        query_documents=queries.documents,
        key_documents=keys.documents,
        softcap=kwargs.get("softcap"),
        bias=None if bias is None else bias.detach(),
        sink_scores=sinks,
        null_value=operation.null_value(state),
        output_bias=operation.output_bias(state),
        gain=operation.gain(state),
        head_outputs=outputs.reshape(batch, q_len, num_heads, -1),
        log_sum_exp=log_sum_exp,
        key_tokens=(
            forward.source_tokens(keys.positions) if site.kind == "cross" else forward.key_tokens(keys.positions, q_len)
        ),
        front=forward.front if site.kind == "self" else 0,
        subtracted=_subtracted(module),
        cached_keys=known_before if site.kind == "self" else kv_len if decoded else 0,
    )


def _subtracted(module: nn.Module) -> float | None:
    """λ of differential attention from its learned vectors (Ye et al. 2024, arXiv 2410.05258); ``None`` of another module."""
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_init")
    if not all(hasattr(module, name) for name in names):
        return None
    *vectors, start = (getattr(module, name) for name in names)
    products = [torch.exp((query * key).sum(dtype=torch.float32)) for query, key in (vectors[:2], vectors[2:])]
    return float(products[0] - products[1]) + float(start)
