"""The trigger task as it is trained: problem, model's answers and stop rule; and what no choice of maps can do."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.errors import ConfigurationError
from sinklab.studies.theory.trigger_bounds import Target, TriggerBatch, trigger_batch
from sinklab.studies.trigger.model import TriggerModel

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
    quotient = divisor_quotient(operation, count)
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


RATE_ALONE, RATE_RESIDUAL = 1e-3, 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriggerProblem:
    """The trigger task of ``trigger()``, whose arguments the fields are; by default as released."""

    layers: int = 1
    heads: int = 1
    length: int = 16
    width: int = 16
    position: int = 7
    target: Target = "including"
    triggers: int = 1
    bos: bool = True
    batch: int = 128
    learning_rate: float | None = None
    cap: int = 50_000
    tolerance: float = 5e-3

    @property
    def residual(self) -> bool:
        """Whether the model has residual connections."""
        return self.layers > 1 or self.heads > 1

    @property
    def rate(self) -> float:
        """The learning rate that is used."""
        return (RATE_RESIDUAL if self.residual else RATE_ALONE) if self.learning_rate is None else self.learning_rate

    def draw(self, batch: int, generator: torch.Generator, position: int | None = None) -> TriggerBatch:
        """Samples; a trigger at ``position``, or anywhere."""
        drawn = trigger_batch(batch, self.length, self.width, generator, position, self.target, triggers=self.triggers)
        return drawn if self.bos else TriggerBatch(drawn.inputs[:, 1:], drawn.targets[:, 1:], drawn.positions - 1)

    def build(self, operation: Operation, seed: int) -> TriggerModel:
        """The model with which ``seed`` starts."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TriggerModel(operation, self.layers, self.heads, self.width)

    def check(self) -> None:
        """Raise before any training what would be wrong in it.

        Raises:
            ConfigurationError: a field out of its range.
        """
        for name in ("layers", "heads", "batch", "cap"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"trigger task: {name} {getattr(self, name)} must be at least 1")
        self.draw(1, torch.Generator(), self.position)
        for name, number in (("learning rate", self.rate), ("tolerance", self.tolerance)):
            if not (number > 0 and math.isfinite(number)):
                raise ConfigurationError(f"trigger task: {name} {number} must be a positive number")

    def answers(self, batch: TriggerBatch) -> Tensor:
        """What the model is to give: the targets, on top of the inputs where there are residual connections."""
        return batch.inputs + batch.targets if self.residual else batch.targets


Outcome = Literal["solved", "cap", "diverged"]
"""``solved``: the stop rule was met; ``cap``: not within the cap of steps; ``diverged``: a loss that is not finite."""

BETAS = (0.9, 0.95)
REPORT_EVERY = 100
"""Steps between two reports of progress."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A trained model and how it came about.

    Attributes:
        model: in evaluation mode.
        steps: updates that were made.
        outcome: why there were no more.
        error: largest absolute error on the last training batch; not finite where it diverged.
        seconds: CPU time.
    """

    model: TriggerModel
    steps: int
    outcome: Outcome
    error: float
    seconds: float


def train(
    operation: Operation, problem: TriggerProblem, seed: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Training:
    """Train one model: mean squared error, Adam, fresh samples every step. The same seed gives the same model.

    Args:
        operation: what takes the place of softmax.
        progress: called with steps done and the cap.

    Raises:
        ConfigurationError: a field of the problem out of its range.
    """
    problem.check()
    model, begun = problem.build(operation, seed), time.process_time()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.rate, betas=BETAS, fused=True)
    steps = 0
    while True:
        batch = problem.draw(problem.batch, generator)
        outputs = model(batch.inputs)
        difference = outputs.detach() - problem.answers(batch)
        error = float(difference.abs().max())
        if not math.isfinite(error) or error < problem.tolerance or steps == problem.cap:
            break
        optimizer.zero_grad(set_to_none=True)
        # The gradient of the mean square, without the loss itself, which is not used.
        outputs.backward(2 / difference.numel() * difference)
        optimizer.step()
        steps += 1
        if steps % REPORT_EVERY == 0:
            progress(steps, problem.cap)
    outcome: Outcome = "diverged" if not math.isfinite(error) else "solved" if error < problem.tolerance else "cap"
    return Training(model.eval(), steps, outcome, error, time.process_time() - begun)
