"""Column statistics in blocks of whole rows, the definition that the faster ways are held to; and tiles and counts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.operation import ROW_SUM
from sinklab.attention.visibility import Band, Causal, Everything, TileState, Visibility
from sinklab.registry import operations

_GRAIN = 256
"""Width of the strips of keys whose state is asked, and number of queries from which a partly visible tile is halved once.
A finer grain saves arithmetic beside the diagonal and loses it again to the fixed cost of more and smaller products."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Half-open ranges of queries and keys of which at least one pair is visible; ``whole`` when all of them are."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    whole: bool


def plan_tiles(visible: Visibility, q_len: int, kv_len: int, rows: int, columns: int) -> list[Tile]:
    """Cut the visible part of the score matrix into disjoint tiles of at most ``rows × columns``; hidden parts are left out."""
    tiles: list[Tile] = []
    for start in range(0, q_len, rows):
        stop = min(start + rows, q_len)
        for first, last, state in _runs(_strips(visible, start, stop, 0, kv_len, columns)):
            if state == "some" and stop - start > _GRAIN:
                middle = (start + stop + 1) // 2
                for half in ((start, middle), (middle, stop)):
                    # Here a visible strip is not worth a tile of its own beside a partly visible one.
                    for a, b, inner in _runs(_strips(visible, *half, first, last, columns), join=True):
                        tiles += _pieces(*half, a, b, inner, columns)
            else:
                tiles += _pieces(start, stop, first, last, state, columns)
    return tiles


