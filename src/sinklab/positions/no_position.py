"""No positions (NoPE): the model gets no positions, and learns order from the causal mask alone."""

from __future__ import annotations

from sinklab.positions.base import PositionScheme
from sinklab.registry import positions


@positions.register("no_position")
class NoPosition(PositionScheme):
    """Adds nothing and rotates nothing. Kazemnejad et al. 2023 (arXiv 2305.19466).

    On one token repeated, all hidden states are equal and every query weighs its ``t`` keys by ``1/t``.
    """
