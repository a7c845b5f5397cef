"""Chen et al. 2026: the course of a training: attention goes to the sink, and activations and predictions follow."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from sinklab.models.loading import LoadedModel, load_model
from sinklab.registry import claims
from sinklab.results.metric import Metric
from sinklab.training.config import PretrainingConfig
from sinklab_claims.contract.claim import Part, Variant
from sinklab_claims.contract.effect import Ratio
from sinklab_claims.contract.trained import TrainedModel, gives
from sinklab_claims.numbers.attention import sinks
from sinklab_claims.numbers.losses import window
from sinklab_claims.numbers.norms import norms
from sinklab_claims.variants import Fields, has_sink, of_paper

chen = of_paper("chen2026", "Chen et al. 2026 (arXiv 2603.17771)")

# --- the order of onset -------------------------------------------------------------------------------------------------------

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


LATER = 1.1
"""Ratio of two steps above which one is later; models are kept at steps that lie 1.25 apart, and lines are drawn between."""

LEAST = {"weight": 0.05, "massive": 1.0, "worth": 0.05}
"""Change from the first model to the last below which a curve has no onset: of a share, a ratio, and nats."""

CURVES = {
    "weight": "the mean share of a row on the first token, of all heads",
    "massive": "the largest activation of a row over the median one (massive_ratio)",
    "worth": "what first tokens are worth beyond a window (sink_worth)",
}

ONSETS = tuple(
    Metric(
        f"onset_{name}",
        "steps",
        f"Steps after which {what} has gone half of its way from the first model that is kept to the last, and stays beyond; "
        "absent where the way is short.",
        version=2,
    )
    for name, what in CURVES.items()
)


def half_way(curve: Mapping[int, float], least: float) -> float | None:
    """Step from which a curve is beyond half of its way from its first value to its last, on straight lines between.

    It counts when the curve comes to stay there: in warm-up activations jump past it and come back.

    Args:
        curve: step to value, of two steps or more.
        least: change from first to last below which there is no way to go.
    """
    steps = sorted(curve)
    start, end = curve[steps[0]], curve[steps[-1]]
    if abs(end - start) < least:
        return None
    gone = {step: (curve[step] - start) / (end - start) for step in steps}
    before = max(step for step in steps if gone[step] < 0.5)
    after = steps[steps.index(before) + 1]
    return before + (0.5 - gone[before]) / (gone[after] - gone[before]) * (after - before)


@gives(*ONSETS)
def onsets(trained: TrainedModel) -> dict[str, float]:
    """When each curve of a training gets under way. :data:`ONSETS`; nothing of a training that kept no models."""
    curves: dict[str, dict[int, float]] = {name: {} for name in CURVES}
    for model in along_the_way(trained):
        curves["weight"][model.step] = sinks(model)["first_attention"]
        curves["massive"][model.step] = norms(model)["massive_ratio"]
        curves["worth"][model.step] = window(model)["sink_worth"]
    begun = {name: half_way(curve, LEAST[name]) for name, curve in curves.items() if len(curve) > 1}
    return {f"onset_{name}": step for name, step in begun.items() if step is not None}


def _after(name: str, says: str) -> Part:
    label = ALONG.label
    return Part(says, Ratio(f"onset_{name}", label, label, other="onset_weight"), more_than=LATER)


@claims.register("order_of_onset")
@chen
def order_of_onset() -> Fields:
    """In training attention goes to the sink first; that activations become massive and that predictions come to need the sink
    follows.

    Three curves of one training, each at half of its way. A curve that does not move has no onset, and a training without one
    says nothing of the order.
    """
    return dict(
        published="No steps: massive activations are read as an answer to the gradients that attention to the sink gathers "
        "there, and so come after it.",
        variants=(ALONG,),
        bases=("no-bos", "bos"),
        read_outs=("sinks", onsets),
        presupposes=(has_sink(ALONG.label),),
        parts=(
            _after("massive", "activations become massive later than attention goes to the sink"),
            _after("worth", "predictions come to need the sink later than attention goes to it"),
        ),
    )
