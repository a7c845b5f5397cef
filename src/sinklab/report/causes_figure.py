"""The figure of effects on a page of causes: a row for each head, intervals on one axis."""

from __future__ import annotations

import math

from sinklab.results.summaries.causes import CausesSummary, Effect, ExaminedHead, Labelled

__all__ = ["SHOWN", "effect_of", "figure_of", "interval", "name_of"]

SHOWN = 40
"""Heads in the figure of effects; of a larger model the ones that are decided and hurt most."""

SERIES = {
    "redirect": "all attention to the sink",
    "hide": "sink hidden",
    "zero": "output set to zero",
    "resample": "output of another text",
}
"""What the figure shows, by the name of the intervention."""

_ROW, _TOP = 13, 11


def figure_of(causes: CausesSummary, domain: str) -> dict[str, object]:
    """Effects on one domain: a row for each head, intervals on one axis. Coordinates are percent, so that it fits any width."""
    least = causes["minimal_effect"]
    heads = [head for head in causes["heads"] if any(effect_of(head, name, domain) for name in SERIES)]
    shown = sorted(heads, key=lambda head: (head["label"] == "undecided", -_size(head, domain)))[:SHOWN]
    bounds = [
        effect[end] for head in shown for name in SERIES if (effect := effect_of(head, name, domain)) for end in ("low", "high")
    ]
    scale = _Scale(min([-2 * least, *bounds]), max([2 * least, *bounds]), least)
    used = [name for name in SERIES if any(effect_of(head, name, domain) for head in shown)]
    rows = []
    for head in sorted(shown, key=lambda head: (head["layer"], head["head"])):
        marks = []
        for line, name in enumerate(used):
            effect = effect_of(head, name, domain)
            if effect is not None:
                marks.append(
                    {
                        "name": name, "y": _TOP + _ROW * line, "x": scale(effect["mean"]), "low": scale(effect["low"]),
                        "high": scale(effect["high"]), "words": f"{SERIES[name]}: {interval(effect, least)}",
                    }
                )  # fmt: skip
        rows.append({"name": name_of(head), "label": head["domains"].get(domain, head["label"]), "marks": marks})
    return {
        "domain": domain,
        "rows": rows,
        "height": 2 * _TOP + _ROW * (len(used) - 1),
        "ticks": [{"x": scale(value), "text": f"{value:g}".replace("-", "\u2212")} for value in scale.ticks()],
        "zero": scale(0.0),
        "band": scale(least),  # from the left edge on: what helps counts as nothing too
        "series": [{"name": name, "words": SERIES[name]} for name in used],
        "more": len(heads) - len(shown),
        "unit": causes["unit"],
        "least": f"{least:g}",
    }


class _Scale:
    """Percent of the width for a value: even steps up to the minimal effect, even ratios beyond it."""

    def __init__(self, low: float, high: float, least: float) -> None:
        self._least = least
        self._low, self._high = math.asinh(low / least), math.asinh(high / least)
        self._bounds = (low, high)

    def __call__(self, value: float) -> str:
        share = (math.asinh(value / self._least) - self._low) / (self._high - self._low)
        return f"{2 + 96 * share:.2f}"

    def ticks(self) -> list[float]:
        """Zero, the minimal effect to both sides, and its decades up to the ends."""
        decades = [self._least * 10**power for power in range(12)]
        ticks = [value for decade in decades for value in (-decade, decade)]
        return sorted([0.0, *(value for value in ticks if self._bounds[0] <= value <= self._bounds[1])])


def effect_of(head: Labelled, name: str, domain: str) -> Effect | None:
    """Mean and interval of an intervention on a domain, where it was measured."""
    return head["effects"].get(name, {}).get(domain)


def _size(head: ExaminedHead, domain: str) -> float:
    means = [effect["mean"] for name in SERIES if (effect := effect_of(head, name, domain))]
    return max(map(abs, means), default=0.0)


def interval(effect: Effect, least: float) -> str:
    """Mean and interval with two digits more than the minimal effect has: what lies behind them decides nothing."""
    places = max(0, 2 - math.floor(math.log10(least)) - 1)
    ends = (effect["mean"], effect["low"], effect["high"])
    mean, low, high = (f"{end:z.{places}f}".replace("-", "\u2212") for end in ends)
    return f"{mean} [{low}, {high}]"


def name_of(head: ExaminedHead) -> str:
    """``layer.head``."""
    return f"{head['layer']}.{head['head']}"
