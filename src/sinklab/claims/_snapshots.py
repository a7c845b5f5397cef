"""What claims about the course of a training share: a baseline whose models are kept along the way, and each of these."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from sinklab.models.loading import LoadedModel, load_model
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import Variant
from sinklab_claims.contract.trained import TrainedModel

__all__ = ["ALONG", "AtStep", "along_the_way", "steps_kept"]

KEPT = 16
"""Models of one training: a sink comes within tens of steps, and each is read in a second."""


def steps_kept(config: PretrainingConfig) -> tuple[int, ...]:
    """Steps at equal ratios, from a fifth of the warm-up (or a hundredth of the steps) to the last one."""
    steps = config.training.steps
    first = max(1, config.schedule.warmup_steps // 5 or steps // 100)
    return tuple(sorted({round(first * (steps / first) ** (index / (KEPT - 1))) for index in range(KEPT)}))


ALONG = Variant("kept along the way", lambda base: {"training.snapshots": steps_kept(base)})
"""The baseline, of which nothing is changed but that models are kept."""


class AtStep(TrainedModel):
    """The model of a training after some step, and the text of that training.

    Args:
        step: one of ``training.snapshots``.
    """

    def __init__(self, trained: TrainedModel, step: int) -> None:
        super().__init__(trained.folder, trained.cache)
        self.step = step

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        return load_model(str(self.folder / "snapshots" / f"step-{self.step}"))


def along_the_way(trained: TrainedModel) -> Iterator[AtStep]:
    """The models that a training has kept, first to last; none of a training that kept none."""
    for step in sorted(trained.config.training.snapshots):
        yield AtStep(trained, step)
