"""Least norm of a convex combination with and without one of the vertices, and how much weight that one needs.

The vertices are what the keys of an attention head would write, and the one is its sink: see
``no_op_certificate.py``. All quantities come with an upper bound, weights that attain it, and a lower bound, a plane that
separates.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.studies.theory.nearest_point import nearest_to_origin

__all__ = ["Certificate", "certify_hulls", "needed_sink_weight"]

_CUTS = 20
"""Planes tried for the needed weight. Each squares the error: a handful is enough unless delta is only just attainable."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Bounds for every head and query; all float64 of one shape, such as ``(heads, q_len)``.

    A query that was not asked has ``counted`` false, and the other fields say nothing of it.

    Attributes:
        counted: boolean.
        scale: largest norm of a visible ``u_k``; gaps between upper and lower bounds are at most the tolerance times this.
        with_upper, with_lower: least norm of the output over all visible keys.
        without_upper, without_lower: the same with the sink left out.
        chosen_weight: weight on the sink in the point behind ``with_upper``.
        sink_norm: norm of the sink's own ``u_k``.
        delta: the output norm that was asked about, if any.
        needed_lower, needed_upper: between these lies the least weight on the sink with which an output of norm ``delta`` is
            possible: without at least ``needed_lower`` it is not, with ``needed_upper`` it is. 0 where the sink is not needed;
            infinite where nothing was found (upper), or nothing exists (both).
    """

    counted: Tensor
    scale: Tensor
    with_upper: Tensor
    with_lower: Tensor
    without_upper: Tensor
    without_lower: Tensor
    chosen_weight: Tensor
    sink_norm: Tensor
    delta: Tensor | None = None
    needed_lower: Tensor | None = None
    needed_upper: Tensor | None = None

    @property
    def gap(self) -> Tensor:
        """How much the sink certainly lowers the least output: ``without_lower - with_upper``, at least minus the tolerance."""
        return self.without_lower - self.with_upper


@torch.no_grad()
def certify_hulls(
    gram: Tensor,
    visible: Tensor,
    sink: Tensor | int,
    *,
    delta: Tensor | float | None = None,
    tolerance: float = 1e-4,
    asked: Tensor | None = None,
) -> Certificate:
    """The certificate from Gram matrices: 16 heads, 64 queries and 64 keys take well below a second.

    Args:
        gram: ``u_k · u_l``, ``(heads, kv_len, kv_len)``: ``V W_Oᵀ W_O Vᵀ`` for values ``V`` and the head's columns of ``W_O``.
        visible: boolean ``(heads, q_len, kv_len)``.
        sink: index of the sink key, for all or ``(heads, q_len)``; every query must see it.
        delta: output norm at least 0, for all or ``(heads, q_len)``, for which the needed weight is to be found.
        tolerance: largest difference of upper and lower bound, relative to ``scale``.
        asked: boolean ``(heads, q_len)``: queries to certify; all by default.

    Raises:
        InputError: values that are not finite, a query that does not see the sink and another key, or a negative delta.
        MeasurementError: the bounds do not meet.
    """
    heads, q_len = visible.shape[:2]
    sinks = torch.as_tensor(sink, device=visible.device).expand(heads, q_len)
    asked = torch.ones_like(visible[..., 0]) if asked is None else asked
    if bool(((sinks < 0) | (sinks >= visible.shape[-1])).any()):
        raise InputError(f"sink {sink} is not the index of a key; there are {visible.shape[-1]}")
    _require_two_keys(visible, sinks, asked)
    members = visible & asked[..., None]
    others = members.scatter(2, sinks[..., None], False)
    without = nearest_to_origin(gram, others, tolerance=tolerance)
    whole = nearest_to_origin(gram, members, start=without.weights, tolerance=tolerance)
    norms = gram.diagonal(dim1=1, dim2=2).to(torch.float64).clamp(min=0).sqrt()
    certificate = Certificate(
        counted=asked,
        scale=whole.scale,
        with_upper=whole.upper,
        with_lower=whole.lower,
        without_upper=without.upper,
        without_lower=without.lower.maximum(whole.lower),  # fewer keys come no nearer to 0
        chosen_weight=whole.weights.gather(2, sinks[..., None])[..., 0],
        sink_norm=norms.gather(1, sinks),
    )
    if delta is None:
        return certificate
    deltas = torch.as_tensor(delta, dtype=torch.float64, device=gram.device).expand(heads, q_len)
    lower, upper = needed_sink_weight(gram, others, sinks, deltas, certificate, tolerance=tolerance)
    return dataclasses.replace(certificate, delta=deltas, needed_lower=lower, needed_upper=upper)


def _require_two_keys(visible: Tensor, sinks: Tensor, counted: Tensor) -> None:
    alone = counted & (visible.sum(-1) < 2)
    if bool(alone.any()):
        head, query = torch.nonzero(alone)[0].tolist()
        raise InputError(
            f"query {query} of head {head} sees {int(visible[head, query].sum())} keys; a certificate compares the sink with "
            "other keys and needs at least two. Leave such queries out (asked)"
        )
    blind = counted & ~visible.gather(2, sinks[..., None])[..., 0]
    if bool(blind.any()):
        head, query = torch.nonzero(blind)[0].tolist()
        raise InputError(
            f"query {query} of head {head} does not see its sink, key {int(sinks[head, query])}; leave such queries out (asked)"
        )


@torch.no_grad()
def needed_sink_weight(
    gram: Tensor, others: Tensor, sinks: Tensor, delta: Tensor, certificate: Certificate, *, tolerance: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Bracket the least weight ``a`` on the sink with which an output of norm ``delta`` is possible.

    The least output norm ``D(a)`` with exactly this weight is a convex function. At ``a``, the plane behind the lower bound of
    ``D(a)`` bounds ``D`` everywhere by a line; where the line meets ``delta`` is a weight that certainly does not suffice. That
    is Newton's method from the left, begun at 0, where the plane is that of the hull without the sink. From the right, chords
    of upper bounds lie above ``D``.

    Args:
        gram, delta: as for :func:`certify_hulls`.
        others: boolean ``(heads, q_len, kv_len)``: visible keys without the sink; none where a query is not asked.
        sinks: int64 ``(heads, q_len)``.
        certificate: of the same.

    Returns:
        Lower and upper end, float64 ``(heads, q_len)``, as in :class:`Certificate`.

    Raises:
        InputError: a delta that is negative or not a number.
    """
    counted = certificate.counted
    if not bool(((delta >= 0) | ~counted).all()):
        raise InputError(f"delta {float(delta[counted].min())} must be at least 0: it is the norm of an output")
    gram = gram.to(torch.float64)
    infinite = torch.full_like(delta, float("inf"))
    lower, feasible = torch.zeros_like(delta), certificate.with_upper <= delta
    lower = torch.where(counted & (certificate.with_lower > delta), infinite, lower)
    # The right end: the nearest point of the whole hull and its weight on the sink.
    upper = torch.where(feasible, certificate.chosen_weight, infinite)
    at, start = lower.clone(), None
    for _ in range(_CUTS):
        open_ = counted & torch.isfinite(lower) & (upper - lower > tolerance)
        if not bool(open_.any()):
            break
        at = torch.where(open_, lower, 0.0)
        point = nearest_to_origin(gram, others & open_[..., None], pull=(sinks, at), start=start, tolerance=tolerance)
        start = point.weights
        # From the left: the component along the point y = a u_s + (1 - a) z of the sink, and the least of the other keys.
        of_sink = gram.gather(1, sinks[..., None].expand(-1, -1, gram.shape[-1]))
        inner = torch.matmul(point.weights, gram)
        along = at[..., None] * of_sink + (1 - at)[..., None] * inner
        norm = point.upper.where(open_ & (point.upper > 0), 1.0)
        others_along = along.masked_fill(~others, float("inf")).amin(-1).where(open_, 0.0) / norm
        sink_along = along.gather(2, sinks[..., None])[..., 0] / norm
        falls = others_along > sink_along
        root = (others_along - delta) / (others_along - sink_along).where(falls, 1.0)
        proven = open_ & (point.lower > delta)
        cut = torch.where(falls, root, infinite)
        cut = torch.where(cut > 1, infinite, cut)  # the line is above delta up to the whole weight: nothing is enough
        moved = torch.where(proven, cut.maximum(lower), lower)
        # From the right: D lies below the chord from here to the right end.
        reached = open_ & (point.upper <= delta)
        share = (point.upper - delta) / (point.upper - certificate.with_upper).where(point.upper > certificate.with_upper, 1.0)
        chord = at + (certificate.chosen_weight - at) * share
        sloped = open_ & feasible & (point.upper > delta) & (certificate.chosen_weight > at)
        upper = torch.where(reached, upper.minimum(at), torch.where(sloped, upper.minimum(chord), upper))
        stuck = not bool((moved > lower).any())
        lower = moved
        if stuck:
            break
    return lower.minimum(upper), upper  # rounding may bring the ends past each other
