"""What cannot be learned: operations for which no maps solve the trigger task, found before any training.

**Independent weights.** Say that the weight of a key depends on its own score and on the number of visible keys only, as
``φ(score) / d(i)`` with ``i`` keys visible: ReLU, sigmoid, the identity kernel. With one layer, ``d(i)`` times the output at
the trigger is then a sum, ``g(t) + Σ f(t, x)`` over the content tokens ``x`` before it. Let ``x`` have 1 at some random
coordinate, and ``x'`` -1, else equal. Behind one content token (i = 3) the targets of ``x`` and ``x'`` differ by 1 there,
behind two equal ones (i = 4) by 4/3; and the sums by ``D`` and ``2 D`` with one and the same ``D``. So
``4/3 · d(4) = 2 · 1 · d(3)`` up to ``2 η d(4) + 4 η d(3)`` with ``η`` the largest error, and
``η >= |4/3 d(4) - 2 d(3)| / (2 d(4) + 4 d(3))``. The quotient ``d(4) / d(3) = 3/2`` that leaves no error is that of ``i - 1``,
by which the paper divides: the task wants a mean over ``i - 1`` tokens. For ``d = 1`` it is 1/9, for ``d = i`` 1/30. The
target "preceding" is a mean over ``i - 2`` tokens: targets differ by 2 both times, and
``η >= |2 d(4) - 4 d(3)| / (2 d(4) + 4 d(3))``, which asks for ``d(4) = 2 d(3)``.
Any number of heads, gates that read the query, a bias on the output and the residual connection change nothing in the argument:
differences are taken between sequences that agree in all of these. Further triggers may come later. With positions ``f`` may
depend on the place, and there is no such argument.

**Full rows without BOS.** Where the one head has weights from 0 that sum to one, the output at the first token is ``M x`` for a
content token ``x``: within ``η`` of 0. Behind one content token the trigger's output is then within ``η`` of a line through 0
that does not depend on ``x``, that of ``M t``. With a trigger of 0 in some random coordinate, and ``x`` of 1 or -1 there, the
targets have ±1/2 in this coordinate and 1/2 in the last. No line through 0 comes closer to both than 1/2 in the largest
coordinate, so ``η >= 1/4``; for the target "preceding" all is twice as large, and ``η >= 1/2``. With a bias ``b`` on the output
read ``M x + b`` and ``M t + b``, with positions added to the tokens ``M (x + p_1)`` and ``M (t + p_2)``.
"""

from __future__ import annotations

import torch

from sinklab.attention.operation import Operation
from sinklab.studies.trigger.problem import TriggerProblem

__all__ = ["divisor_quotient", "full_rows", "linear_in_values", "obstacle"]

TRIALS = 64
ROUNDING = 1e-9
"""Of float64 weights; what is compared is computed in a few steps."""


def obstacle(operation: Operation, problem: TriggerProblem) -> tuple[str, float] | None:
    """Why no maps of one layer solve the task with this operation, and the largest error that all leave; or ``None``.

    ``None`` says that there is no proof, not that there are such maps. The error is a supremum over the sequences of the task.
    """
    if problem.layers > 1 or not linear_in_values(operation):
        return None
    count = operation.tokens_in_front + (3 if problem.bos else 2)
    quotient = divisor_quotient(operation, count) if problem.positions == "no_position" else None
    if quotient is not None:
        including = problem.target == "including"
        first, second = (2.0, 4 / 3) if including else (2.0 * 2, 2.0)
        error = abs(second * quotient - first) / (2 * quotient + 4)
        if error > problem.tolerance:
            wanted = "i - 1" if including else "i - 2"
            return (
                f"each weight depends on its own score, and none is divided by {wanted} of {'i' if problem.bos else 'i + 1'} "
                f"visible keys, so that no mean over {wanted} tokens comes out",
                error,
            )
    alone = problem.heads == 1 and not operation.tokens_in_front
    error = 0.25 if problem.target == "including" else 0.5
    without_room = not problem.bos and alone and type(operation).gain is Operation.gain and error > problem.tolerance
    if without_room and full_rows(operation):
        return "every row of weights sums to one, and without BOS there is no token that could carry nothing", error
    return None


def divisor_quotient(operation: Operation, count: int) -> float | None:
    """``d(count + 1) / d(count)`` where a weight is ``φ(score) / d(visible keys)``; ``None`` where it is no such thing.

    The premise is tried on random rows, in float64.
    """
    generator = torch.Generator().manual_seed(0)
    rows, others = (3 * torch.randn(TRIALS, 1, 1, count + 1, generator=generator, dtype=torch.float64) for _ in range(2))
    others[..., 0] = rows[..., 0]
    of_rows, of_others = (operation.weights(scores, None) for scores in (rows, others))
    of_fewer = operation.weights(rows[..., :count], None)
    if (of_rows[..., 0] - of_others[..., 0]).abs().max() > ROUNDING:
        return None
    more, fewer = of_rows[..., :count], of_fewer
    if not bool(((more == 0) == (fewer == 0)).all()) or not bool((more != 0).any()):
        return None
    quotients = (fewer / more)[more != 0]
    quotient = float(quotients.median())
    return quotient if bool(((quotients / quotient - 1).abs() < ROUNDING).all()) else None


def full_rows(operation: Operation) -> bool:
    """Whether weights are at least 0 and every row sums to one; tried on random rows, in float64."""
    scores = 3 * torch.randn(TRIALS, 1, 1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = operation.weights(scores, None)
    return bool((weights >= 0).all()) and bool(((weights.sum(-1) - 1).abs() < ROUNDING).all())


def linear_in_values(operation: Operation) -> bool:
    """Whether head outputs are weights times values, perhaps with a bias and a gate that the query sets, and with no null."""
    parts = ("null_scores", "null_value", "finish", "head_outputs")
    return all(getattr(type(operation), part) is getattr(Operation, part) for part in parts)