def _pieces(query_start: int, query_stop: int, first: int, last: int, state: TileState, columns: int) -> Iterator[Tile]:
    """A run of keys in equal pieces: 1280 keys are two tiles of 640 and not one of 1024 and a thin one."""
    if state == "none":
        return
    number = -(-(last - first) // columns)
    cuts = [first + (last - first) * piece // number for piece in range(number + 1)]
    for start, stop in itertools.pairwise(cuts):
        yield Tile(query_start, query_stop, start, stop, state == "all")


def _strips(
    visible: Visibility, query_start: int, query_stop: int, key_start: int, key_stop: int, columns: int
) -> Iterator[tuple[int, int, TileState]]:
    """States of successive strips of keys; a wide strip that is uniform is not asked about again."""
    grain = min(_GRAIN, columns)
    for start in range(key_start, key_stop, columns):
        stop = min(start + columns, key_stop)
        state = visible.state(query_start, query_stop, start, stop)
        if state != "some" or stop - start <= grain:
            yield start, stop, state
            continue
        for first in range(start, stop, grain):
            last = min(first + grain, stop)
            yield first, last, visible.state(query_start, query_stop, first, last)


def _runs(strips: Iterable[tuple[int, int, TileState]], join: bool = False) -> Iterator[tuple[int, int, TileState]]:
    """Join neighbouring strips of the same state; with ``join`` also wholly and partly visible ones."""
    for _, run in itertools.groupby(strips, key=lambda strip: strip[2] != "none" if join else strip[2]):
        members = list(run)
        states = {state for _, _, state in members}
        yield members[0][0], members[-1][1], members[0][2] if len(states) == 1 else "some"


def visible_counts(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """How many counted queries see each key, and how many keys each query sees.

    Returns:
        float32 ``(batch or 1, num_heads or 1, kv_len)`` and float32 ``(batch or 1, num_heads or 1, q_len)``; a dimension is
        1 when the counts do not depend on it. Exact: a count stays below 2**24. The key of a folded sink counts as seen.
    """
    counted = call.counted[:1] if call.all_counted else call.counted
    band = call.visible.band()
    if band is not None:
        return counts_if_all_count(call, band) if call.all_counted else counts_of_band(band, counted, call.kv_len)
    # The rule tells its batch and head dimensions with its smallest block.
    batch, heads = call.visible.block(0, 1, 0, 1).shape[:2]
    device = call.queries.device
    columns = torch.zeros(max(batch, counted.shape[0]), heads, call.kv_len, device=device)
    rows = torch.zeros(batch, heads, call.q_len, device=device)
    for start, stop in call.blocks():
        # A product with the row of counted queries: exact, and faster than summing booleans.
        block = call.visible.block(start, stop, 0, call.kv_len).float()
        columns += torch.matmul(counted[:, None, None, start:stop].float(), block)[:, :, 0]
        rows[:, :, start:stop] = block.sum(dim=3)
    if (unfolded := call.visible.unfolded()) is not call.visible:
        columns, _ = visible_counts(dataclasses.replace(call, visible=unfolded))
    return columns, rows


def counts_if_all_count(call: AttentionCall, band: Band) -> tuple[Tensor, Tensor]:
    """What :func:`visible_counts` gives where every query counts; without padding made once for all layers, so not to be
    written to."""
    if band.valid is not None:
        return counts_of_band(band, torch.ones_like(call.counted[:1]), call.kv_len)
    device = call.queries.device
    return known_counts(band.low, band.high, call.q_len, call.kv_len, device, torch.is_inference_mode_enabled())


@functools.lru_cache(maxsize=8)
def known_counts(
    low: int | None, high: int | None, q_len: int, kv_len: int, device: torch.device, inference: bool
) -> tuple[Tensor, Tensor]:
    """:func:`counts_of_band` without padding; tensors made in ``inference`` mode are of no use to a gradient."""
    return counts_of_band(Band(low, high), torch.ones(1, q_len, dtype=torch.bool, device=device), kv_len)


def counts_of_band(band: Band, counted: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """What :func:`visible_counts` gives: running sums of ``counted`` queries, boolean ``(batch or 1, q_len)``, and of valid
    keys, between the bounds of each."""
    device = counted.device
    valid = torch.ones(1, kv_len, dtype=torch.bool, device=device) if band.valid is None else band.valid
    queries, keys = torch.arange(counted.shape[1], device=device), torch.arange(kv_len, device=device)

    def between(flags: Tensor, first: Tensor | None, last: Tensor | None, of: Tensor) -> Tensor:
        sums = torch.nn.functional.pad(flags.long().cumsum(dim=1), (1, 0))
        size = flags.shape[1]
        begin = torch.zeros_like(of) if first is None else first.clamp(0, size)
        end = torch.full_like(of, size) if last is None else (last + 1).clamp(0, size)
        return (sums[:, end] - sums[:, begin]).clamp(min=0).float()

    columns = between(
        counted, None if band.high is None else keys - band.high, None if band.low is None else keys - band.low, keys
    )
    rows = between(
        valid, None if band.low is None else queries + band.low, None if band.high is None else queries + band.high, queries
    )
    return (columns * valid)[:, None], rows[:, None]


def blocked_statistics(call: AttentionCall, needs: frozenset[str]) -> Statistics:
    """Statistics from :meth:`AttentionCall.weights`, a block of queries at a time over the full width.

    See :func:`sinklab.attention.statistics.columns.column_statistics`.
    """
    operation = call.operation
    shape = (*call.queries.shape[:2],)
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    device = call.queries.device
    counted = None if call.all_counted else call.counted
    columns = torch.zeros(*shape, call.kv_len, dtype=dtype, device=device)
    share = columns if operation.normalized else torch.zeros_like(columns)
    fields: dict[str, list[Tensor]] = {}
    for start, stop in call.blocks():
        scores = call.scores(start, stop)
        visible = call.visible.block(start, stop, 0, call.kv_len)
        weights = call.weights(start, stop, scores)
        if operation.is_softmax:
            # Entropy is of the weights divided by their sum. Under a null term that is the softmax without it, which keeps its
            # digits when the term leaves nothing of the weights themselves.
            sole = weights if call.sink_scores is None else operation.weights(scores, visible)
        else:
            total = weights.sum(dim=-1, keepdim=True)
            # The constant belongs to the proxy of Gu et al.; beside what a null mass leaves of a row it is not small.
            sole = weights / (total.clamp_min(torch.finfo(dtype).tiny) if operation.normalized else total + ROW_SUM)
        if counted is not None:
            padding = ~counted[:, None, start:stop, None]
            weights, sole = weights.masked_fill(padding, 0.0), sole.masked_fill(padding, 0.0)
        if "columns" in needs:
            columns += weights.sum(dim=2)
            if share is not columns:
                share += sole.sum(dim=2)
        for name, value in _row_values(call, needs, scores, visible, weights, sole, start, stop).items():
            zero = value if counted is None else value.masked_fill(~counted[:, None, start:stop], 0.0)
            fields.setdefault(name, []).append(zero)

    statistics = Statistics()
    for name, parts in fields.items():
        setattr(statistics, name, torch.cat(parts, dim=2))
    if "columns" in needs:
        statistics.column_sum, statistics.column_share = columns, share
        statistics.column_count = visible_counts(call)[0]
    return statistics


def _row_values(
    call: AttentionCall, needs: frozenset[str], scores: Tensor, visible: Tensor, weights: Tensor, sole: Tensor,
    start: int, stop: int,
) -> dict[str, Tensor]:  # fmt: skip
    """The row fields of one block that the needs ask for and the operation has, each ``(batch, num_heads, block)``."""
    values: dict[str, Tensor] = {}
    if "mass" in needs:
        values["row_mass"] = weights.sum(dim=-1)
        if call.operation.normalized:
            values["null_mass"] = call.null_mass(start, stop, scores)
    if "entropy" in needs:
        values["row_entropy"] = torch.special.entr(sole).sum(dim=-1)
    if "maximum" in needs:
        values["row_max"] = weights.amax(dim=-1)
    if "scores" in needs:
        seen = visible.sum(dim=-1).clamp(min=1)
        values["score_mean"] = scores.masked_fill(~visible, 0.0).sum(dim=-1) / seen
    if "log_sum_exp" in needs and call.operation.is_softmax:
        # The largest weight is one over the sum of the exponentials below the largest score.
        largest = sole.amax(dim=-1).clamp_min(torch.finfo(sole.dtype).tiny)
        values["log_sum_exp"] = torch.where(visible, scores, float("-inf")).amax(dim=-1) - largest.log()
    return values


TOKENS = 200
"""Of the trial: no multiple of a tile."""


def agrees(
    compute: Callable[[AttentionCall], Statistics], device: torch.device, dtype: torch.dtype, head_dim: int, bound: float
) -> bool:
    """Whether column sums are those of the blocked reference, to a relative ``bound`` (of a hundredth, for sums below it).

    ``compute`` is given a call that has its log-sum-exp: 2 × 4 heads (2 key-value heads) of 200 tokens, causal and full. One
    that refuses the shapes (RuntimeError) has not agreed.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, heads, TOKENS, head_dim, generator=generator) for heads in (4, 2)]
    queries, keys = (tensor.to(device=device, dtype=dtype) for tensor in drawn)
    positions = torch.arange(TOKENS, device=device).expand(2, -1)
    for visible in (Causal(0, device), Everything(device)):
        call = AttentionCall(
            site=Site("self-check", 0), queries=queries, keys=keys, values=keys, scaling=head_dim**-0.5, visible=visible,
            operation=operations.make("softmax"), query_positions=positions, key_positions=positions,
            query_documents=torch.zeros_like(positions), key_documents=torch.zeros_like(positions),
        )  # fmt: skip
        reference = blocked_statistics(call, frozenset({"columns", "log_sum_exp"}))
        call.log_sum_exp = reference.log_sum_exp
        try:
            got, expected = compute(call).column_sum, reference.column_sum
        except RuntimeError:
            return False
        assert got is not None
        assert expected is not None
        if not bool(((got - expected).abs() <= bound * expected.clamp(min=1e-2)).all()):
            return False
    return True
