"""Key-query retrieval at a trigger: the trigger task with an answer to look up, and its sink bound.

Ran-Milo 2026 (arXiv 2603.11487) proves a sink for a trigger that averages, and calls the extension to retrieval likely. This
is one reading of that extension, and what can be proved of it here is ours.

**The task.** One sequence has BOS first, one trigger at place ``j >= 2`` (0-based), and content tokens at all other places:

coordinate            BOS   content token                   trigger
0                     1     0                               0
1                     0     0                               1
2                     0     1                               0
3 … 2 + keys          0     e_a, its key                    e_a, the key that it asks for
3 + keys …            0     Uniform(-1, 1), its value       0

Keys of the content tokens of a sequence are distinct, drawn without replacement. The key that the trigger asks for is that of
one of the content tokens before it, each alike. The answer is 0 at every place but the trigger, and there the value of the
token with that key (target ``"value"``, in the value coordinates, 0 in the others), or the whole token (target ``"token"``).

**Counting.** Let weights sum to one over the keys of a query, let the output be ``Σ_k A_k M x_k``, and let it be within ``η``
of 0 in every coordinate at a query that is not the trigger. If ``M`` leaves the mark of content tokens alone and takes it
from no other token (row 2 of ``M`` is ``e_2``), then coordinate 2 of the output *is* the weight on content tokens, and
therefore ``A_BOS + A_trigger >= 1 - η``, with ``A_trigger = 0`` before the trigger. If ``M`` leaves coordinate 1 alone too,
``A_BOS >= 1 - 2 η`` everywhere off the trigger. With the target ``"token"`` the identity is such an ``M``. With the target
``"value"`` such an ``M`` leaves no weight for the answer: at the trigger, too, coordinate 2 of the output is the weight on
content tokens, and its target is 0. Where ``M`` drops the marks, a single output counts nothing:
tokens of values ``v`` and ``-v`` with weight 1/2 each give an output of 0 without any weight on BOS, and so does the trigger
alone, whose value is 0, for the queries behind it.

**Odds.** One softmax head without positions has a sink all the same, for any ``M``, because ``ρ(x, x') = exp(s(x, x') - s(x,
BOS))``, the odds of key ``x'`` against BOS for the query ``x``, are the same in all sequences: what a pair of tokens does, it
does where there is nothing to cancel it. Let ``η`` be the largest error at the last place of the sequences ``BOS, x`` and
``BOS, x', x``, let ``β = |M x_BOS|`` in the largest coordinate (itself an error, of the query at BOS), ``μ(x) = |M x|``, both
above ``η``, and ``η' = η + β``. From ``BOS, x`` with ``r = ρ(x, x)``: the output is ``(M x_BOS + r M x) / (1 + r)``, hence
``r μ(x) <= η (1 + r) + β`` and ``r <= η' / (μ(x) - η)``. From ``BOS, x', x`` with ``r' = ρ(x, x')``: ``r' μ(x') <= η (1 + r +
r') + β + r μ(x)``, hence ``r' (μ(x') - η) <= η' + r (μ(x) + η) <= η' · 2 μ(x) / (μ(x) - η)``. Add up over the content tokens
that ``x`` sees: ``A_BOS + A_trigger = 1 - A_content >= 1 / (1 + R)`` with ``R = η'/(μ(x) - η) · (1 + Σ 2 μ(x)/(μ(x') - η))``,
the sum over those before ``x``; and ``A_trigger = 0`` before the trigger (:func:`least_bos_weight`). As ``η → 0`` that tends
to 1, at the rate of ``η`` times the number of tokens. It is no statement on tokens whose values are next to 0, and none on
models with positions or several layers.

**Divisors.** Weights ``φ(score) / d(i)`` with ``i`` visible keys solve the task exactly only if ``d(4) = d(3)``. ``d(i)``
times the output at the trigger ``t`` is ``g(t) + Σ f(t, x)`` over the content tokens ``x`` before it. Let ``x`` have the key
that ``t`` asks for and the value ``v``, and ``y`` another key. Then ``f(t, y) = d(4) v - d(3) v`` within ``(d(4) + d(3)) η``,
for ``v`` and for ``-v`` with the same ``y``, so that ``η >= |d(4) - d(3)| / (d(4) + d(3))`` with ``|v| = 1``: at least 1/5
for ReLU divided by ``i - 1``, which solves the task of the mean, and 1/7 for ReLU divided by ``i``. ReLU that is not divided
solves this one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError, InputError

BOS, TRIGGER, CONTENT, FIRST_KEY = 0, 1, 2, 3
"""Coordinates that mark the three kinds of token, and the first of the keys; values stand behind the keys."""

RetrievalTarget = Literal["value", "token"]
"""What the trigger answers: the value of the token that it asks for, or the token as it is."""


@dataclasses.dataclass(frozen=True)
class RetrievalBatch:
    """Sequences with one trigger each.

    Attributes:
        inputs: ``(batch, length, width)``.
        targets: same shape: what was asked for at the trigger, 0 elsewhere.
        positions: int64 ``(batch,)``: where the trigger stands, 0-based.
        asked: int64 ``(batch,)``: where the token stands that it asks for.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    asked: Tensor

    @property
    def is_trigger(self) -> Tensor:
        """Boolean ``(batch, length)``."""
        return torch.arange(self.inputs.shape[1], device=self.inputs.device) == self.positions[:, None]


