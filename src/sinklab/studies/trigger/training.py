"""Training of one trigger model with one seed, to the published stop rule."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Literal

import torch

from sinklab.attention.operation import Operation
from sinklab.studies.trigger.model import TriggerModel
from sinklab.studies.trigger.problem import ToyProblem

__all__ = ["Outcome", "Training", "train"]

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
    operation: Operation, problem: ToyProblem, seed: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Training:
    """Train one model: mean squared error, Adam, fresh samples every step. The same seed gives the same model.

    Args:
        operation: what takes the place of softmax.
        progress: called with steps done and the cap.

    Raises:
        ConfigurationError: a field of the problem out of its range, or no construction to start from.
        UnknownNameError: no such position scheme.
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
