"""``sinklab denoise``: sinks step by step while masked tokens are filled in, and what hiding them costs."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from sinklab.results.summaries.shared import Difference

__all__ = ["DenoiseSummary", "DenoisingStep", "SinkCost"]


class DenoisingStep(TypedDict):
    """The state behind so many steps: 0 has every token masked that is to be filled in, the last one none.

    ``sinks`` are so many (text, head, key). Shares are in percent; those of sinks are ``None`` where there is none, and changes
    where no state follows.
    """

    step: int
    masked: float
    sink_rate: float
    sinks: int
    on_special: float | None
    on_masked: float | None
    on_text: float | None
    moves: float | None
    vanishes: float | None
    loss: float | None


class SinkCost(TypedDict):
    """What hiding the strongest sink costs, and other keys of as much mass (less where there are none of it); nats per masked
    token."""

    states: int
    hidden: Difference
    control: Difference
    difference: Difference
    mass: float
    control_mass: float


class DenoiseSummary(TypedDict):
    """What was found; ``summary.json`` holds it besides the model, the corpus and the settings.

    Shares are in percent: of (text, head, state) with a sink; of heads that have one before and after a step, and where they
    have one before it; of (text, head) with a sink somewhere, those without a key that is one in all of these states.
    """

    positions: int
    heads: int
    sink_rate: float
    moves: Difference | None
    vanishes: Difference | None
    wanders: float | None
    cost: SinkCost | None
    by_step: list[DenoisingStep]
    notes: NotRequired[list[str]]
    text: NotRequired[str]