def retrieval_batch(
    batch: int,
    length: int,
    keys: int,
    values: int,
    generator: torch.Generator | None = None,
    position: int | None = None,
    target: RetrievalTarget = "value",
    *,
    dtype: torch.dtype = torch.float32,
) -> RetrievalBatch:
    """Draw sequences of the task.

    Args:
        batch: number of sequences, at least 1.
        length: tokens of a sequence with BOS, at least 4.
        keys: number of keys, at least ``length - 2``, so that content tokens can have different ones.
        values: coordinates of a value, at least 1. A token has ``3 + keys + values`` coordinates.
        generator: on the CPU; the global one by default.
        position: 0-based place of the trigger in all sequences; by default uniform on ``2 … length - 1``.
        target: see :data:`RetrievalTarget`.

    Raises:
        ConfigurationError: an argument out of its range.
    """
    for name, number, least in (("batch", batch, 1), ("length", length, 4), ("keys", keys, length - 2), ("values", values, 1)):
        if number < least:
            why = ": every content token has a key of its own" if name == "keys" else ""
            raise ConfigurationError(f"retrieval task: {name} {number} must be at least {least}{why}")
    if position is not None and not 2 <= position < length:
        raise ConfigurationError(
            f"retrieval task: position {position} must be in 2 … {length - 1}, counted from 0: BOS and a content token come "
            "first"
        )
    if target not in get_args(RetrievalTarget):
        raise ConfigurationError(f"retrieval task: target {target!r} must be one of {', '.join(get_args(RetrievalTarget))}")
    positions = torch.full((batch,), 0 if position is None else position)
    if position is None:
        positions = torch.randint(2, length, (batch,), generator=generator)
    rows, width, first_value = torch.arange(batch), FIRST_KEY + keys + values, FIRST_KEY + keys
    inputs = torch.zeros(batch, length, width, dtype=dtype)
    inputs[:, 0, BOS] = 1
    inputs[:, 1:, CONTENT] = 1
    # The order of random numbers is a random order of the keys, of which each place takes one.
    order = torch.rand(batch, keys, generator=generator).argsort(dim=1)[:, : length - 2]
    # The trigger has no key of its own: behind it places are one ahead of keys.
    places = torch.arange(1, length)
    which = (places - 1 - (places > positions[:, None]).long()).clamp(max=length - 3)
    inputs[:, 1:, FIRST_KEY:first_value] = torch.nn.functional.one_hot(order.gather(1, which), keys).to(dtype)
    inputs[:, 1:, first_value:] = 2 * torch.rand(batch, length - 1, values, generator=generator, dtype=dtype) - 1
    # A place among those before the trigger, BOS left out.
    answers = 1 + (torch.rand(batch, generator=generator) * (positions - 1)).long()
    inputs[rows, positions] = 0
    inputs[rows, positions, TRIGGER] = 1
    inputs[rows, positions, FIRST_KEY:first_value] = inputs[rows, answers, FIRST_KEY:first_value]
    targets = torch.zeros_like(inputs)
    targets[rows, positions] = inputs[rows, answers]
    if target == "value":
        targets[..., :first_value] = 0
    return RetrievalBatch(inputs, targets, positions, answers)


# --- what any solution must do ----------------------------------------------------------------------------------------------


def least_bos_weight(error: Tensor, bos_output: Tensor, query_norm: Tensor, key_norms: Tensor) -> Tensor:
    """``1 / (1 + R)``: least weight on BOS of a content query before the trigger; see the head of this file for the proof.

    One softmax head without positions. Behind the trigger it is the least weight on BOS and the trigger together.

    Args:
        error: ``η``, largest absolute output at the last place of ``BOS, x`` and of ``BOS, x', x`` for all keys ``x'`` below,
            ``(...)``, at least 0.
        bos_output: ``β``, largest absolute coordinate of ``M x_BOS``, which is the output at BOS, ``(...)``.
        query_norm: ``μ(x)``, largest absolute coordinate of ``M x`` for the query, ``(...)``.
        key_norms: ``μ(x')`` of the other content tokens that it sees, ``(..., count)``; ``count`` may be 0.

    Returns:
        In [0, 1], ``(...)``; 0 where some norm is no larger than the error, and nothing follows.

    Raises:
        InputError: an error or a norm that is negative or not a number.
    """
    for name, numbers in (("error", error), ("bos_output", bos_output), ("norms", query_norm), ("norms", key_norms)):
        if not bool((numbers >= 0).all()):
            raise InputError(f"least_bos_weight: {name} must be at least 0: they are largest absolute values")
    room, rooms = query_norm - error, key_norms - error[..., None]
    follows = (room > 0) & (rooms > 0).all(-1)
    room, rooms = room.where(follows, 1.0), rooms.where(follows[..., None], 1.0)
    odds = (error + bos_output) / room * (1 + (2 * query_norm[..., None] / rooms).sum(-1))
    return (1 / (1 + odds)).where(follows, 0.0)


def divisor_error(three: float, four: float) -> float:
    """``|d(4) - d(3)| / (d(4) + d(3))``: least largest error of weights ``φ(score) / d(visible keys)``, in [0, 1).

    Raises:
        InputError: a divisor that is not positive.
    """
    if not (three > 0 and four > 0):
        raise InputError(f"divisor_error: divisors {three} and {four} must be positive")
    return abs(four - three) / (four + three)
