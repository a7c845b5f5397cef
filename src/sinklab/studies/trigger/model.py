"""TriggerModel: nothing but attention, as released for the trigger task, with any operation in the place of softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from sinklab.attention.operation import HeadShape, Inputs, Operation, bind, state_of
from sinklab.attention.paths.table import compute

INITIAL_STD = 0.02
"""Standard deviation of all maps at the start, as released; parameters of an operation start as the operation says."""


class TriggerAttention(nn.Module):
    """Causal heads of the full width: maps without bias, scores that are not divided by anything.

    Args:
        width: coordinates of a token and of every head.
        heads: their outputs are concatenated and mapped from ``heads · width`` back to ``width``.
        operation: how scores become weights; its learned parameters are those of this layer.
    """

    def __init__(self, width: int, heads: int, operation: Operation) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, heads * width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(heads * width, width, bias=False)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=INITIAL_STD)
        self.operation: Operation
        bind(self, operation, HeadShape(heads, heads, width, width, width))

    def forward(self, inputs: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Outputs ``(batch, length, width)``; where asked for, weights ``(batch, heads, length, length)``, which costs time."""
        queries, keys, values = self.projected(inputs)
        state = state_of(self, self.operation, inputs)
        call = Inputs(queries, keys, values, visible=None, causal=True, scaling=1.0, state=state)
        outputs, weights = compute(self.operation, call, need_weights=need_weights)
        return self.o_proj(outputs.transpose(1, 2).flatten(2)), weights

    def null_mass(self, inputs: Tensor) -> Tensor | None:
        """Null mass, ``(batch, heads, length)``, or ``None`` where the operation does not define one."""
        operation, state = self.operation, state_of(self, self.operation, inputs)
        queries, keys, _ = self.projected(inputs)
        queries, keys = operation.features(queries, keys, state)
        return operation.null_mass(queries @ keys.mT, causal(inputs), operation.null_scores(queries, 1.0, state))

    def value_output(self) -> Tensor:
        """``W_O W_V`` of every head, ``(heads, width, width)``, with ``output = Σ_k weight_k · W_O W_V x_k``."""
        like = self.o_proj.weight.new_ones(())
        values = self.v_proj(torch.eye(self.width).to(like)).unflatten(-1, (self.heads, self.width))  # [x, h, v]
        own = torch.eye(self.heads).to(like)[:, None, :, None] * values  # [h, x, h, v]: the other heads at 0
        return self.o_proj(own.flatten(2)).mT

    def projected(self, inputs: Tensor) -> Iterator[Tensor]:
        """Queries, keys and values, each ``(batch, heads, length, width)``."""
        split = (*inputs.shape[:-1], self.heads, self.width)
        return (linear(inputs).view(split).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj))


class TriggerModel(nn.Module):
    """The two models of Ran-Milo 2026 (arXiv 2603.11487), as released.

    One layer with one head stands alone: its output is the answer. With more of either there is a residual connection round
    every layer, and the answer is the input plus the update. No feed-forward, no norm, no positions.

    Args:
        operation: for example ``Softmax()``, or ``Relu(uncounted=1)``, which divides by ``max(i - 1, 1)`` as released.
        layers, heads: at least 1 each.
        width: coordinates of a token, at least 4; 16 in the paper.

    Attributes:
        front: learned tokens that the operation asks for, ``(count, width)``; they come before all others and are not part of
            the output.
    """

    def __init__(self, operation: Operation, layers: int = 1, heads: int = 1, width: int = 16) -> None:
        super().__init__()
        self.operation, self.residual = operation, layers > 1 or heads > 1
        self.front = nn.Parameter(torch.normal(0.0, INITIAL_STD, (operation.tokens_in_front, width)))
        self.layers = nn.ModuleList(TriggerAttention(width, heads, operation) for _ in range(layers))

    @property
    def attention(self) -> Sequence[TriggerAttention]:
        """The layers."""
        return cast("Sequence[TriggerAttention]", self.layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Answers ``(batch, length, width)``; attention takes the fastest path that the operation has."""
        states = self.begin(inputs)
        for layer in self.attention:
            update, _ = layer(states)
            states = states + update if self.residual else update
        return states[:, len(self.front) :]

    def with_weights(self, inputs: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """Answers, and per layer the weights ``(batch, heads, front + length, front + length)`` and the null mass.

        Null masses are ``(batch, heads, length)``, or ``None`` where the operation does not define one.
        """
        states, weights, masses = self.begin(inputs), [], []
        for layer in self.attention:
            update, layer_weights = layer(states, need_weights=True)
            mass = layer.null_mass(states)
            masses.append(None if mass is None else mass[..., len(self.front) :])
            weights.append(layer_weights)
            states = states + update if self.residual else update
        return states[:, len(self.front) :], weights, masses

    def begin(self, inputs: Tensor) -> Tensor:
        """The tokens, with those in front."""
        return torch.cat((self.front.expand(len(inputs), -1, -1), inputs), dim=1) if len(self.front) else inputs


def causal(inputs: Tensor) -> Tensor:
    """Boolean ``(length, length)``: every token sees itself and those before it."""
    return torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool, device=inputs.device).tril()
