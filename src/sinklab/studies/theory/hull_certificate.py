"""Least norm of a convex combination with and without one of the vertices, and how much weight that one needs; the vertices
are what the keys of an attention head would write, and the one is its sink (``no_op_certificate.py``). All quantities come
with an upper bound, weights that attain it, and a lower bound, a plane that separates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sinklab.errors import InputError, MeasurementError

_STEPS = 8
"""Pairwise steps between corrections."""
_CORRECTIONS = 64
"""Corrections in a row at most: one that is stopped drops the vertex that stopped it, and another follows."""
_JITTER = 1e-13
"""Added to the diagonal of the correction's system, relative to the largest squared norm; only a direction is taken from it."""
_BLOCK_NUMBERS = 1 << 22
"""Numbers in the largest intermediate tensor: 32 MiB in float64."""
_ROUNDING = 2.0**-52
"""Twice the unit roundoff of float64: a product of two combinations of ``n`` vectors is wrong by at most ``n`` of these times
the largest squared norm, and the sum of products by two more."""
_TYPICAL = 128
"""Vertices in use at most, for the size of blocks; there are no more than dimensions and one."""


@dataclasses.dataclass(frozen=True)
class NearestPoint:
    """For every hull the nearest point found, and the proof; ``weights`` are float64 ``(groups, hulls, vertices)``, not
    negative, sum 1, the others ``(groups, hulls)``: norm of the point (infinite for a hull without a vertex); no point of the
    hull has a smaller norm than ``lower``; and the largest norm of a vertex, or of what they are pulled to."""

    weights: Tensor
    upper: Tensor
    lower: Tensor
    scale: Tensor


