"""Learning rate over steps: a factor on the peak rate for each step, as a pure function."""

from __future__ import annotations

import functools
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sinklab.training.config import ScheduleConfig

__all__ = ["learning_rate_factor", "make_schedule"]


def learning_rate_factor(step: int, schedule: ScheduleConfig, steps: int) -> float:
    """Factor on the peak learning rate at an optimiser step, in [0, 1].

    All three rise linearly from 0, which the first step has, over ``warmup_steps``. Then ``constant`` stays at 1; ``cosine``
    falls along half a cosine towards ``min_ratio``; ``warmup_stable_decay`` stays at 1 and falls linearly towards ``min_ratio``
    over the last ``decay_steps`` (Hägele et al. 2024, arXiv 2405.18392). A step behind the last one would have ``min_ratio``:
    of four steps of decay to 0.1 the last has 0.325.

    Args:
        step: 0-based number of the step.
        steps: steps of the whole run.
    """
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    falling = schedule.decay_steps if schedule.name == "warmup_stable_decay" else steps - schedule.warmup_steps
    done = min(max((step - (steps - falling)) / max(falling, 1), 0.0), 1.0)
    height = 1.0 - done if schedule.name == "warmup_stable_decay" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * height


def make_schedule(optimizer: Optimizer, schedule: ScheduleConfig, steps: int) -> LambdaLR:
    """The scheduler that multiplies every parameter group's own rate by :func:`learning_rate_factor`."""
    return LambdaLR(optimizer, functools.partial(learning_rate_factor, schedule=schedule, steps=steps))
