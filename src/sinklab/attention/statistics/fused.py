"""Column statistics of softmax attention in one second pass over small tiles, given the log-sum-exp of every row.

    weight of query i on key j  =  exp2( log2(e) · scaling · q_i·k_j  −  log2(e) · LSE_i )

The subtraction rides along in the matrix product as one more feature column (−log2(e)·LSE against 1), so a tile comes out as
the logarithm of its weights, one ``exp2`` turns it into weights, and the sums over columns and rows, the largest weight and
the entropy are read off while it is still in the cache. Tiles that are hidden are never visited and only tiles that are
partly visible are masked. Arithmetic is float32 (or wider) whatever the dtype of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.operation import leaves_digits
from sinklab.attention.statistics.blocked import plan_tiles, visible_counts
from sinklab.errors import ConfigurationError

_LOG2E = 1.0 / math.log(2.0)
_HIDDEN = -1e30
"""Base-two logarithm of the weight of a hidden pair: exp2 gives exactly 0, and being finite it does not produce NaN."""
_FEATURE_BYTES = 24 * 2**20
"""Bound on the copies of queries and keys that live at a time; heads are worked through in chunks of this size."""

Pair = tuple[int, int]
"""A sample and a query head."""


class LargeScoresError(ConfigurationError):
    """Scores so large that their difference to a log-sum-exp of the same size has too few digits left."""


def fused_statistics(call: AttentionCall, needs: frozenset[str], rows: int = 512, columns: int = 1024) -> Statistics:
    """Statistics of a softmax call without soft-cap and bias, in tiles of ``rows × columns``.

    See :func:`~sinklab.attention.statistics.columns.column_statistics`. The log-sum-exp is taken from ``call.log_sum_exp``, or
    computed first, by a pass of its own over the same tiles. Extra memory is O(q_len + kv_len) per head.

    Raises:
        LargeScoresError: the rounding of a row's log-sum-exp shows in its weights.
    """
    work = _SecondPass(call, needs, rows, columns)
    for chunk in work.chunks():
        work.run(chunk)
    return work.statistics()


class _SecondPass:
    """Accumulators of all heads, and the loops that fill them."""

    def __init__(self, call: AttentionCall, needs: frozenset[str], rows: int, columns: int) -> None:
        self.call, self.needs = call, needs
        self.plan = plan_tiles(call.visible, call.q_len, call.kv_len, rows, columns)
        self.column_count, self.row_count = visible_counts(call)
        self.dtype = torch.promote_types(call.queries.dtype, torch.float32)
        heads = call.queries.shape[:2]
        self.columns = self.mass = self.plogp = self.maximum = self.score_sum = None
        if "columns" in needs:
            self.columns = self._zeros(*heads, call.kv_len)
        # The entropy is corrected by the mass really found, so that it does not inherit the rounding of a bfloat16 LSE.
        if "mass" in needs or "entropy" in needs:
            self.mass = self._zeros(*heads, call.q_len)
        if "entropy" in needs:
            self.plogp = self._zeros(*heads, call.q_len)
        if "maximum" in needs:
            self.maximum = self._zeros(*heads, call.q_len)
        if "scores" in needs:
            self.score_sum = self._zeros(*heads, call.q_len)
        self.powers = self._empty(rows * columns)
        self.tile = self._empty(rows * columns) if "entropy" in needs else None
        # Rows that are padding or see no key: their features are blanked and their weights come out as exact zeros.
        self.blank = ~call.counted[:, None, :] | (self.row_count == 0)
        hidden = (self.column_count == 0).all(dim=1)
        self.hidden_keys = hidden if bool(hidden.any()) else None
        self.log_sum_exp = self._zeros(*heads, call.q_len) if call.log_sum_exp is None else call.log_sum_exp.to(self.dtype)
        self.row_share = self._zeros(*heads, call.q_len)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self.dtype, device=self.call.queries.device)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.call.queries.device)

    def chunks(self) -> Iterator[list[Pair]]:
        """All samples and heads, as many at a time as the bound on memory allows."""
        call = self.call
        element = torch.finfo(self.dtype).bits // 8
        pair = (call.q_len + call.kv_len) * (call.queries.shape[3] + 1) * element
        size = max(1, _FEATURE_BYTES // pair)
        pairs = [(sample, head) for sample in range(call.queries.shape[0]) for head in range(call.num_heads)]
        for start in range(0, len(pairs), size):
            yield pairs[start : start + size]

    def run(self, chunk: list[Pair]) -> None:
        """The whole pass (two passes when no log-sum-exp was given) for some heads."""
        queries = {pair: self._query_features(*pair) for pair in chunk}
        groups = self.call.groups
        shared = {(sample, head // groups): self._key_features(sample, head // groups) for sample, head in chunk}
        keys = {(sample, head): shared[sample, head // groups] for sample, head in chunk}
        if self.call.log_sum_exp is None:
            self._find_log_sum_exp(queries, keys)
        self._require_digits(chunk)
        for (sample, head), features in queries.items():
            self.row_share[sample, head] = self._share(sample, head)
            offset = self.log_sum_exp[sample, head] * -_LOG2E
            features[:, -1] = offset.masked_fill(self._of(self.blank, sample, head), _HIDDEN)
        self._accumulate(queries, keys)

    def _require_digits(self, chunk: list[Pair]) -> None:
        """Refuse rows whose weights would come out as anything but shares. A kernel may leave anything in blank ones."""
        for sample, head in chunk:
            found = self.log_sum_exp[sample, head].masked_fill(self._of(self.blank, sample, head), 0.0)
            if not leaves_digits(found):
                raise LargeScoresError(
                    f"{self.call.site.module}: a log-sum-exp of size {float(found.abs().max()):.3g} leaves the weights too few "
                    f"digits in {str(self.dtype).removeprefix('torch.')}; use 'auto' or 'blocked'"
                )

    def _query_features(self, sample: int, head: int) -> Tensor:
        """``(q_len, head_dim + 1)``: queries in base-two score units, and a column for the log-sum-exp, still 0."""
        features = self._empty(self.call.q_len, self.call.queries.shape[3] + 1)
        features[:, :-1] = self.call.queries[sample, head]
        features.mul_(self.call.scaling * _LOG2E)
        features[:, -1] = 0.0
        blank = self._of(self.blank, sample, head)
        return features.masked_fill_(blank[:, None], 0.0) if bool(blank.any()) else features

    def _key_features(self, sample: int, kv_head: int) -> Tensor:
        """``(kv_len, head_dim + 1)``: keys and a column of ones."""
        features = self._empty(self.call.kv_len, self.call.keys.shape[3] + 1)
        features[:, :-1] = self.call.keys[sample, kv_head]
        if self.hidden_keys is not None:
            # Padding keys may hold anything, also NaN, and NaN would survive the mask.
            features[:, :-1].masked_fill_(self.hidden_keys[sample % len(self.hidden_keys)][:, None], 0.0)
        features[:, -1] = 1.0
        return features

    def _share(self, sample: int, head: int) -> Tensor:
        """What a learned sink logit leaves of each row: ``exp(LSE) / (exp(LSE) + exp(sink))``; 1 without one, 0 if blank."""
        sink = self.call.sink_scores
        log_sum_exp = self.log_sum_exp[sample, head]
        share = torch.ones_like(log_sum_exp) if sink is None else torch.sigmoid(log_sum_exp - self._of(sink, sample, head))
        # A kernel may have left anything, also NaN, as the log-sum-exp of a row that sees no key.
        return share.masked_fill(self._of(self.blank, sample, head), 0.0)

    @staticmethod
    def _of(field: Tensor, sample: int, head: int) -> Tensor:
        """The part of a ``(batch or 1, num_heads or 1, …)`` field that belongs to a sample and head."""
        return field[sample % field.shape[0], head % field.shape[1]]

    def _tiles(
        self, queries: dict[Pair, Tensor], keys: dict[Pair, Tensor]
    ) -> Iterator[tuple[Pair, slice, slice, Tensor | None, Tensor]]:
        """Every visible tile of every head: its place, mask and ``log2`` weights, in a buffer that the next one overwrites."""
        for tile in self.plan:
            corners = (tile.query_start, tile.query_stop, tile.key_start, tile.key_stop)
            masks = None if tile.whole else _Masks(self.call.visible.block(*corners), self.dtype)
            rows, columns = slice(*corners[:2]), slice(*corners[2:])
            shape = (corners[1] - corners[0], corners[3] - corners[2])
            powers = self.powers[: shape[0] * shape[1]].view(shape)
            for pair, features in queries.items():
                mask = None if masks is None else masks.of(*pair)
                if mask is not None and mask.ndim == 0:
                    continue
                torch.mm(features[rows], keys[pair][columns].t(), out=powers)
                if mask is not None:
                    powers.add_(mask)
                yield pair, rows, columns, mask, powers

    def _find_log_sum_exp(self, queries: dict[Pair, Tensor], keys: dict[Pair, Tensor]) -> None:
        """Fill ``log_sum_exp`` of some heads: running maximum and rescaled sum over the tiles of a row."""
        top = {pair: torch.full_like(features[:, 0], _HIDDEN) for pair, features in queries.items()}
        total = {pair: torch.zeros_like(features[:, 0]) for pair, features in queries.items()}
        for pair, rows, _, _, powers in self._tiles(queries, keys):
            before = top[pair][rows]
            after = torch.maximum(before, powers.amax(dim=1))
            powers.sub_(after[:, None]).exp2_()
            total[pair][rows] = total[pair][rows] * torch.exp2(before - after) + powers.sum(dim=1)
            top[pair][rows] = after
        for (sample, head), highest in top.items():
            self.log_sum_exp[sample, head] = (highest + torch.log2(total[sample, head])) / _LOG2E

    def _accumulate(self, queries: dict[Pair, Tensor], keys: dict[Pair, Tensor]) -> None:
        """The second pass itself: weights of every visible tile, reduced on the spot."""
        for pair, rows, columns, mask, powers in self._tiles(queries, keys):
            if self.score_sum is not None:
                # Summing over a whole tile is linear: one product with the sum of its keys.
                self.score_sum[pair][rows] += (
                    torch.mv(queries[pair][rows], keys[pair][columns].sum(dim=0))
                    if mask is None
                    else torch.where(mask == 0, powers, 0.0).sum(dim=1)
                )
            # In place unless the entropy asks for both: a second tile would not fit into the cache beside the first.
            weights = powers if self.tile is None else self.tile[: powers.numel()].view(powers.shape)
            torch.exp2(powers, out=weights)
            if self.columns is not None:
                # A product with one row is faster than a sum over the first dimension, and applies the shares on its way.
                self.columns[pair][columns] += torch.mm(self.row_share[pair][None, rows], weights)[0]
            if self.maximum is not None:
                largest = self.maximum[pair][rows]
                torch.maximum(largest, weights.amax(dim=1), out=largest)
            if self.mass is not None:
                self.mass[pair][rows] += weights.sum(dim=1)
            if self.plogp is not None:
                self.plogp[pair][rows] += powers.mul_(weights).sum(dim=1)

    def statistics(self) -> Statistics:
        """The accumulators as the fields that were asked for."""
        call, needs = self.call, self.needs
        statistics = Statistics()
        padding = ~call.counted[:, None, :]
        if self.columns is not None:
            statistics.column_sum = statistics.column_share = self.columns
            statistics.column_count = self.column_count
        log_sum_exp = self.log_sum_exp.masked_fill(self.row_count == 0, float("-inf"))
        if "log_sum_exp" in needs:
            statistics.log_sum_exp = log_sum_exp.masked_fill(padding, 0.0)
        if "mass" in needs and self.mass is not None:
            statistics.row_mass = self.mass * self.row_share
            statistics.null_mass = _null_mass(call, log_sum_exp).masked_fill(padding, 0.0)
        if self.maximum is not None:
            statistics.row_max = self.maximum * self.row_share
        if self.plogp is not None and self.mass is not None:
            # -sum (p/m) ln(p/m) for p that sum to m; rows without a visible key have neither.
            mass = self.mass.masked_fill(self.blank, 1.0)
            statistics.row_entropy = (torch.log(mass) - self.plogp / (mass * _LOG2E)).clamp_(min=0.0)
        if self.score_sum is not None:
            mean = self.score_sum / (self.row_count.clamp(min=1).to(self.dtype) * _LOG2E) + self.log_sum_exp
            statistics.score_mean = mean.masked_fill(self.blank, 0.0)
        return statistics


class _Masks:
    """What is added to a partly visible tile: 0 where visible, the logarithm of 0 where hidden."""

    def __init__(self, block: Tensor, dtype: torch.dtype) -> None:
        self.block, self.dtype = block, dtype
        self.made: dict[Pair, Tensor | None] = {}

    def of(self, sample: int, head: int) -> Tensor | None:
        """The mask ``(rows, columns)`` for a head; ``None`` when it sees the whole tile, a scalar when it sees nothing."""
        pair = (sample % self.block.shape[0], head % self.block.shape[1])
        if pair not in self.made:
            visible = self.block[pair]
            seen = int(visible.sum()) if self.block.shape[:2] != (1, 1) else 1
            if seen == 0:
                self.made[pair] = torch.tensor(_HIDDEN)
            else:
                whole = seen == visible.numel()
                self.made[pair] = None if whole else visible.to(self.dtype).sub_(1.0).mul_(-_HIDDEN)
        return self.made[pair]


def _null_mass(call: AttentionCall, log_sum_exp: Tensor) -> Tensor:
    """Null mass of a softmax, ``exp(sink) / (exp(sink) + exp(log_sum_exp))``; from the scores, not from the row sums."""
    sink = call.sink_scores
    return torch.zeros_like(log_sum_exp) if sink is None else torch.sigmoid(sink.to(log_sum_exp.dtype) - log_sum_exp)