@contextmanager
def _one_thread() -> Iterator[None]:
    """The solver multiplies thousands of small matrices, on which several threads wait for one another many times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@_one_thread()
def nearest_to_origin(
    gram: Tensor,
    members: Tensor,
    *,
    pull: tuple[Tensor, Tensor] | None = None,
    start: Tensor | None = None,
    tolerance: float = 1e-4,
    max_rounds: int = 1000,
) -> NearestPoint:
    """Solve ``min |Σ p_k v_k|`` over probability vectors ``p`` on the members of every hull.

    Args:
        gram: ``v_k · v_l``, ``(groups, vertices, vertices)``, symmetric and positive semidefinite; of all hulls of a group.
        members: boolean ``(groups, hulls, vertices)``.
        pull: an index ``s`` (int64) and a share ``a`` in [0, 1] for every hull, each ``(groups, hulls)``: its vertices are
            then ``a v_s + (1 - a) v_k``.
        start: weights to start from; by default all weight is on the shortest vertex.
        tolerance: largest ``upper - lower``, relative to ``scale``; at least 1e-6, about what float64 can prove of a hull of
            some thousand vertices that holds the origin.
        max_rounds: of eight steps and the corrections behind them; tens are usual.

    Raises:
        InputError: values that are not finite, or a tolerance below 1e-6.
        MeasurementError: the gap is still larger after ``max_rounds``.
    """
    if not bool(torch.isfinite(gram).all()):
        raise InputError("the vectors of a hull have values that are not finite; nothing can be said about it")
    if not tolerance >= 1e-6:
        raise InputError(f"tolerance {tolerance} must be at least 1e-6 of the longest vector: float64 proves little less")
    gram = gram.detach().to(torch.float64)
    squares = gram.diagonal(dim1=1, dim2=2)
    largest = squares[:, None].expand_as(members).masked_fill(~members, 0.0).amax(-1)
    if pull is not None:
        largest = largest.maximum(squares.gather(1, pull[0]))
    scale = largest.clamp(min=0).sqrt()
    weights = _shortest(squares, members) if start is None else start.to(torch.float64).clone()
    upper, lower = torch.full_like(scale, float("inf")), torch.full_like(scale, float("inf"))
    # A hull is a row of its own from here on; a block of them at a time keeps the systems of the corrections small.
    group, hull = torch.nonzero(members.any(-1), as_tuple=True)
    block = max(1, _BLOCK_NUMBERS // min(gram.shape[-1], _TYPICAL) ** 2)
    for some in torch.arange(len(group), device=gram.device).split(block):
        where = group[some], hull[some]
        towards = None if pull is None else (pull[0][where], pull[1][where].to(torch.float64))
        work = _Workspace(_Grams(gram, group[some], towards), members[where], weights[where], scale[where])
        left = work.solve(tolerance, max_rounds)
        if left:
            gap = ((work.upper - work.lower) / work.scale)[work.open].max()
            size = int(work.members.sum(-1).max())
            raise MeasurementError(
                f"{left} of {len(some)} hulls, of up to {size} vectors, have a nearest point that is known only to "
                f"{gap:.1e} of the longest vector after {max_rounds} rounds; expected {tolerance:.1e}. Allow more rounds "
                "or a larger tolerance"
            )
        weights[where], upper[where], lower[where] = work.weights, work.upper, work.lower
    return NearestPoint(weights, upper, lower, scale)


def _shortest(squares: Tensor, members: Tensor) -> Tensor:
    """All weight on the shortest member; on none where there is none."""
    shortest = squares[:, None].masked_fill(~members, float("inf")).argmin(-1)
    return torch.nn.functional.one_hot(shortest, members.shape[-1]).to(squares.dtype) * members


class _Grams:
    """The Gram matrix of every row, from those of the groups: ``(1-a)² G_kl + a(1-a)(G_sk + G_sl) + a² G_ss`` where pulled."""

    def __init__(self, gram: Tensor, group: Tensor, pull: tuple[Tensor, Tensor] | None) -> None:
        self.gram, self.group, self.pull = gram, group, pull

    def __getitem__(self, rows: Tensor) -> _Grams:
        pull = None if self.pull is None else (self.pull[0][rows], self.pull[1][rows])
        return _Grams(self.gram, self.group[rows], pull)

    def times(self, weights: Tensor) -> Tensor:
        """Every vertex times ``Σ w_k v_k``, ``(rows, vertices)``."""
        product = torch.empty_like(weights)
        for number in self.group.unique().tolist():
            rows = self.group == number
            product[rows] = weights[rows] @ self.gram[number]
        if self.pull is None:
            return product
        anchor, share = self.pull
        towards, own = self.gram[self.group, anchor], self.gram[self.group, anchor, anchor]
        total, share = weights.sum(-1, keepdim=True), share[:, None]
        with_anchor = total * towards + (weights * towards).sum(-1, keepdim=True)
        return (1 - share) ** 2 * product + share * (1 - share) * with_anchor + share**2 * total * own[:, None]

    def change(self, best: Tensor, worst: Tensor) -> Tensor:
        """Every vertex times ``v_best - v_worst``, ``(rows, vertices)``."""
        change = self.gram[self.group, best] - self.gram[self.group, worst]
        if self.pull is None:
            return change
        anchor, share = self.pull
        towards = self.gram[self.group, anchor, best] - self.gram[self.group, anchor, worst]
        return (1 - share[:, None]) ** 2 * change + (share * (1 - share) * towards)[:, None]

    def among(self, places: Tensor) -> Tensor:
        """The Gram matrix of a few vertices of every row: int64 ``(rows, few)`` to ``(rows, few, few)``."""
        among = self.gram[self.group[:, None, None], places[:, :, None], places[:, None]]
        if self.pull is None:
            return among
        anchor, share = self.pull
        towards, own = self.gram[self.group[:, None], anchor[:, None], places], self.gram[self.group, anchor, anchor]
        with_anchor, share = towards[:, :, None] + towards[:, None], share[:, None, None]
        return (1 - share) ** 2 * among + share * (1 - share) * with_anchor + share**2 * own[:, None, None]


class _Workspace:
    """Rows of hulls, one each, in the course of being solved; those that are not yet are ``open``."""

    def __init__(self, grams: _Grams, members: Tensor, weights: Tensor, scale: Tensor) -> None:
        self.grams, self.members, self.weights, self.scale = grams, members, weights, scale
        self.products = torch.zeros_like(weights)
        self.upper, self.lower = torch.zeros_like(scale), torch.zeros_like(scale)
        self.open = torch.arange(len(members), device=members.device)

    def solve(self, tolerance: float, max_rounds: int) -> int:
        """Go on until every gap is small enough; how many are not."""
        for round_number in range(max_rounds + 1):
            self._certify()
            gap = self.upper[self.open] - self.lower[self.open]
            self.open = self.open[gap > tolerance * self.scale[self.open]]
            if not len(self.open) or round_number == max_rounds:
                break
            self._improve()
        return len(self.open)

    def _certify(self) -> None:
        """Products afresh, without the rounding errors of many small changes, and both bounds."""
        rows = self.open
        weights, members = self.weights[rows], self.members[rows]
        products = self.grams[rows].times(weights)
        margin = (members.shape[-1] + 2) * _ROUNDING * self.scale[rows] ** 2
        norm = ((weights * products).sum(-1).clamp(min=0) + margin).sqrt()
        least = products.masked_fill(~members, float("inf")).amin(-1) - margin
        self.products[rows], self.upper[rows] = products, norm
        # Divided by more than the norm: a plane that lies behind is moved farther back, and never forward.
        lower = torch.where(norm > 0, least / norm.where(norm > 0, 1.0), 0.0).clamp(min=0)
        self.lower[rows] = torch.minimum(lower, self.upper[rows])  # which rounding may reverse where both are one number

    def _improve(self) -> None:
        rows = self.open
        grams, members = self.grams[rows], self.members[rows]
        weights, products = self.weights[rows], self.products[rows]
        for _ in range(_STEPS):
            _pairwise(grams, members, weights, products)
        stopped = torch.arange(len(rows), device=rows.device)
        for _ in range(_CORRECTIONS):
            again, weights[stopped], products[stopped] = _correct(
                grams[stopped], weights[stopped], products[stopped], self.scale[rows[stopped]]
            )
            stopped = stopped[again]
            if not len(stopped):
                break
        self.weights[rows] = weights / weights.sum(-1, keepdim=True)


def _pairwise(grams: _Grams, members: Tensor, weights: Tensor, products: Tensor) -> None:
    """Move weight, in place, from the worst vertex in use to the best of all: as much as pays, or all of it."""
    best = products.masked_fill(~members, float("inf")).argmin(-1, keepdim=True)
    worst = products.masked_fill(weights <= 0, float("-inf")).argmax(-1, keepdim=True)
    change = grams.change(best[:, 0], worst[:, 0])
    slope = products.gather(1, worst) - products.gather(1, best)
    curvature = change.gather(1, best) - change.gather(1, worst)
    # Two equal vectors have no curvature, and no slope either.
    full_step = torch.where(curvature > 0, slope / curvature.where(curvature > 0, 1.0), 0.0).clamp(min=0)
    amount = full_step.minimum(weights.gather(1, worst))
    weights.scatter_add_(1, best, amount)
    weights.scatter_add_(1, worst, -amount)  # exactly 0 when all of it goes
    products += amount * change


def _correct(grams: _Grams, weights: Tensor, products: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move towards the nearest point of the affine hull of the vertices in use; which rows were stopped, weights, products."""
    used = weights > 0
    few = int(used.sum(-1).max())
    places = used.to(torch.int8).argsort(dim=-1, descending=True)[:, :few]
    used = used.gather(1, places)
    system = torch.where(used[:, :, None] & used[:, None], grams.among(places), 0.0)
    system.diagonal(dim1=1, dim2=2).add_(torch.where(used, (_JITTER * scale**2)[:, None], 1.0))
    factor, failed = torch.linalg.cholesky_ex(system)
    target = torch.cholesky_solve(used[..., None].to(system.dtype), factor)[..., 0]
    total = target.sum(-1, keepdim=True)
    held = weights.gather(1, places)
    direction = target / total - held
    sound = (failed == 0)[:, None] & torch.isfinite(direction).all(-1, keepdim=True) & (total > 0)
    direction = torch.where(sound & used, direction, 0.0)
    along = grams.times(torch.zeros_like(weights).scatter_(1, places, direction))
    slope, curvature = (direction * products.gather(1, places)).sum(-1), (direction * along.gather(1, places)).sum(-1)
    room = torch.where(direction < 0, -held / direction.where(direction < 0, -1.0), float("inf"))
    # The whole way is 1 but for the jitter; more comes only from a direction that is rounding error.
    full_step = torch.where(curvature > 0, -slope / curvature.where(curvature > 0, 1.0), 0.0).clamp(0, 1)
    amount = full_step.minimum(room.amin(-1))[:, None]
    # Rounding must not leave a trace of a vertex that is to go.
    gone = (room <= amount) & (amount > 0)
    left = (held + amount * direction).clamp(min=0).masked_fill(gone, 0.0)
    return gone.any(-1), weights.scatter(1, places, left), products + amount * along


