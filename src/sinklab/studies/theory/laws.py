"""Laws of a row of softmax attention: its least entropy (Zhai et al. 2023), and one token repeated (Gu et al. 2024)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sinklab.errors import InputError


def entropy_bound(sigma: Tensor | float, length: Tensor | int) -> Tensor:
    """Least entropy of ``softmax(s)`` over all rows ``s`` of ``length`` scores of norm at most ``sigma``: float64, in nats, in
    ``[0, ln T]``.

    Zhai et al. 2023 (arXiv 2303.06296), Theorem 3.1, with ``T = length`` and ``β = exp(-σ √(T/(T-1)))``: ``ln(1 + (T-1) β) + σ
    √(T(T-1)) β / (1 + (T-1) β)``. Attained by :func:`least_entropy_scores`; falls with ``σ``, for large ones as ``T σ
    exp(-σ)``, so that an upper bound on the norm gives a lower bound on the entropy. Arguments are broadcast.

    Raises:
        InputError: a negative or non-finite ``sigma``.
    """
    norm = torch.as_tensor(sigma, dtype=torch.float64)
    count = torch.as_tensor(length, device=norm.device).to(torch.float64)
    if not bool(torch.isfinite(norm).all()) or bool((norm < 0).any()):
        raise InputError("entropy_bound: sigma must be finite and at least 0: it is the norm of a row of scores")
    others = count - 1
    beta = torch.exp(-norm * torch.sqrt(count / others.clamp(min=1)))
    bound = torch.log1p(others * beta) + norm * torch.sqrt(count * others) * beta / (1 + others * beta)
    return torch.where(others > 0, bound, 0.0)


def least_entropy_scores(sigma: float, length: int) -> Tensor:
    """Scores of norm ``sigma`` whose softmax has the least entropy: one at ``σ √((T-1)/T)``, the others at ``-σ / √(T(T-1))``.

    Returns:
        float64 ``(length,)``, of a length of 2 or more; they sum to 0.
    """
    scores = torch.full((length,), -sigma / (length * (length - 1)) ** 0.5, dtype=torch.float64)
    scores[0] = sigma * ((length - 1) / length) ** 0.5
    return scores


def row_entropy(scores: Tensor) -> Tensor:
    """Entropy in nats of the softmax over the last dimension, float64; a score of minus infinity is a key that is not seen."""
    logarithms = torch.log_softmax(scores.to(torch.float64), dim=-1)
    weights = logarithms.exp()
    return -torch.where(weights > 0, weights * logarithms, 0.0).sum(-1)


def head_score_norm(
    query_weight: Tensor,
    key_weight: Tensor,
    inputs: Tensor,
    *,
    scaling: float = 1.0,
    positions: Literal["none", "rotary"] = "none",
) -> Tensor:
    """Upper bound ``σ`` on the norm of every row of scores of one head, float64 ``(...)``.

    Without positions it is the theorem's ``σ = scaling · ‖W_Kᵀ W_Q‖₂ ‖X Xᵀ‖₂``. Rotary positions rotate each key by itself:
    what is left is ``scaling · ‖W_Q‖₂ ‖W_K‖₂ ‖X‖_F max |x|``.

    Args:
        query_weight, key_weight: ``(head_dim, hidden_size)``, the head's rows of the projections, which must have no bias.
        inputs: ``X``, what enters the attention layer (behind its norm), ``(..., seq_len, hidden_size)``.
    """
    query, key, states = (tensor.detach().to(torch.float64) for tensor in (query_weight, key_weight, inputs))
    if positions == "rotary":
        maps = torch.linalg.matrix_norm(query, 2) * torch.linalg.matrix_norm(key, 2)
        return scaling * maps * torch.linalg.matrix_norm(states) * states.norm(dim=-1).amax(-1)
    # ‖W_Kᵀ W_Q‖ = ‖R_K R_Qᵀ‖ for Wᵀ = Q R with orthonormal Q: a problem of the head's size and not of the model's.
    product = torch.linalg.qr(key.T, mode="r").R @ torch.linalg.qr(query.T, mode="r").R.T
    return scaling * torch.linalg.matrix_norm(product, 2) * torch.linalg.matrix_norm(states, 2) ** 2


def head_entropy_bound(
    query_weight: Tensor, key_weight: Tensor, inputs: Tensor, *, scaling: float = 1.0,
    positions: Literal["none", "rotary"] = "none",
) -> Tensor:  # fmt: skip
    """Least entropy of every row of a causal head, float64 ``(..., seq_len)`` in nats, from its weights and its inputs; see
    :func:`head_score_norm`. A row of ``t`` keys is one of the theorem with ``T = t``. For heads of real models it is often
    near 0."""
    sigma = head_score_norm(query_weight, key_weight, inputs, scaling=scaling, positions=positions)
    return entropy_bound(sigma[..., None], torch.arange(1, inputs.shape[-2] + 1, device=sigma.device))


def uniform_weights(length: int) -> Tensor:
    """Without positions: ``A[t, i] = 1/t`` for the ``t`` keys that query ``t`` sees; float64 ``(length, length)``."""
    return relative_weights(torch.zeros(length, dtype=torch.float64))


def relative_weights(bias: Tensor) -> Tensor:
    """With a score ``g(d)`` for distance ``d``: ``A[t, i] = exp g(t-i) / Σ_j exp g(t-j)``, float64 ``(..., length, length)``.

    It also serves rotary positions, under which copies of one token have scores ``g(d) = q · R_d k``. The weight of the first
    key is at most ``1/t`` where ``g`` does not grow with the distance, and at least ``1/t`` where it does not fall."""
    index = torch.arange(bias.shape[-1], device=bias.device)
    distance = index[:, None] - index
    scores = bias.to(torch.float64)[..., distance.clamp(min=0)].masked_fill(distance < 0, float("-inf"))
    return torch.softmax(scores, dim=-1)


def alibi_weights(slope: Tensor | float, length: int) -> Tensor:
    """With ALiBi (``g(d) = -m d``, positive ``m``): ``A[t, i] = exp(-m (t-i)) (1 - exp(-m)) / (1 - exp(-m t))``, a geometric
    series; float64 ``(..., length, length)``. The first key has less than ``1/t`` for every ``t > 1``, and exponentially
    little for far queries."""
    slopes = torch.as_tensor(slope, dtype=torch.float64)[..., None, None]
    index = torch.arange(length, device=slopes.device)
    distance = index[:, None] - index
    # expm1 keeps the digits of small slopes.
    weights = torch.exp(-slopes * distance) * torch.expm1(-slopes) / torch.expm1(-slopes * (index[:, None] + 1))
    return weights.masked_fill(distance < 0, 0.0)


def rotary_bounds(norms: Tensor | float, length: int) -> tuple[Tensor, Tensor]:
    """With rotary positions every weight of a row of ``t`` keys lies between ``1 / (1 + (t-1) e^{2ξ})`` and ``e^{2ξ} / (e^{2ξ}
    + t-1)``, float64 ``(..., length)`` each, and both tend to 0: rotations keep norms, so every score lies in ``[-ξ, ξ]``. The
    upper one is the paper's.

    Args:
        norms: ``ξ``, an upper bound on ``|q| |k| · scaling``; at least 0, any shape.
    """
    reach = torch.as_tensor(norms, dtype=torch.float64)[..., None]
    # ln 0 for a single key: both bounds are then 1.
    others = torch.log(torch.arange(length, dtype=torch.float64, device=reach.device))
    return torch.sigmoid(-2 * reach - others), torch.sigmoid(2 * reach - others)
