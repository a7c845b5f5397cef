"""When a constant key–value bias replaces a sink, and by how much a head's output changes where it does not quite.

A query gives its sink the weight ``p``, the sink says ``v``, and all other keys together say ``c`` (their mean by the weights
that they have among themselves); the head writes ``(1 - p) c + p v``. A bias whose score is off by ``e`` has the weight ``p'``
with ``logit p' = logit p + e``, whatever the other keys are, and says ``v'``. Then, exactly::

    change of the output  =  (p' - p) (v' - c)  +  p (v' - v)

It is 0 whatever ``c`` is if and only if ``e = 0`` and ``v' = v``: two contents with different changes show any ``p' ≠ p``, and
``p > 0`` does the rest. So one bias with the score ``q · k* + b``, of the query before rotation, replaces the sink without
error if and only if the sink's scores are an affine function of those queries and its value is the same at all of them. Gu et
al. 2024 (arXiv 2410.10781) find that sinks act as key biases; the second term is what a bias without a value leaves out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weight_change(weight: Tensor, score_error: Tensor) -> Tensor:
    """``p' - p``: how much more a key has whose score is off by ``e`` (broadcastable), all other scores as they are: float64,
    in (-1, 1), ``p (1 - p) (exp e - 1) / (1 + p (exp e - 1))``."""
    p, grown = weight.to(torch.float64), torch.expm1(score_error.to(torch.float64).clamp(max=700.0))
    return p * (1 - p) * grown / (1 + p * grown)


def weight_change_bound(score_error: Tensor) -> Tensor:
    """Most that a weight can change whatever it is, float64: ``tanh(|e| / 4)``, less than ``|e| / 4`` (ours). Attained at ``p
    = σ(-e / 2)``, which becomes ``σ(e / 2)``: the logistic function is steepest at 0 and even about it."""
    return torch.tanh(score_error.to(torch.float64).abs() / 4)


def output_change(weight: Tensor, score_error: Tensor, content: Tensor, value: Tensor, constant: Tensor) -> Tensor:
    """What a head writes with the bias in the place of its sink, less what it writes with the sink: float64 ``(...,
    value_dim)``.

    Args:
        weight, score_error: ``(...)``, of every query.
        content, value, constant: ``c`` ``(..., value_dim)``; ``v`` of the sink and ``v'`` of the bias, broadcastable to it.
    """
    content, value, constant = (tensor.to(torch.float64) for tensor in (content, value, constant))
    changed = weight_change(weight, score_error)[..., None] * (constant - content)
    return changed + weight.to(torch.float64)[..., None] * (constant - value)


def output_change_bound(weight: Tensor, score_error: Tensor, content: Tensor, value: Tensor, constant: Tensor) -> Tensor:
    """Bound on the norm of :func:`output_change`, float64 ``(...)``: ``tanh(|e|/4) |v' - c| + p |v' - v|`` (ours). Attained
    where ``p = σ(-e/2)``, and ``v' - v`` points where ``v' - c`` does, or against it where ``e < 0``."""
    content, value, constant = (tensor.to(torch.float64) for tensor in (content, value, constant))
    by_score = weight_change_bound(score_error) * (constant - content).norm(dim=-1)
    return by_score + weight.to(torch.float64) * (constant - value).norm(dim=-1)
