"""Attention on one token repeated: what softmax attention does when only the position tells two tokens apart.

With no positional term in the embeddings, copies of one token have the same hidden state at every layer, by induction: weights
that sum to one give every position the same mixture of equal values. What is left of the scores is a function of distance.
Gu et al. 2024 (arXiv 2410.10781) conclude that the sink disappears; these are their closed forms. Absolute and learned
positions break the equality at the embeddings, and none of this holds for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.errors import InputError

__all__ = ["alibi_weights", "relative_weights", "rotary_bounds", "uniform_weights"]


def uniform_weights(length: int) -> Tensor:
    """Without positions: ``A[t, i] = 1/t`` for the ``t`` keys that query ``t`` sees; float64 ``(length, length)``."""
    return relative_weights(torch.zeros(_positive(length), dtype=torch.float64))


def relative_weights(bias: Tensor) -> Tensor:
    """With a score ``g(d)`` for distance ``d``: ``A[t, i] = exp g(t-i) / Σ_j exp g(t-j)``.

    It also serves rotary positions, under which copies of one token have scores ``g(d) = q · R_d k``. The first key is the
    farthest; its weight is at most ``1/t`` where ``g`` does not grow with the distance, and at least ``1/t`` where it does not
    fall.

    Args:
        bias: ``g(0), g(1), …``, ``(..., length)``.

    Returns:
        float64 ``(..., length, length)``, 0 above the diagonal.

    Raises:
        InputError: no distance, or a bias that is not finite.
    """
    length = _positive(bias.shape[-1])
    if not bool(torch.isfinite(bias).all()):
        raise InputError("relative_weights: the bias has values that are not finite")
    index = torch.arange(length, device=bias.device)
    distance = index[:, None] - index
    scores = bias.to(torch.float64)[..., distance.clamp(min=0)].masked_fill(distance < 0, float("-inf"))
    return torch.softmax(scores, dim=-1)


def alibi_weights(slope: Tensor | float, length: int) -> Tensor:
    """With ALiBi (``g(d) = -m d``): ``A[t, i] = exp(-m (t-i)) (1 - exp(-m)) / (1 - exp(-m t))``, a geometric series.

    The first key has less than ``1/t`` for every ``t > 1``, and exponentially little for far queries.

    Args:
        slope: ``m``, positive; any shape.

    Returns:
        float64 ``(..., length, length)``, 0 above the diagonal.

    Raises:
        InputError: a slope that is not positive: without slope there is no series to sum, and the weights are uniform.
    """
    slopes = torch.as_tensor(slope, dtype=torch.float64)[..., None, None]
    if not bool((slopes > 0).all()):
        raise InputError("alibi_weights: slopes must be positive; for 0 use uniform_weights")
    index = torch.arange(_positive(length), device=slopes.device)
    distance = index[:, None] - index
    # expm1 keeps the digits of small slopes.
    weights = torch.exp(-slopes * distance) * torch.expm1(-slopes) / torch.expm1(-slopes * (index[:, None] + 1))
    return weights.masked_fill(distance < 0, 0.0)


def rotary_bounds(norms: Tensor | float, length: int) -> tuple[Tensor, Tensor]:
    """With rotary positions every weight of a row of ``t`` keys lies between these, and both tend to 0 as ``t`` grows::

        1 / (1 + (t-1) e^{2ξ})  ≤  A[t, i]  ≤  e^{2ξ} / (e^{2ξ} + t-1)

    since rotations keep norms and so every score lies in ``[-ξ, ξ]``. The upper one is the paper's.

    Args:
        norms: ``ξ``, an upper bound on ``|q| |k| · scaling``; at least 0, any shape.

    Returns:
        Lower and upper bound, float64 ``(..., length)``: by query, whichever the key.

    Raises:
        InputError: a negative or non-finite norm.
    """
    reach = torch.as_tensor(norms, dtype=torch.float64)[..., None]
    if not bool(torch.isfinite(reach).all()) or bool((reach < 0).any()):
        raise InputError("rotary_bounds: norms must be finite and at least 0: products of the norms of queries and keys")
    # ln 0 for a single key: both bounds are then 1.
    others = torch.log(torch.arange(_positive(length), dtype=torch.float64, device=reach.device))
    return torch.sigmoid(-2 * reach - others), torch.sigmoid(2 * reach - others)


def _positive(length: int) -> int:
    if length < 1:
        raise InputError(f"length {length} must be at least 1")
    return length
