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
    """What to use, and what it costs.

    Attributes:
        needed: whether sinks are: ``yes`` if the best number of first tokens, or other tokens that a policy pins, improve on
            none by more than the margin with 95 % confidence, ``no`` if with that confidence they do not, and otherwise
            ``undecided``.
        num_sinks, window: sizes of the best policy that keeps first tokens, ``sink_window``; 0 sinks are a plain window.
        better: label of the policy that keeps other tokens in the same size and is what to use, as it is better than that by
            more than the margin; ``None`` where none is.
        loss: of what to use, in nats per token.
        gain: what it gains against a window of the same total size; of a plain window, what the best number of sinks would.
        sentence: the finding.
        notes: what it rests on where that is not enough, and what it cannot show, a sentence each.
    """

    needed: Needed
    num_sinks: int
    window: int
    better: str | None
    loss: Estimate
    gain: Estimate
    sentence: str
    notes: tuple[str, ...]


def recommend(
    by_sinks: Mapping[int, Mapping[int, Tensor]],
    *,
    pinned: Mapping[int, Mapping[str, Tensor]] | None = None,
    trained_length: int | None = None,
) -> Recommendation:
    """The number of sinks and the window to use.

    In the largest cache that was measured, the fewest sinks are chosen that are not worse than the best number of them by more
    than :data:`SINK_MARGIN`; then the smallest cache in which so many are not worse than there by more than
    :data:`WINDOW_MARGIN` and whether sinks are needed comes out alike. "Not worse" means that the upper end of the 95 %
    interval of the paired difference is below. Of policies that keep other tokens in the same size the best takes their place
    where it is better by more than :data:`SINK_MARGIN`, with the whole interval; where it is so in the largest size, its losses
    choose the size.

    Args:
        by_sinks: tokens held before the query, sinks included, to number of sinks to losses ``(documents, tokens)``, all of the
            same tokens, NaN where not scored. Every cache needs 0 sinks and one other number.
        pinned: tokens held to losses of policies that keep other tokens than the first ones, by their labels.
        trained_length: tokens that the model was trained on at once, if known.
    """
    pinned = pinned or {}
    largest = max(by_sinks)
    needed, sinks, rival = _sinks(by_sinks[largest])
    better_by_size = {
        held: _better_pinned(by_sinks[held][sinks], others)
        for held, others in pinned.items()
        if sinks in by_sinks.get(held, {})
    }
    budget = _size(by_sinks, pinned, better_by_size, needed, sinks)
    if sinks == 0 and rival not in by_sinks[budget]:
        rival = max(by_sinks[budget])
    better = better_by_size.get(budget)
    first = by_sinks[budget][sinks]
    chosen = first if better is None else pinned[budget][better]
    with_sinks = by_sinks[budget][sinks or rival] if better is None else chosen
    gain = estimate(by_sinks[budget][0] - with_sinks)
    if better is not None and _above(gain, SINK_MARGIN):
        needed = "yes"
    notes = []
    if trained_length is not None and largest >= trained_length:
        notes.append(
            f"This rests on caches that take {largest + 1:,} positions, and the model was trained on {trained_length:,}: "
            "measure smaller ones."
        )
    if needed == "no":  # of means over texts, which hide what few of them have
        notes.append(rare_cost(len(chosen)))
    use = Recommendation(needed, sinks, budget - sinks, better, estimate(chosen), gain, "", tuple(notes))
    return dataclasses.replace(use, sentence=_sentence(use, rival))


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


def _size(
    by_sinks: Mapping[int, Mapping[int, Tensor]],
    pinned: Mapping[int, Mapping[str, Tensor]],
    better_by_size: Mapping[int, str | None],
    needed: Needed,
    sinks: int,
) -> int:
    """The smallest size that loses little against the largest one, among those in which the answer is the same.

    Args:
        better_by_size: label of the policy that is better than first tokens, by size; ``None`` or no entry where none is.
        needed, sinks: the answer for first tokens in the largest size.
    """
    largest = max(by_sinks)
    if better_by_size.get(largest) is not None:
        alike = {held: pinned[held][label] for held, label in better_by_size.items() if label is not None}
    else:
        alike = {held: sizes[sinks] for held, sizes in by_sinks.items() if sinks in sizes and _sinks(sizes)[0] == needed}
    return min(
        held for held, losses in alike.items() if held == largest or _below(estimate(losses - alike[largest]), WINDOW_MARGIN)
    )


def _below(difference: Estimate, margin: float) -> bool:
    return difference.high is not None and difference.high <= margin


def _above(difference: Estimate, margin: float) -> bool:
    return difference.low is not None and difference.low > margin


def _better_pinned(first: Tensor, pinned: Mapping[str, Tensor]) -> str | None:
    """Label of the best policy that keeps other tokens; ``None`` if it gains too little over the one with first tokens."""
    gains = {label: estimate(first - losses) for label, losses in pinned.items()}
    best = max(gains, key=lambda label: gains[label].mean, default=None)
    return best if best is not None and _above(gains[best], SINK_MARGIN) else None


def _sentence(use: Recommendation, rival: int) -> str:
    """What to use, and what it gains; ``rival`` is the best number of sinks that is not 0."""
    gain, window = interval(use.gain, 3, ""), f"a window of {use.window:,} tokens"
    if use.better is not None:
        return f"Keep the sinks where they were found ({use.better}): {gain} nats per token better than without."
    if use.needed == "yes":
        return f"Keep {counted(use.num_sinks, 'sink')} and {window}: {gain} nats per token better than without."
    best = f"{counted(rival, 'sink')} would gain {gain} nats per token"
    if use.needed == "no":
        return f"No sinks needed: {window}; {best}."
    return f"Whether sinks are needed is undecided on this text ({best}): measure on more text."
