"""Column statistics on a GPU: two kernels of our own in Triton, of which column sums alone need one.

    top_q, total_q    largest score of a row, and Σ_k exp2(score − top)     a pass over rows; a kernel's log-sum-exp saves it
    column_sum_k      Σ_q share_q / total_q · exp2(score − top_q)           a pass over columns

Both walk over the visible tiles of a band (:class:`~sinklab.attention.visibility.Band`) and hold one tile of scores at a time,
in base-two units, so that a weight is one ``exp2``. A column pass is one matrix product and one exponential for each visible
pair, where attention forward has two products. Without Triton, which comes with torch's builds for GPUs, :data:`INSTALLED` is
false.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.operation import beyond_digits
from sinklab.attention.statistics.blocked import agrees, counts_if_all_count, known_counts, visible_counts
from sinklab.attention.visibility import Band

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

INSTALLED = triton is not None


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function) if INSTALLED else function


@_jit
def _row_tile(  # type: ignore[no-untyped-def]
    query, keys, valid, top, total, moment, scores, rows, start, key_stride, kv_len, low, high, scale,
    LOW: tl.constexpr, HIGH: tl.constexpr, VALID: tl.constexpr, SCORES: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running largest score, sum of weights, and moments of a block of rows."""
    columns = start + tl.arange(0, COLUMNS)
    width = tl.arange(0, WIDTH)
    inside = columns < kv_len
    key = tl.load(
        keys + columns[None, :] * key_stride + width[:, None], mask=inside[None, :] & (width[:, None] < HEAD), other=0.0
    )
    tile = tl.dot(query, key, input_precision=PRECISION) * scale
    if MASKED:
        seen = inside[None, :]
        if HIGH:
            seen = seen & (columns[None, :] <= rows[:, None] + high)
        if LOW:
            seen = seen & (columns[None, :] >= rows[:, None] + low)
        if VALID:
            seen = seen & (tl.load(valid + columns, mask=inside, other=0)[None, :] != 0)
        if SCORES:
            scores += tl.sum(tl.where(seen, tile, 0.0), axis=1)
        tile = tl.where(seen, tile, float("-inf"))
    elif SCORES:
        scores += tl.sum(tile, axis=1)
    after = tl.maximum(top, tl.max(tile, axis=1))
    factor = tl.exp2(top - after)
    shifted = tile - after[:, None]
    weights = tl.exp2(shifted)
    if MASKED:
        shifted = tl.where(weights > 0.0, shifted, 0.0)
    # The moment is of scores below the largest one: those that it had before are `after - top` further below now.
    moment = factor * (moment + total * (top - after)) + tl.sum(weights * shifted, axis=1)
    total = factor * total + tl.sum(weights, axis=1)
    return after, total, moment, scores


