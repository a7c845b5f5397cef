"""The trigger task in theory: how much weight BOS must get where the output is small, and weights that solve the task.

Let a head have weights ``A`` that sum to one over the keys of each query, and write ``M = W_O W_V``. Coordinates 1 and n-1 of
a token add up to 1 for every content token and for the trigger, and to 0 for BOS: they count. If ``M`` leaves the count alone,
the count of an output is the weight off BOS, so that an output near 0 *is* a sink on BOS. If ``M`` does something else, a
functional ``u`` with ``uᵀM x ≈ 1`` on all tokens but BOS counts in its place (:class:`Counter`).

Proved here, for one head whose rows sum to one: the bound with a value map that is known, and that a small error on the task
forces a value map with which one can count (:func:`least_bos_weight_by_error`; Ran-Milo 2026, arXiv 2603.11487, Theorem 1, has
it with high probability over the inputs). Several heads may cancel each other: :func:`cancelling_solution`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError

BOS, TRIGGER, BIAS = 0, 1, -1
"""Coordinates that mark the first token, the trigger, and content tokens."""

Target = Literal["including", "preceding"]
"""The mean at the trigger is over the tokens behind BOS up to the trigger, ``"including"`` it (the released generator) or only
``"preceding"`` it (the paper's words)."""


@dataclasses.dataclass(frozen=True)
class TriggerBatch:
    """Sequences with one trigger each, at ``positions`` (int64, 0-based): ``inputs`` and ``targets`` are ``(batch, length,
    width)``, the mean at the trigger and 0 elsewhere. A model with residual connections is to give ``inputs + targets``."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor

    @property
    def is_trigger(self) -> Tensor:
        """Boolean ``(batch, length)``."""
        return torch.arange(self.inputs.shape[1], device=self.inputs.device) == self.positions[:, None]


def trigger_batch(
    batch: int,
    length: int,
    width: int,
    generator: torch.Generator | None = None,
    position: int | None = None,
    target: Target = "including",
    *,
    dtype: torch.dtype = torch.float32,
) -> TriggerBatch:
    """Draw sequences: BOS, then content tokens with a trigger in the place of one of them. With the target ``"including"`` a
    trigger at ``j`` (0-based) averages the tokens ``1 … j``, with ``"preceding"`` the ``j - 1`` before it.

    Args:
        length, width: tokens of a sequence with BOS, and coordinates of a token, at least 4 each; 16 in the paper.
        generator: on the CPU; the global one by default.
        position: 0-based, of the trigger in all sequences; by default drawn from ``2 … length - 1`` (the paper's 3 … L,
            counted from 1).

    Raises:
        ConfigurationError: an argument out of its range.
    """
    for name, value, least in (("batch", batch, 1), ("length", length, 4), ("width", width, 4)):
        if value < least:
            raise ConfigurationError(
                f"trigger task: {name} {value} must be at least {least}; length and width are 16 in the paper"
            )
    if position is not None and not 2 <= position < length:
        raise ConfigurationError(
            f"trigger task: position {position} must be in 2 … {length - 1}, counted from 0: BOS and a content token come first"
        )
    if target not in get_args(Target):
        raise ConfigurationError(f"trigger task: target {target!r} must be one of {', '.join(get_args(Target))}")
    positions = torch.full((batch,), position or 0)
    if position is None:
        positions = torch.randint(2, length, (batch,), generator=generator)
    places = torch.arange(length)
    triggered = (places == positions[:, None]).to(dtype)
    inputs = torch.zeros(batch, length, width, dtype=dtype)
    inputs[:, 0, BOS] = 1
    content = torch.rand(batch, length - 1, width - 3, generator=generator, dtype=dtype)
    inputs[:, 1:, TRIGGER + 1 : BIAS] = content.mul_(2).sub_(1)
    inputs[..., TRIGGER] = triggered
    inputs[:, 1:, BIAS] = 1 - triggered[:, 1:]
    targets = inputs.cumsum(dim=1)
    targets[..., BOS] = 0  # which counts in neither sum nor number
    if target == "preceding":
        targets -= inputs
    counts = (places if target == "including" else places - 1).clamp(min=1)
    targets.div_(counts[:, None]).mul_(triggered[..., None])
    return TriggerBatch(inputs, targets, positions)


_RANK_TOLERANCE = 1e-6
"""Singular values below this share of the largest are taken for 0 in the search for a counter; the bound holds for any."""


@dataclasses.dataclass(frozen=True)
class Counter:
    """A functional of head outputs that counts tokens other than BOS: ``u``, float64 ``(width,)``; ``|u|₁``, by which an error
    per coordinate enters the count; and ``ρ``: ``uᵀM x`` lies within ``1 ± ρ`` for every content token and trigger of the
    task."""

    functional: Tensor
    norm: float
    slack: float

    def least_bos_weight(self, error: float, bos_error: float | None = None) -> float:
        """Least weight on BOS at a query whose output is within ``error`` of 0 in every coordinate: ``(1 - ρ - |u|₁ η) / (1 -
        ρ + |u|₁ η₁)``, at least 0, with ``η₁`` the error at the BOS query itself (as large by default; 0 for a value map that
        takes BOS to 0)."""
        bos_error = error if bos_error is None else bos_error
        counted = 1 - self.slack
        return max(0.0, (counted - self.norm * error) / (counted + self.norm * bos_error)) if counted > 0 else 0.0


def counter_of(value_output: Tensor) -> Counter:
    """The counter of least norm for a value map ``M = W_O W_V``, ``(width, width)``: ``u = (M restricted to all tokens but
    BOS)⁺ᵀ (e_1 + e_{n-1})``. A map that loses the count leaves a large slack, and the bound is then 0: such a head may be
    silent without a sink, and cannot solve the task."""
    full = value_output.detach().to(torch.float64)
    tokens = full[:, 1:]  # what M does to tokens without the coordinate of BOS
    count = torch.zeros(full.shape[1] - 1, dtype=torch.float64, device=full.device)
    count[TRIGGER - 1] = count[BIAS] = 1
    functional = torch.linalg.pinv(tokens, rtol=_RANK_TOLERANCE).T @ count
    missing = tokens.T @ functional - count
    # Content tokens have a 1 at n-1, triggers at 1, and the random coordinates lie in (-1, 1).
    marks = torch.stack((missing[TRIGGER - 1], missing[BIAS])).abs().max()
    slack = marks + missing[TRIGGER:BIAS].abs().sum()
    return Counter(functional, float(functional.abs().sum()), float(slack))


def least_bos_weight_by_error(error: float, length: int) -> float:
    """``1 - 8 η (L-1)/(L-3)``, at least 0: least weight on BOS at every query off the trigger, whatever the maps are.

    For one head without positions whose rows sum to one, and the target ``"including"``, with triggers at every place. The
    proof is in docs/theory.md#the-trigger-task: what the trigger writes forces a counter of norm ``C (1 + |u|₁ η)``,
    ``C = 4 (L-1)/(L-3)``.

    Args:
        error: ``η``, largest absolute error of a coordinate over all sequences, at least 0.
        length: ``L``, tokens of a sequence with BOS, at least 4.

    Raises:
        ConfigurationError: an argument out of its range.
    """
    if error < 0 or length < 4:
        raise ConfigurationError(f"trigger task: error {error} must be at least 0, and length {length} at least 4")
    return max(0.0, 1 - 8 * error * (length - 1) / (length - 3))


# --- weights that solve the task --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TriggerHeads:
    """One layer of heads of full width, without positions, scaling or residual; the layer of the paper. Maps are ``W_Q, W_K,
    W_V, W_O``, each ``(heads, width, width)``, and act as ``W x``; ``"relu"`` is ReLU of the scores divided by ``max(i - 1,
    1)`` for query ``i`` from 1 on."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    attention: Literal["softmax", "relu"] = "softmax"

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``(batch, length, width)``, summed over heads, and causal weights ``(batch, heads, length, length)``."""
        states = inputs[:, None].to(self.query.dtype)
        queries, keys, values = (states @ weight.mT for weight in (self.query, self.key, self.value))
        scores = queries @ keys.mT
        length = inputs.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        if self.attention == "softmax":
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        else:
            divisors = torch.arange(length, device=inputs.device).clamp(min=1)[:, None]
            weights = scores.relu().masked_fill(hidden, 0.0) / divisors
        return ((weights @ values) @ self.output.mT).sum(1), weights


def relu_solution(width: int) -> TriggerHeads:
    """ReLU attention, float64 maps of one head, that solves the task with target ``"including"``, no error at all and no
    weight on BOS.

    Ran-Milo 2026 (arXiv 2603.11487), Theorem 3; these weights are ours. A score is 1 for the trigger on tokens other than BOS;
    ``i - 1``, by which weights are divided, is the number of tokens in the mean. With ``"preceding"`` *no* maps solve the
    task: docs/theory.md."""
    query, key = _zeros(1, width), _zeros(1, width)
    query[0, 0, TRIGGER] = 1
    key[0, 0, TRIGGER] = key[0, 0, BIAS] = 1
    eye = torch.eye(width, dtype=torch.float64)[None]
    return TriggerHeads(query, key, eye, eye.clone(), "relu")


def softmax_solution(width: int, length: int, error: float, target: Target = "including") -> TriggerHeads:
    """Softmax attention, float64 maps of one head, that solves the task to within ``error`` (in (0, 1/2]) in every coordinate
    for sequences of ``length`` or less, with the sink that it needs.

    Content tokens score ``c`` on BOS, the trigger scores ``c`` on what it averages, all other scores are 0, and values are the
    tokens with the coordinate of BOS taken out. Of query ``i`` the weight off BOS is ``i / (e^c + i)``, so that ``e^c =
    (length - 1)(1/ε - 1)`` keeps it to ``ε``; target ``"preceding"`` takes ``e^c >= 3/ε - 2`` besides."""
    height = _height(length, error)
    if target == "preceding":
        height = max(height, math.log(3 / error - 2))
    query, key = _zeros(1, width), _zeros(1, width)
    query[0, 0, BIAS] = query[0, 1, TRIGGER] = 1
    key[0, 0, BOS] = key[0, 1, BIAS] = height
    if target == "including":
        key[0, 1, TRIGGER] = height
    value = torch.eye(width, dtype=torch.float64)[None].clone()
    value[0, BOS, BOS] = 0
    return TriggerHeads(query, key, value, torch.eye(width, dtype=torch.float64)[None])


def cancelling_solution(width: int, length: int, error: float) -> TriggerHeads:
    """Two softmax heads, float64, that solve the task, target ``"including"``, to within ``error``: *no head sinks off the
    trigger*.

    Both attend uniformly at every other query and write opposite vectors. At the trigger the first averages the tokens other
    than BOS, and the second turns to BOS, whose value is 0. So with two heads no error, however small, forces a sink at a
    query off the trigger; that some head sinks at *some* query it leaves standing: the second does, at the trigger."""
    # At the trigger j (0-based) the first writes (1 - 1/(1 + j e^c)) m, the second -j/(e^c + j) m: 2 ε/2 in the worst case.
    height = _height(length, error / 2)
    query, key = _zeros(2, width), _zeros(2, width)
    query[:, 0, TRIGGER] = 1
    key[0, 0, TRIGGER] = key[0, 0, BIAS] = height
    key[1, 0, BOS] = height
    value = torch.eye(width, dtype=torch.float64).repeat(2, 1, 1)
    value[:, BOS, BOS] = 0
    eye = torch.eye(width, dtype=torch.float64)
    return TriggerHeads(query, key, value, torch.stack((eye, -eye)))


def _height(length: int, error: float) -> float:
    """The score ``c`` at which ``length - 1`` keys of score 0 get the weight ``error`` together."""
    return math.log((length - 1) * (1 / error - 1))


def _zeros(heads: int, width: int) -> Tensor:
    return torch.zeros(heads, width, width, dtype=torch.float64)
