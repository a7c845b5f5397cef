"""How long whole runs of the trigger task take, to the stop rule."""

from __future__ import annotations

import time

import torch
from _timing import Bar, exit_with

from sinklab.operations.softmax import Softmax
from sinklab.studies.trigger.problem import TriggerProblem, train


def to_the_end(problem: TriggerProblem, limit: float) -> Bar:
    """CPU time of a whole run with seed 0."""
    begun = time.process_time()
    trained = train(Softmax(), problem, 0)
    taken = time.process_time() - begun
    assert trained.outcome == "solved"
    what = f"trigger task, softmax {problem.layers} × {problem.heads}, seed 0, to the stop rule: {trained.steps} steps"
    return Bar("trigger", what, taken, "<=", limit, "s")


def measure() -> list[Bar]:
    torch.set_num_threads(1)
    return [to_the_end(TriggerProblem(), 10.0), to_the_end(TriggerProblem(layers=2, heads=2), 120.0)]


if __name__ == "__main__":
    exit_with(measure)
