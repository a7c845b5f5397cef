"""The two passes over softmax attention in Triton: what every row looks like, and how much weight every key receives.

Both walk over the visible tiles of a band (:class:`~sinklab.attention.visibility.Band`) and hold one tile of scores at a time.
Scores are in base-two units, so that a weight is one ``exp2``. Without Triton, which comes with torch's builds for GPUs, the
module has no kernels and :data:`INSTALLED` is false.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

INSTALLED = triton is not None

__all__ = ["INSTALLED", "column_kernel", "row_kernel"]


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
    queries, keys, shift, share, starts, out,
    query_batch, query_head, query_stride, key_batch, key_head, key_stride,
    heads, groups, q_len, kv_len, buckets, low, high, scale,
    LOW: tl.constexpr, HIGH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``out[bucket, k] = Σ over queries of a bucket of share_q · exp2(score_qk − shift_q)`` for a block of keys."""
    first = tl.program_id(0) * COLUMNS  # under a causal mask the first columns are the longest: they go first
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    bucket = tl.program_id(2)
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

    # Queries of the bucket that see some key of the block, and among them those that see every one.
    begin, end = tl.load(starts + bucket), tl.load(starts + bucket + 1)
    whole_begin = begin
    whole_end = end
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
    place = (tl.program_id(1).to(tl.int64) * buckets + bucket) * kv_len + columns
    tl.store(out + place, sums, mask=columns < kv_len)
