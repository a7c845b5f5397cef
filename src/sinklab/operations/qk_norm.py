"""QK-norm: queries and keys of one length, so that a score is an angle times a learned gain."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from sinklab.attention.operation import HeadShape, State
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations

__all__ = ["QkNorm"]

EPS = 1e-6
"""Added to the mean square of a query or key before the root."""


@operations.register("qk_norm")
@dataclass(frozen=True, kw_only=True)
class QkNorm(Softmax):
    """Softmax of ``gain · normed queries · normed keys · scaling``; in [0, 1], rows sum to one and there is no null mass.

    Henry et al. 2020 (arXiv 2010.04245) divide queries and keys by their lengths and learn the factor; later models divide by
    the root mean square (Gemma 3, arXiv 2503.19786). The norm is taken after rotary embedding, which preserves lengths, so that
    before and after it are the same; a cache holds keys that are not normed yet. The gain belongs to a query head.

    The parameter is ``gain``, ``(num_heads,)``.

    Args:
        unit_length: norm to length one and let ``gain`` take the place of the usual scaling ``1/sqrt(head_dim)``: the score is
            ``gain · cos`` of the angle. Otherwise the root mean square becomes one, and the score is
            ``gain · sqrt(head_dim) · cos``.
        initial: gain at the start, positive. With ``unit_length``, Henry et al. start at ``log2(L² - L)`` for sequences of L
            tokens, which is 16 for 256.

    Raises:
        ConfigurationError: ``initial`` is not positive; or ``unit_length`` in a model with another scaling (T5, Granite).
    """

    unit_length: bool = False
    initial: float = 1.0

    def __post_init__(self) -> None:
        self.require(math.isfinite(self.initial) and self.initial > 0, f"initial = {self.initial} must be a positive gain")

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        self.require(
            not self.unit_length or shape.scaling is None,
            f"the model scales scores by {shape.scaling or 0:g} and not by 1/sqrt({shape.head_dim}), so that gain would not "
            "take its place; leave unit_length out",
        )
        return {"gain": torch.full((shape.num_heads,), float(self.initial))}

    def features(self, queries: Tensor, keys: Tensor, state: State) -> tuple[Tensor, Tensor]:
        size = queries.shape[-1]
        dtype = torch.promote_types(queries.dtype, torch.float32)
        gain = state["gain"].to(dtype)[:, None, None]
        if self.unit_length:
            gain = gain / math.sqrt(size)  # both lengths are sqrt(size) after rms_norm, and the host scales by its inverse
        normed = gain * rms_norm(queries.to(dtype), (size,), eps=EPS)
        return normed.to(queries.dtype), rms_norm(keys.to(dtype), (size,), eps=EPS).to(keys.dtype)
