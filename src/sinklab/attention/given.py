"""Attention weights that are given and not computed: a call made of them, and what they must be in order to be such weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.operation import Operation
from sinklab.attention.positions import Positions
from sinklab.attention.visibility import Everything, Keys, Visibility

__all__ = [
    "UNAVAILABLE",
    "Fault",
    "GivenCall",
    "GivenWeights",
    "Reach",
    "RowSums",
    "find_fault",
    "given_call",
    "reach",
    "row_tolerance",
]

RowSums: TypeAlias = Literal["one", "null_mass", "any"]
"""What rows of weights sum to: one; one together with a null mass; anything, as under sigmoid attention."""

UNAVAILABLE: dict[str, str] = {
    "scores": "scores before the softmax",
    "head_outputs": "outputs of heads",
    "attention_outputs": "outputs of attention modules",
    "gated_heads": "outputs of heads behind a gate",
    "vectors": "queries, keys and values",
}
"""What a probe may need and weights alone do not give (keys of :data:`sinklab.attention.probe.NEEDS`), in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenWeights(Operation):
    """Weights that are there already and stand where a call has its scores; what computed them is not known.

    Args:
        null: what a row lacks to one is its null mass. It is the difference, good to the rounding of the row sum.
    """

    name: ClassVar[str] = "given weights"
    normalized: ClassVar[bool] = True
    null: bool = False

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return scores if visible is None else scores.masked_fill(~visible, 0.0)

    def null_mass(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor | None:
        return (1.0 - self.weights(scores, visible).sum(dim=-1)).clamp(min=0.0) if self.null else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _UnnormalizedWeights(GivenWeights):
    """The same of an operation whose rows have no fixed sum."""

    normalized: ClassVar[bool] = False


@dataclasses.dataclass
class GivenCall(AttentionCall):
    """A call of which the weights are known and nothing else.

    Its queries, keys and values are NaN of width one: whoever reads them without saying so in ``needs`` (``vectors``) gets NaN
    and not a number that looks like one.

    Attributes:
        given: ``(batch, num_heads, q_len, kv_len)``, the weights, in any floating-point dtype.
    """

    given: Tensor = dataclasses.field(kw_only=True)
    has_scores: ClassVar[bool] = False

    def scores(self, query_start: int, query_stop: int) -> Tensor:
        given = self.given[:, :, query_start:query_stop]
        return given.to(torch.promote_types(given.dtype, torch.float32))


def given_call(
    weights: Tensor,
    site: Site,
    rule: Visibility,
    queries: Positions,
    keys: Positions,
    *,
    key_tokens: Tensor | None = None,
    row_sums: RowSums = "one",
    cached_keys: int = 0,
) -> GivenCall:
    """The call of some weights.

    Args:
        weights: ``(batch, num_heads, q_len, kv_len)``.
        rule: which keys a query sees, besides padding.
        queries, keys: where they stand; -1 is padding, which is neither measured nor seen.
        key_tokens: ids, int64 ``(batch, kv_len)``, where they are known.
        row_sums: see :data:`RowSums`.
    """
    weights = weights.detach()
    batch, heads, q_len, kv_len = weights.shape
    unknown = torch.full((), float("nan"), dtype=weights.dtype, device=weights.device)
    real = keys.positions >= 0
    visible = rule if bool(real.all()) else Keys(real) if isinstance(rule, Everything) else rule & Keys(real)
    operation = _UnnormalizedWeights() if row_sums == "any" else GivenWeights(null=row_sums == "null_mass")
    return GivenCall(
        site=site,
        queries=unknown.expand(batch, heads, q_len, 1),
        keys=unknown.expand(batch, heads, kv_len, 1),
        values=unknown.expand(batch, heads, kv_len, 1),
        scaling=1.0,
        visible=visible,
        operation=operation,
        query_positions=queries.positions,
        key_positions=keys.positions,
        query_documents=queries.documents,
        key_documents=keys.documents,
        sink_scores=unknown.expand(1, heads, 1) if row_sums == "null_mass" else None,
        key_tokens=key_tokens,
        cached_keys=cached_keys,
        given=weights,
    )


FaultKind: TypeAlias = Literal["number", "negative", "hidden", "future", "sum"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why some weights cannot be attention weights under the rule that they are said to follow.

    Attributes:
        kind: ``number`` (NaN or infinite), ``negative``, ``hidden`` (weight on a key that the query does not see), ``future``
            (the same, and the key comes later) or ``sum``.
        text: where, and what was found.
    """

    kind: FaultKind
    text: str


def row_tolerance(weights: Tensor) -> float:
    """How far the sum of a row of a softmax may be from one.

    Weights that are rounded to their dtype one by one (relative error u = eps / 2) change a sum of one by at most u; the
    softmax itself divides by a float32 sum of ``kv_len`` terms, each rounded by 2⁻²⁴ at most. Four times the one and
    twice the other are allowed.
    """
    return 2.0 * max(torch.finfo(weights.dtype).eps, 2.0**-23) + 2.0 * weights.shape[-1] * 2.0**-24


def find_fault(call: GivenCall, row_sums: RowSums, tolerance: float | None = None) -> tuple[Fault | None, float]:
    """What is wrong with the weights of a call, the first thing found, and the largest distance of a row sum from one.

    Rows of padding are not looked at: a masked softmax leaves anything there.

    Args:
        tolerance: of row sums and of hidden keys; :func:`row_tolerance` by default.
    """
    allowed = row_tolerance(call.given) if tolerance is None else tolerance
    largest = 0.0
    for start, stop in call.blocks():
        counted = call.counted[:, None, start:stop, None]
        weights = call.scores(start, stop).masked_fill(~counted, 0.0)
        visible = call.visible.block(start, stop, 0, call.kv_len)
        unseen = (weights > allowed) & ~visible
        checks: tuple[tuple[FaultKind, Tensor], ...] = (
            ("number", ~torch.isfinite(weights)),
            ("negative", weights < 0),
            ("future", unseen & (call.key_positions[:, None, None] > call.query_positions[:, None, start:stop, None])),
            ("hidden", unseen),
        )
        for kind, bad in checks:
            if bool(bad.any()):
                sample, head, query, key = (int(index) for index in bad.nonzero()[0])
                value = f"{float(weights[sample, head, query, key]):.4g}"
                return Fault(kind, f"sample {sample}, head {head}, query {start + query} gives {value} to key {key}"), largest
        if row_sums == "any":
            continue
        excess = (weights.sum(dim=-1) - 1.0).masked_fill(~counted[..., 0], 0.0)
        excess = excess.clamp(min=0.0) if row_sums == "null_mass" else excess.abs()
        largest = max(largest, float(excess.max()))
        if largest > allowed:
            sample, head, query = (int(index) for index in (excess > allowed).nonzero()[0])
            total = float(weights[sample, head, query].sum())
            return Fault("sum", f"sample {sample}, head {head}, query {start + query} sums to {total:.6g}"), largest
    return None, largest


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far weights look from their query, back and ahead, in keys; and how far they could under the rule of the call.

    Where they look less far than they could, in no head and no sample, the model has a window that the rule does not know: keys
    would be compared by queries that cannot see them.
    """

    back: int
    ahead: int
    possible_back: int
    possible_ahead: int

    @property
    def whole(self) -> bool:
        """Whether somebody looks as far as the rule lets him."""
        return (self.back, self.ahead) == (self.possible_back, self.possible_ahead)


def reach(call: GivenCall) -> Reach:
    """How far the weights of a call look; -1 in a direction in which nothing is seen."""
    found: list[int] = [-1, -1, -1, -1]
    offset = call.kv_len - call.q_len
    for start, stop in call.blocks():
        counted = call.counted[:, None, start:stop, None]
        seen = call.visible.block(start, stop, 0, call.kv_len) & counted
        looked = (call.given[:, :, start:stop] > 0) & seen
        queries = torch.arange(start, stop, device=seen.device)[:, None] + offset
        distance = queries - torch.arange(call.kv_len, device=seen.device)
        for number, (pairs, signed) in enumerate(
            ((looked, distance), (looked, -distance), (seen, distance), (seen, -distance))
        ):
            found[number] = max(found[number], int(signed.masked_fill(~pairs.any(0).any(0), -1).max()))
    return Reach(*found)
