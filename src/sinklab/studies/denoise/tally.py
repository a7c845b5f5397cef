"""Sums over states and texts of a denoising, and the numbers and intervals that are made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sinklab.results.intervals import function_over_items
from sinklab.results.metric import PERCENTAGE, Metric, Row
from sinklab.results.summaries.denoise import DenoisingStep, SinkCost
from sinklab.results.summaries.shared import Difference
from sinklab.studies.denoise.filling import Filling
from sinklab.studies.denoise.places import Changes

__all__ = ["DENOISING_SINK_RATE", "MASKED_TOKEN_LOSS", "StateTally", "TextTallies", "rows_of"]

DENOISING_SINK_RATE = Metric(
    "denoising_sink_rate",
    "percent",
    "Share of texts in which the head has a sink after so many denoising steps: a key whose mean share of a row, over the "
    "queries that see it, exceeds the threshold.",
    range=PERCENTAGE,
)
MASKED_TOKEN_LOSS = Metric(
    "masked_token_loss",
    "nats",
    "Mean loss of the text's own tokens that are masked after so many denoising steps; count is their number.",
)


SAME = 1e-12
"""By how much shares of two texts that are the same may differ by rounding."""


@dataclasses.dataclass
class StateTally:
    """Counts of one state, over texts and heads.

    Attributes:
        tokens, masked: how many there are, and how many are masked.
        special: sinks (text, head, key) on tokens that are never masked.
        on_masked, sinks: those on tokens that are masked, and all.
        with_sink: how many texts have one, by head ``(heads,)``.
        before, both, moves, vanishes: of :class:`~sinklab.studies.denoise.places.Changes`, to the next state.
        loss, scored: sum over masked tokens, and their number.
    """

    texts: int = 0
    tokens: int = 0
    masked: int = 0
    special: int = 0
    on_masked: int = 0
    sinks: int = 0
    with_sink: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    before: int = 0
    both: int = 0
    moves: int = 0
    vanishes: int = 0
    loss: float = 0.0
    scored: int = 0

    def add(self, filling: Filling, special: Tensor, hits: Tensor) -> None:
        """Count some texts.

        Args:
            special: boolean ``(texts, length)``, tokens that are never masked.
            hits: boolean ``(texts, heads, length)``, which keys are sinks.
        """
        with_sink = hits.any(-1).sum(0)
        self.with_sink = with_sink if not self.texts else self.with_sink + with_sink
        self.texts += len(hits)
        self.tokens += filling.masked.numel()
        self.masked += int(filling.masked.sum())
        self.sinks += int(hits.sum())
        self.special += int((hits & special[:, None]).sum())
        self.on_masked += int((hits & filling.masked[:, None]).sum())

    def add_changes(self, found: Changes) -> None:
        """Count what became of the sinks of some texts."""
        self.before += int(found.before.sum())
        self.both += int(found.both.sum())
        self.moves += int(found.moves.sum())
        self.vanishes += int(found.vanishes.sum())

    def record(self, step: int) -> DenoisingStep:
        """The numbers of ``summary.json``."""
        special, masked = _percent(self.special, self.sinks), _percent(self.on_masked, self.sinks)
        return {
            "step": step,
            "masked": 100 * self.masked / self.tokens,
            "sink_rate": 100 * int(self.with_sink.sum()) / (self.texts * len(self.with_sink)),
            "sinks": self.sinks,
            "on_special": special,
            "on_masked": masked,
            "on_text": _percent(self.sinks - self.special - self.on_masked, self.sinks),
            "moves": _percent(self.moves, self.both),
            "vanishes": _percent(self.vanishes, self.before),
            "loss": self.loss / self.scored if self.scored else None,
        }


class TextTallies:
    """Sums over the states of every text, the items of all intervals; float64 ``(texts,)`` each.

    Attributes:
        sums: by name. ``before, both, moves, vanishes``: heads and steps, as in
            :class:`~sinklab.studies.denoise.places.Changes`. ``states``: in which a token is masked and some head has a sink;
            of these the masked tokens ``scored``, how much more loss they have together where the sink is ``hidden`` and where
            other keys are (``control``), and the mean share over heads of what was hidden, ``mass`` and ``control_mass``.
    """

    def __init__(self, texts: int) -> None:
        names = ("before", "both", "moves", "vanishes", "states", "scored", "hidden", "control", "mass", "control_mass")
        self.sums = {name: torch.zeros(texts, dtype=torch.float64) for name in names}

    def add(self, part: slice, **values: Tensor) -> None:
        """Add a number for each of some texts."""
        for name, value in values.items():
            self.sums[name][part] += value

    def add_changes(self, part: slice, found: Changes) -> None:
        """Count what became of the sinks of some texts."""
        fields = {field.name: getattr(found, field.name).sum(1) for field in dataclasses.fields(found)}
        self.add(part, **fields)

    def share(self, part: str, whole: str) -> Difference | None:
        """One sum over another in percent, with an interval over texts; ``None`` where the other is 0.

        Where it is the same in all texts, as 0 or 100 %, they show no spread, and n texts without an exception leave 3 / n.
        """
        values = self._values(part, whole)
        having = int((values[1] > 0).sum())
        if not having:
            return None
        mean = 100 * float(values[0].sum() / values[1].sum())
        if having == 1:
            return {"mean": mean, "low": None, "high": None}
        if np.ptp(values[0][values[1] > 0] / values[1][values[1] > 0]) < SAME:
            unseen = 300 / having
            return {"mean": mean, "low": max(0.0, mean - unseen), "high": min(100.0, mean + unseen)}
        interval = function_over_items(values, _ratio)
        return {"mean": mean, "low": max(0.0, 100 * interval.low), "high": min(100.0, 100 * interval.high)}

    def cost(self) -> SinkCost | None:
        """What hiding costs by masked token; ``None`` where nothing was hidden."""
        states = float(self.sums["states"].sum())
        if not states:
            return None
        self.sums["difference"] = self.sums["hidden"] - self.sums["control"]
        return {
            "states": int(states),
            "hidden": self._mean("hidden"),
            "control": self._mean("control"),
            "difference": self._mean("difference"),
            "mass": float(self.sums["mass"].sum()) / states,
            "control_mass": float(self.sums["control_mass"].sum()) / states,
        }

    def _values(self, part: str, whole: str) -> np.ndarray:
        return torch.stack((self.sums[part], self.sums[whole])).numpy()

    def _mean(self, name: str) -> Difference:
        values = self._values(name, "scored")
        mean = float(values[0].sum() / values[1].sum())
        if (values[1] > 0).sum() < 2:
            return {"mean": mean, "low": None, "high": None}
        interval = function_over_items(values, _ratio)
        return {"mean": mean, "low": interval.low, "high": interval.high}


def rows_of(states: Sequence[StateTally], heads: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Rows of the long table: the rate of every head in every state, and the loss of every state."""
    layer, head = np.asarray([heads], dtype=np.int64).reshape(-1, 2).T
    for step, state in enumerate(states):
        rate = 100 * state.with_sink.double().numpy() / state.texts
        yield {"metric": DENOISING_SINK_RATE, "value": rate, "layer": layer, "head": head, "step": step, "count": state.texts}
        if state.scored:
            yield {"metric": MASKED_TOKEN_LOSS, "value": state.loss / state.scored, "step": step, "count": state.scored}


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _ratio(means: np.ndarray) -> np.ndarray:
    """Of two means; where a resample has none of the items that count, its ratio is that of no difference."""
    return np.divide(means[0], means[1], out=np.zeros_like(means[0]), where=means[1] > 0)