@_jit
def row_kernel(  # type: ignore[no-untyped-def]
    queries, keys, valid, out_top, out_total, out_moment, out_scores,
    query_batch, query_head, query_stride, key_batch, key_head, key_stride, valid_stride,
    heads, groups, q_len, kv_len, low, high, scale,
    LOW: tl.constexpr, HIGH: tl.constexpr, VALID: tl.constexpr, SCORES: tl.constexpr,
    PRECISION: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a block of rows: the largest score, the sum of ``exp2(score - largest)``, and the moments that give the entropy.

    A row that sees no key has a sum of 0.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the last rows are the longest: they go first
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    queries += sample.to(tl.int64) * query_batch + head.to(tl.int64) * query_head
    keys += sample.to(tl.int64) * key_batch + (head // groups).to(tl.int64) * key_head
    valid += sample.to(tl.int64) * valid_stride
    query = tl.load(
        queries + rows[:, None] * query_stride + width[None, :],
        mask=(rows[:, None] < q_len) & (width[None, :] < HEAD),
        other=0.0,
    )
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    scores = tl.zeros([ROWS], tl.float32)

    # Keys that some row of the block sees, and among them those that every row sees.
    begin, end, whole_begin, whole_end = 0, kv_len, 0, kv_len // COLUMNS * COLUMNS
    if HIGH:
        end = tl.minimum(end, tl.maximum(first + ROWS + high, 0))
        whole_end = tl.minimum(whole_end, tl.maximum(first + high + 1, 0) // COLUMNS * COLUMNS)
    if LOW:
        begin = tl.maximum(first + low, 0) // COLUMNS * COLUMNS
        whole_begin = tl.maximum(first + ROWS - 1 + low + COLUMNS - 1, 0) // COLUMNS * COLUMNS
    end = tl.maximum(end, begin)
    whole_begin = tl.minimum(tl.maximum(whole_begin, begin), end)
    if VALID:  # every tile is masked
        whole_begin, whole_end = begin, begin
    whole_end = tl.maximum(whole_end, whole_begin)
    if LOW:
        for start in range(begin, whole_begin, COLUMNS):
            top, total, moment, scores = _row_tile(
                query, keys, valid, top, total, moment, scores, rows, start, key_stride, kv_len, low, high, scale,
                LOW, HIGH, VALID, SCORES, True, PRECISION, HEAD, WIDTH, COLUMNS,
            )  # fmt: skip
    for start in range(whole_begin, whole_end, COLUMNS):
        top, total, moment, scores = _row_tile(
            query, keys, valid, top, total, moment, scores, rows, start, key_stride, kv_len, low, high, scale,
            LOW, HIGH, VALID, SCORES, False, PRECISION, HEAD, WIDTH, COLUMNS,
        )  # fmt: skip
    for start in range(whole_end, end, COLUMNS):
        top, total, moment, scores = _row_tile(
            query, keys, valid, top, total, moment, scores, rows, start, key_stride, kv_len, low, high, scale,
            LOW, HIGH, VALID, SCORES, True, PRECISION, HEAD, WIDTH, COLUMNS,
        )  # fmt: skip
    place = tl.program_id(1).to(tl.int64) * q_len + rows
    tl.store(out_top + place, top, mask=rows < q_len)
    tl.store(out_total + place, total, mask=rows < q_len)
    tl.store(out_moment + place, moment, mask=rows < q_len)
    if SCORES:
        tl.store(out_scores + place, scores, mask=rows < q_len)


@_jit
def _column_tile(  # type: ignore[no-untyped-def]
    key, queries, shift, share, sums, columns, start, last, query_stride, low, high, scale,
    LOW: tl.constexpr, HIGH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of queries into the sums of a block of columns."""
    rows = start + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    inside = rows < last
    below = tl.load(shift + rows, mask=inside, other=0.0)
    factor = tl.load(share + rows, mask=inside, other=0.0)
    query = tl.load(
        queries + rows[None, :] * query_stride + width[:, None], mask=inside[None, :] & (width[:, None] < HEAD), other=0.0
    )
    tile = tl.dot(key, query, input_precision=PRECISION) * scale - below[None, :]
    if MASKED:
        seen = inside[None, :]
        if HIGH:
            seen = seen & (columns[:, None] <= rows[None, :] + high)
        if LOW:
            seen = seen & (columns[:, None] >= rows[None, :] + low)
        tile = tl.where(seen, tile, float("-inf"))
    weights = tl.exp2(tile)
    if PADDED:  # padding may hold anything, also NaN
        weights = tl.where(factor[None, :] > 0.0, weights, 0.0)
    return sums + tl.sum(weights * factor[None, :], axis=1)


@_jit
def column_kernel(  # type: ignore[no-untyped-def]
    queries, keys, shift, share, out,
    query_batch, query_head, query_stride, key_batch, key_head, key_stride,
    heads, groups, q_len, kv_len, low, high, scale,
    LOW: tl.constexpr, HIGH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``out[k] = Σ over queries of share_q · exp2(score_qk − shift_q)`` for a block of keys."""
    first = tl.program_id(0) * COLUMNS  # under a causal mask the first columns are the longest: they go first
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    columns = first + tl.arange(0, COLUMNS)
    width = tl.arange(0, WIDTH)
    queries += sample.to(tl.int64) * query_batch + head.to(tl.int64) * query_head
    keys += sample.to(tl.int64) * key_batch + (head // groups).to(tl.int64) * key_head
    shift += tl.program_id(1).to(tl.int64) * q_len
    share += tl.program_id(1).to(tl.int64) * q_len
    key = tl.load(
        keys + columns[:, None] * key_stride + width[None, :],
        mask=(columns[:, None] < kv_len) & (width[None, :] < HEAD),
        other=0.0,
    )
    sums = tl.zeros([COLUMNS], tl.float32)

    # Queries that see some key of the block, and among them those that see every one.
    begin, end, whole_begin, whole_end = 0, q_len, 0, q_len
    if HIGH:
        whole_begin = tl.maximum(begin, first + COLUMNS - 1 - high)
        begin = tl.maximum(begin, first - high)
    if LOW:
        whole_end = tl.minimum(end, first - low + 1)
        end = tl.minimum(end, first + COLUMNS - low)
    end = tl.maximum(end, begin)
    # Tiles begin at `begin` and are ROWS apart: the whole ones lie between the first and the last that are not.
    whole_begin = begin + (tl.maximum(whole_begin - begin, 0) + ROWS - 1) // ROWS * ROWS
    whole_end = begin + tl.maximum(whole_end - begin, 0) // ROWS * ROWS
    whole_begin = tl.minimum(whole_begin, end)
    whole_end = tl.maximum(whole_end, whole_begin)
    for start in range(begin, whole_begin, ROWS):
        sums = _column_tile(
            key, queries, shift, share, sums, columns, start, end, query_stride, low, high, scale,
            LOW, HIGH, PADDED, True, PRECISION, HEAD, WIDTH, ROWS,
        )  # fmt: skip
    for start in range(whole_begin, whole_end, ROWS):
        sums = _column_tile(
            key, queries, shift, share, sums, columns, start, end, query_stride, low, high, scale,
            LOW, HIGH, PADDED, False, PRECISION, HEAD, WIDTH, ROWS,
        )  # fmt: skip
    for start in range(whole_end, end, ROWS):
        sums = _column_tile(
            key, queries, shift, share, sums, columns, start, end, query_stride, low, high, scale,
            LOW, HIGH, PADDED, True, PRECISION, HEAD, WIDTH, ROWS,
        )  # fmt: skip
    place = tl.program_id(1).to(tl.int64) * kv_len + columns
    tl.store(out + place, sums, mask=columns < kv_len)


_LOG2E = 1.0 / math.log(2.0)
_HIDDEN = 1e30
"""What is taken from the scores of a query that does not count: its weights vanish, and being finite it gives no NaN."""
_OF_ROWS = frozenset({"mass", "entropy", "maximum", "scores", "log_sum_exp"})
_WIDEST = 256
_BOUND = 1e-3
"""Largest relative error of a column sum that :func:`gpu_is_exact` lets pass: that of ``exp2`` and of float32 sums, a hundred
times over. A wrong mask, scale or base of the logarithm is off by half or more."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Queries and keys of a tile, and how a GPU works on it."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def gpu_obstacle(call: AttentionCall) -> str | None:
    """Why the kernels cannot serve a softmax call without soft-cap and bias, or ``None`` when they can."""
    if not INSTALLED:
        return "Triton is not installed (torch's builds for GPUs bring it)"
    if call.queries.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it does not take {str(call.queries.dtype).removeprefix('torch.')}"
    if call.visible.band() is None:
        return f"it serves bands of visible keys (causal, window, padding), got {type(call.visible).__name__}"
    if call.queries.shape[3] > _WIDEST:
        return f"it holds heads of at most {_WIDEST} coordinates, got {call.queries.shape[3]}"
    return None


def gpu_statistics(call: AttentionCall, needs: frozenset[str]) -> Statistics:
    """Statistics of a softmax call without soft-cap and bias; memory O(q_len + kv_len).

    See :func:`~sinklab.attention.statistics.columns.column_statistics`. A log-sum-exp that the call has is used where columns
    alone are asked for and it leaves their weights enough digits.
    """
    # Read through a stride of one between coordinates, as every kernel of attention does.
    call = dataclasses.replace(call, queries=_dense(call.queries), keys=_dense(call.keys))
    band = call.visible.band()
    assert band is not None  # gpu_obstacle has seen to it
    column_count, row_count = counts_if_all_count(call, band)
    by_rows = bool(needs & _OF_ROWS) or call.log_sum_exp is None
    padded, blind, coarse = _asked_at_once(call, band, row_count, by_rows)
    blank = ~call.counted[:, None, :] | (row_count == 0) if padded or blind else None
    if padded:
        column_count = visible_counts(call)[0]
    given = None if by_rows or coarse else call.log_sum_exp
    with _on(call.queries.device):
        if given is None:
            top, total, moment, scores = _rows(call, band, "scores" in needs)
        else:
            top, total, moment, scores = given.float() * _LOG2E, None, None, None
        log_sum_exp = given if total is None else (top + torch.log2(total)) / _LOG2E
        assert log_sum_exp is not None  # one of the two is there
        share = torch.ones_like(top) if call.sink_scores is None else torch.sigmoid(log_sum_exp - call.sink_scores.float())
        statistics = Statistics()
        if "columns" in needs:
            factor = share if total is None else share / total
            sums = _columns(call, band, _where(blank, top, _HIDDEN), _where(blank, factor, 0.0), padded)
            statistics.column_sum = statistics.column_share = sums
            statistics.column_count = column_count
    if total is None or moment is None:
        return statistics
    share = _where(blank, share, 0.0)
    padding = ~call.counted[:, None, :] if padded else None
    if blind:
        log_sum_exp = log_sum_exp.masked_fill(row_count == 0, float("-inf"))
    if "log_sum_exp" in needs:
        statistics.log_sum_exp = _where(padding, log_sum_exp, 0.0)
    if "mass" in needs:
        statistics.row_mass = share
        null = torch.zeros_like(share)
        if call.sink_scores is not None:
            null = torch.sigmoid(call.sink_scores.float() - log_sum_exp)
        statistics.null_mass = _where(padding, null, 0.0)
    if "maximum" in needs:
        statistics.row_max = _where(blank, share / total, 0.0)  # the weight of the largest score is 1 over the sum
    if "entropy" in needs:
        # With scores below the largest one, s: ln Σ exp(s) − Σ s·exp(s) / Σ exp(s). No large numbers are subtracted.
        entropy = torch.log(total) - moment / (total * _LOG2E)
        statistics.row_entropy = _where(blank, entropy, 0.0).clamp_(min=0.0)
    if scores is not None:
        statistics.score_mean = _where(blank, scores / (row_count.clamp(min=1) * _LOG2E), 0.0)
    return statistics


def _where(mask: Tensor | None, tensor: Tensor, value: float) -> Tensor:
    """The tensor with a value where the mask is true; as it is without a mask."""
    return tensor if mask is None else tensor.masked_fill(mask, value)


@functools.lru_cache(maxsize=8)
def _sees_nothing(low: int | None, high: int | None, q_len: int, kv_len: int, device: torch.device, inference: bool) -> bool:
    """Whether some query of a band without padding sees no key."""
    return bool((known_counts(low, high, q_len, kv_len, device, inference)[1] == 0).any())


def _asked_at_once(call: AttentionCall, band: Band, row_count: Tensor, by_rows: bool) -> tuple[bool, bool, bool]:
    """Whether there is padding, whether some query sees no key, and whether the log-sum-exp that the call has leaves some
    weight too few digits (never, where it is not used): with one wait for the device, and few starts of kernels."""
    asked = [~call.counted.all()]
    if band.valid is not None:
        asked.append((row_count == 0).any())
    if not by_rows:
        assert call.log_sum_exp is not None  # else it goes by rows
        asked.append(beyond_digits(call.log_sum_exp).any())
    told = [bool(answer) for answer in torch.stack(asked).tolist()]
    if band.valid is None:
        sizes = call.q_len, call.kv_len, call.queries.device, torch.is_inference_mode_enabled()
        told.insert(1, _sees_nothing(band.low, band.high, *sizes))
    padded, blind = told[:2]
    coarse = not by_rows and told[2]
    if coarse and (padded or blind):  # rows without meaning may hold anything
        assert call.log_sum_exp is not None
        blank = ~call.counted[:, None, :] | (row_count == 0)
        coarse = bool(beyond_digits(call.log_sum_exp.masked_fill(blank, 0.0)).any())
    return padded, blind, coarse


@functools.cache
def gpu_is_exact(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether both kernels agree with the blocked reference on a device, for a dtype and head size; tried once per process.

    A kernel that the installed Triton cannot compile has not agreed. Warns where they do not.
    """

    def by_own_rows(call: AttentionCall) -> Statistics:
        return gpu_statistics(dataclasses.replace(call, log_sum_exp=None), frozenset({"columns"}))

    def by_given_rows(call: AttentionCall) -> Statistics:
        return gpu_statistics(call, frozenset({"columns"}))

    try:
        agree = all(agrees(compute, device, dtype, head_dim, _BOUND) for compute in (by_own_rows, by_given_rows))
        why = "" if agree else "they refuse, or give other numbers than the plain definition"
    except Exception as error:  # Triton's compiler fails in ways of its own
        why = " ".join(f"{type(error).__name__}: {error}".split())
    if why:
        warnings.warn(
            f"the kernels for statistics do not work on {device} for heads of {head_dim} in "
            f"{str(dtype).removeprefix('torch.')} ({why[:200]}); a slower way gives the same numbers",
            stacklevel=2,
        )
    return not why


def _rows(call: AttentionCall, band: Band, with_scores: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of every row, float32 ``(batch, num_heads, q_len)``, in base-two units: the largest score, the sum of ``exp2`` of scores
    below it and of these times the scores, and the sum of all visible scores."""
    shape = call.queries.shape[:3]
    top, total, moment = (torch.empty(shape, dtype=torch.float32, device=call.queries.device) for _ in range(3))
    scores = torch.empty_like(top) if with_scores else None
    tiling = _tiling(call, "rows")
    grid = (-(-call.q_len // tiling.rows), shape[0] * shape[1])
    valid = call.keys if band.valid is None else band.valid.to(torch.uint8).contiguous()  # of no use where all are
    row_kernel[grid](
        call.queries, call.keys, valid, top, total, moment, top if scores is None else scores,
        *_strides(call), 0 if band.valid is None or len(band.valid) == 1 else band.valid.shape[1],
        *_sizes(call), *_bounds(band), call.scaling * _LOG2E,
        LOW=band.low is not None, HIGH=band.high is not None, VALID=band.valid is not None, SCORES=with_scores,
        COLUMNS=tiling.columns, **_constants(call, tiling),
    )  # fmt: skip
    return top, total, moment, scores


def _columns(call: AttentionCall, band: Band, shift: Tensor, factor: Tensor, padded: bool) -> Tensor:
    """Weight by key, float32 ``(batch, num_heads, kv_len)``."""
    batch, heads = call.queries.shape[:2]
    out = torch.empty(batch, heads, call.kv_len, dtype=torch.float32, device=call.queries.device)
    tiling = _tiling(call, "columns")
    grid = (-(-call.kv_len // tiling.columns), batch * heads)
    column_kernel[grid](
        call.queries, call.keys, shift.contiguous(), factor.contiguous(), out,
        *_strides(call), *_sizes(call), *_bounds(band), call.scaling * _LOG2E,
        LOW=band.low is not None, HIGH=band.high is not None, PADDED=padded,
        COLUMNS=tiling.columns, **_constants(call, tiling),
    )  # fmt: skip
    return out if band.valid is None else out.masked_fill_(~band.valid[:, None], 0.0)


_TILINGS = {
    ("rows", 64): Tiling(128, 128, 4, 3),
    ("rows", 128): Tiling(64, 128, 4, 3),
    ("columns", 64): Tiling(128, 128, 4, 2),
    ("columns", 128): Tiling(128, 128, 4, 2),
}
"""By pass and width of a head, in half precision: for 64 the fastest of eighteen on an H200 at 32,768 tokens, for 128 the
fastest of 21 on an H100 at 8,192 and 32,768 tokens together (benchmarks/cuda/tilings.py)."""
_ROWS_OF_FLOAT32 = Tiling(32, 128, 4, 2)
"""For heads of up to 64: three quarters of the time of square tiles, which no tiling beats in the pass over columns."""


def _tiling(call: AttentionCall, of: str) -> Tiling:
    """Sizes that hold a tile and its operands, and keep a GPU busy."""
    width = call.queries.shape[3]
    if call.queries.dtype == torch.float32:
        if of == "rows" and width <= 64:
            return _ROWS_OF_FLOAT32
        return Tiling(32, 32, 4, 1) if width > 128 else Tiling(64, 64, 4, 2)
    return Tiling(64, 64, 4, 2) if width > 128 else _TILINGS[of, 64 if width <= 64 else 128]


def _constants(call: AttentionCall, tiling: Tiling) -> dict[str, object]:
    head_dim = call.queries.shape[3]
    return {
        "PRECISION": "ieee",  # of float32: products as exact as those of the reference
        "HEAD": head_dim,
        "WIDTH": max(16, 1 << (head_dim - 1).bit_length()),  # a product takes powers of two
        "ROWS": tiling.rows,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


def _strides(call: AttentionCall) -> tuple[int, ...]:
    return *call.queries.stride()[:3], *call.keys.stride()[:3]


def _sizes(call: AttentionCall) -> tuple[int, int, int, int]:
    return call.num_heads, call.groups, call.q_len, call.kv_len


def _bounds(band: Band) -> tuple[int, int]:
    return band.low or 0, band.high or 0


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
