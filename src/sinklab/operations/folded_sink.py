"""Folded sink: an explicit score and value for nothing in place of the tokens on which a trained model rests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from sinklab.attention.operation import HeadShape, State
from sinklab.operations._bias import NO_SCORE
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations


@operations.register("folded_sink")
@dataclass(frozen=True, kw_only=True)
class FoldedSink(Softmax):
    """Softmax over the visible keys but the sinks, and a null score ``q · k* + c`` with a value ``v*``; in [0, 1).

    ``q`` is the query before rotation, ``k*``, ``c`` and ``v*`` are constants: what a key on which a head rests is to it, in
    closed form (:func:`sinklab.fold_sinks`). The null score's share is the null mass, so weights and null mass sum to one;
    times ``v*`` it is added to the output. Gu et al. 2024 (arXiv 2410.10781) find that sinks act as key biases; this is one
    with a value, whose score does not turn with the position.

    Keys of the sinks are hidden from all queries but their own, which see no null score either, so that the hidden state of a
    sink stays what it was. A sink is a token at one of ``positions`` behind the start of its text; its key is set to zero
    before it is cached, and by that is known. All of it holds in the key–value heads that are folded
    (:attr:`~sinklab.attention.operation.HeadShape.folded`, by default all); the others are softmax.

    The parameters are ``key``, ``(num_heads, head_dim)``, in units of the score, and ``constant``, ``(num_heads,)``, of query
    heads, and ``value``, ``(num_kv_heads, value_dim)``; zero at the start.

    Args:
        positions: of the sinks, counted from the token that begins a text; of an encoder from its first token.
    """

    positions: tuple[int, ...] = (0,)
    folds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(self.positions))
        fine = bool(self.positions) and all(isinstance(one, int) and one >= 0 for one in self.positions)
        self.require(fine, f"positions = {list(self.positions)} must be positions from 0 on")

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        if shape.folded == ():
            return {}
        constant = torch.full((shape.num_kv_heads,), NO_SCORE)
        constant[list(range(shape.num_kv_heads) if shape.folded is None else shape.folded)] = 0.0
        return {
            "key": torch.zeros(shape.num_heads, shape.head_dim),
            "constant": constant.repeat_interleave(shape.num_heads // shape.num_kv_heads),
            "value": torch.zeros(shape.num_kv_heads, shape.value_dim),
        }

    def null_scores(self, queries: Tensor, scaling: float, state: State) -> Tensor | None:
        if "key" not in state:
            return None
        unrotated, key = state.get("unrotated", queries), state["key"]
        dtype = torch.promote_types(unrotated.dtype, torch.float32)
        if unrotated.shape[2] == 1:
            product = (unrotated * key[:, None].to(dtype)).sum(-1)
        else:  # heads lie beside each other: one product with a block for each head reads them where they are
            product = linear(unrotated.transpose(1, 2).flatten(2).to(dtype), torch.block_diag(*key.to(dtype))).transpose(1, 2)
        scores = product + state["constant"].to(dtype)[:, None]
        return scores if "sinks" not in state else scores.masked_fill(state["sinks"][:, None], NO_SCORE)

    def null_value(self, state: State) -> Tensor | None:
        if "key" not in state:
            return None
        value, heads = state["value"], state["key"].shape[0]
        return value[:, None].expand(-1, heads // len(value), -1).reshape(heads, -1)