_CUTS = 20
"""Planes tried for the needed weight. Each squares the error: a handful is enough unless delta is only just attainable."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Bounds for every head and query; all float64 of one shape, such as ``(heads, q_len)``.

    Attributes:
        counted: boolean; of a query that was not asked the other fields say nothing.
        scale: largest norm of a visible ``u_k``; gaps between upper and lower bounds are at most the tolerance times this.
        with_upper, with_lower: least norm of the output over all visible keys.
        without_upper, without_lower: the same with the sink left out.
        chosen_weight, sink_norm: weight on the sink in the point behind ``with_upper``; norm of the sink's own ``u_k``.
        needed_lower, needed_upper: between these lies the least weight on the sink with which an output of the norm asked
            about is possible, if one was: 0 where the sink is not needed; infinite where nothing was found (upper), or nothing
            exists (both).
    """

    counted: Tensor
    scale: Tensor
    with_upper: Tensor
    with_lower: Tensor
    without_upper: Tensor
    without_lower: Tensor
    chosen_weight: Tensor
    sink_norm: Tensor
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
        visible: boolean ``(heads, q_len, kv_len)``; ``asked``, ``(heads, q_len)``: queries that see the sink and another key.
        sink, delta: index of the sink key, and output norm for which the needed weight is to be found, each for all or
            ``(heads, q_len)``.
        tolerance: largest difference of upper and lower bound, relative to ``scale``; if they do not meet, MeasurementError.
    """
    heads, q_len = visible.shape[:2]
    sinks = torch.as_tensor(sink, device=visible.device).expand(heads, q_len)
    asked = torch.ones_like(visible[..., 0]) if asked is None else asked
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
    return dataclasses.replace(certificate, needed_lower=lower, needed_upper=upper)


@torch.no_grad()
def needed_sink_weight(
    gram: Tensor, others: Tensor, sinks: Tensor, delta: Tensor, certificate: Certificate, *, tolerance: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Bracket the least weight ``a`` on the sink with which an output of norm ``delta`` is possible; arguments as of
    :func:`certify_hulls`, ``others`` being visible keys without the sink. Lower and upper end, as in :class:`Certificate`.

    The least output norm ``D(a)`` with exactly this weight is convex. At ``a``, the plane behind the lower bound of ``D(a)``
    bounds ``D`` everywhere by a line; where it meets ``delta`` is a weight that certainly does not suffice: Newton's method
    from the left, begun at 0. From the right, chords of upper bounds lie above ``D``."""
    counted = certificate.counted
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
