"""Recommendation: from losses under cache policies to what to use, by rules that look at intervals and not at means alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from sinklab.results.blocks import counted, interval
from sinklab.results.intervals import rare_cost
from sinklab.streaming.perplexity import Estimate, estimate

SINK_MARGIN = 0.02
"""Nats per token (2 % of the perplexity) below which a difference between numbers of sinks does not count."""

WINDOW_MARGIN = 0.05
"""Nats per token that a smaller cache may cost before the larger one is recommended."""

Needed = Literal["yes", "no", "undecided"]


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to use, ``num_sinks`` first tokens and a window, and what that rests on.

    Attributes:
        needed: whether sinks are: ``yes`` if the best number of first tokens improves on none by more than the margin with 95 %
            confidence, ``no`` if with that confidence it does not, and otherwise ``undecided``.
        loss: of what to use, in nats per token.
        gain: what it gains against a window of the same total size; of a plain window, what the best number of sinks would.
    """

    needed: Needed
    num_sinks: int
    window: int
    loss: Estimate
    gain: Estimate
    sentence: str
    notes: tuple[str, ...]


def recommend(by_sinks: Mapping[int, Mapping[int, Tensor]], *, trained_length: int | None = None) -> Recommendation:
    """The number of sinks and the window to use.

    In the largest cache that was measured, the fewest sinks are chosen that are not worse than the best number of them by more
    than :data:`SINK_MARGIN`; then the smallest cache in which so many are not worse than there by more than
    :data:`WINDOW_MARGIN` and whether sinks are needed comes out alike. "Not worse" means that the upper end of the 95 %
    interval of the paired difference is below.

    Args:
        by_sinks: tokens held before the query, sinks included, to number of sinks to losses ``(documents, tokens)``, all of the
            same tokens, NaN where not scored. Every cache needs 0 sinks and one other number.
        trained_length: tokens that the model was trained on at once, if known.
    """
    largest = max(by_sinks)
    needed, sinks, rival = _sinks(by_sinks[largest])
    alike = {held: sizes[sinks] for held, sizes in by_sinks.items() if sinks in sizes and _sinks(sizes)[0] == needed}
    budget = min(
        held for held, losses in alike.items() if held == largest or _below(estimate(losses - alike[largest]), WINDOW_MARGIN)
    )
    if sinks == 0 and rival not in by_sinks[budget]:
        rival = max(by_sinks[budget])
    chosen = by_sinks[budget][sinks]
    gain = estimate(by_sinks[budget][0] - by_sinks[budget][sinks or rival])
    notes = []
    if trained_length is not None and largest >= trained_length:
        notes.append(
            f"This rests on caches that take {largest + 1:,} positions, and the model was trained on {trained_length:,}: "
            "measure smaller ones."
        )
    if needed == "no":  # of means over texts, which hide what few of them have
        notes.append(rare_cost(len(chosen)))
    window, said = f"a window of {budget - sinks:,} tokens", interval(gain, 3, "")
    best = f"{counted(rival, 'sink')} would gain {said} nats per token"
    sentence = {
        "yes": f"Keep {counted(sinks, 'sink')} and {window}: {said} nats per token better than without.",
        "no": f"No sinks needed: {window}; {best}.",
        "undecided": f"Whether sinks are needed is undecided on this text ({best}): measure on more text.",
    }[needed]
    return Recommendation(needed, sinks, budget - sinks, estimate(chosen), gain, sentence, tuple(notes))


def _sinks(sizes: Mapping[int, Tensor]) -> tuple[Needed, int, int]:
    """Whether sinks are needed, how many, and the best number of them that is not 0."""
    means = {number: estimate(losses).mean for number, losses in sizes.items()}
    best = min((number for number in sizes if number), key=lambda number: (means[number], number))
    gain = estimate(sizes[0] - sizes[best])
    if _above(gain, SINK_MARGIN):
        enough = (
            number for number in sorted(sizes) if number == best or _below(estimate(sizes[number] - sizes[best]), SINK_MARGIN)
        )
        return "yes", next(enough), best
    # The best of several is the best by luck too, which makes gains look larger: the safe side for a "no".
    if _below(gain, SINK_MARGIN):
        return "no", 0, best
    return "undecided", (best if gain.mean > 0 else 0), best


def _below(difference: Estimate, margin: float) -> bool:
    return difference.high is not None and difference.high <= margin


def _above(difference: Estimate, margin: float) -> bool:
    return difference.low is not None and difference.low > margin
