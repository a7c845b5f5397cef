"""The measurement behind depend(): whether a score depends on the sink, the outcome of a task, and what limits it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from sinklab.attention.host_arguments import lean_arguments
from sinklab.attention.maps import token_text
from sinklab.attention.session import attend
from sinklab.corpora._reading import RUN, count_repeats
from sinklab.errors import UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import guess_warning, is_causal_lm
from sinklab.models.positions import trained_length
from sinklab.results.blocks import counted
from sinklab.results.intervals import LEVEL, Interval, function_over_items, mean_over_items
from sinklab.sinks.finder import SinkFinder
from sinklab.streaming.limits import most_slots
from sinklab.streaming.traits import ANEW, FixedPositions, read_rotations
from sinklab.studies.depend.found import SCORES, NoIndex, Outcome, Point, PolicyScore
from sinklab.studies.depend.harness import Contenders, Prepared, Scored

Verdict = Literal["yes", "no", "undecided"]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Whether a score depends on the sink tokens, and why, in words that follow "because".

    Attributes:
    verdict: ``yes``: the interval of the difference lies above the minimal effect. ``no``: it lies between minus and plus
    the
            minimal effect, and the score uses its context. ``undecided``: anything else, and a score at chance: what falls from
            there to below it is no knowledge that a sink could carry.
        difference: score with sinks less score without, at the same number of tokens held, over paired items.
    """

    verdict: Verdict
    difference: Interval
    reason: str


def judge(
    with_sinks: np.ndarray,
    without: np.ndarray,
    floor: np.ndarray,
    *,
    minimal_effect: float,
    chance: float | None,
    scale: float | None,
) -> Judgement:
    """Judge one score.

    Args:
        with_sinks, without, floor: one number for each item, the same items in the same order; the floor is a policy that
            keeps almost no token.
        minimal_effect: smallest difference that counts.
        chance: value of a model that knows nothing, or ``None``.
        scale: how far one item could change, for scores in a fixed range.
    """
    difference = mean_over_items(with_sinks - without, scale=scale, paired=True)
    # Two policies are looked at, so each interval leaves out half as much.
    of_both = [mean_over_items(values, level=(1 + LEVEL) / 2, scale=scale) for values in (with_sinks, without)]
    best = max(of_both, key=lambda one: one.mean)
    effect = f"{minimal_effect:g}"
    if chance is not None and best.low <= chance:
        verdict: Verdict = "undecided"
        at_best = f"{best.mean:.3g} at best, and {chance:g} needs no model"
        reason = f"the model is not shown to be above chance, with sinks or without: {at_best}"
    elif difference.low > minimal_effect:
        verdict, reason = "yes", f"the whole interval of the difference lies above {effect}"
    elif -minimal_effect <= difference.low and difference.high <= minimal_effect:
        uses = [mean_over_items(values - floor, scale=scale, paired=True) for values in (with_sinks, without)]
        verdict, reason = "no", f"the whole interval of the difference lies within ± {effect}"
        if max(uses, key=lambda one: one.mean).low <= 0.0:
            verdict, reason = "undecided", "the score is not shown to be better than with next to nothing in the cache"
    elif difference.high < -minimal_effect:
        verdict, reason = "undecided", f"sinks cost more than {effect} here: the window they take is worth more"
    else:
        verdict, reason = "undecided", f"the interval of the difference reaches across {effect} or -{effect}"
    return Judgement(verdict, difference, reason)


def measure_dependence(
    visible: np.ndarray, hidden: np.ndarray, floor: np.ndarray, *, chance: float | None, scale: float | None
) -> Interval | str:
    """The index of dependence with its interval, or why there is none: the share of a score that goes when the sink is hidden.

    ``(V - H) / (max(V, H) - F)`` of mean scores with the sink visible (V), hidden (H), and without context (F); from -1 to 1.
    Items are resampled, visible, hidden and floor of an item together, and the ratio is that of the means: a mean of ratios of
    single items would be ruled by those that are near the floor. Where most items do not change and none changes one way, the
    interval leaves room for that way, as that of the difference does. Arguments as of :func:`judge`.
    """
    least = floor if chance is None else np.full(len(visible), chance)
    best = visible if visible.mean() >= hidden.mean() else hidden
    # The better of two is looked at, so each interval leaves out half as much, as in the judge.
    above = mean_over_items(best - least, level=(1 + LEVEL) / 2, scale=scale)
    if above.low <= 0.0:
        # Without a chance level the score may gain by the sink all the same: what is not known is a share of what.
        worse = "not shown to be better than with one token in the cache: no share of it can be given"
        return worse if chance is None else "at chance: says nothing about sinks"
    index = function_over_items(np.stack([visible, hidden, least]), _share)
    change, room = visible - hidden, float((best - least).mean())
    if np.ptp(change) < 1e-12:  # no spread to resample: the rule of three, as for the difference itself
        difference = mean_over_items(change, scale=scale, paired=True)
        index = _bounded(index.mean, difference.low / room, difference.high / room)
    elif scale is not None and np.mean(change == 0) > 0.5:  # and as there where none of few changes goes the other way
        margin = 3.0 * scale / len(change) / room
        low = index.low if change.min() < 0 else index.mean - math.hypot(index.mean - index.low, margin)
        high = index.high if change.max() > 0 else index.mean + math.hypot(index.high - index.mean, margin)
        index = _bounded(index.mean, low, high)
    return index


def _bounded(mean: float, low: float, high: float) -> Interval:
    """The interval of an index, within its range."""
    return Interval(mean, max(-1.0, min(1.0, low)), max(-1.0, min(1.0, high)))


def _share(means: np.ndarray) -> np.ndarray:
    """The index of mean scores ``(3, …)``: visible, hidden, least."""
    visible, hidden, least = means
    gains = np.maximum(visible, least) - least, np.maximum(hidden, least) - least
    room = np.maximum(*gains)
    result: np.ndarray = np.divide(gains[0] - gains[1], room, out=np.zeros_like(room), where=room > 0.0)
    return result


MOST_REPEATS = 0.1
"""Share of texts scored on tokens of another one up to which their intervals stand without a warning."""

MINIMAL_EFFECT = 0.05
"""Of a task of the harness, which names none."""

SEARCHED = 64
"""Tokens of a text in which sinks are looked for."""


def require_windows(loaded: LoadedModel) -> None:
    """Refuse a model that no task can be put to under the two caches that are always compared: they hold a window."""
    if not is_causal_lm(loaded.model):
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} predicts no next token of its own text, so no task can be put to it under a "
            "cache policy; depend is for decoders"
        )
    try:
        read_rotations(loaded.model)
    except FixedPositions as error:
        raise UnsupportedModelError(
            f"{str(error).removesuffix(ANEW)}. depend compares caches of a window with and without the sink, which this model "
            "cannot have; 'sinklab causes' asks what its sinks do on whole texts"
        ) from None
    except UnsupportedModelError:
        pass  # said of the policy that cannot be had, which need not be one of the two


def default_window(loaded: LoadedModel) -> int:
    """Half of the length that the model was trained on, so that everything held is at a familiar distance; 1,024 at most.

    Or as many as the narrowest layer sees besides the token at hand, where every layer has a window and that is less.
    """
    trained, most = trained_length(loaded.model), most_slots(loaded.model)
    half = min(1024, trained // 2) if trained else 1024
    return half if most is None else min(half, most - 1)


def outcome(prepared: Prepared, scored: Scored, contenders: Contenders) -> Outcome:
    """What the scores of a task come to."""
    task, unit = prepared.own, SCORES[scored.metric].unit
    if task is not None:
        chance, minimal_effect = task.chance, task.minimal_effect
    else:
        chance = float(np.mean([1.0 / number for number in prepared.choices])) if min(prepared.choices) > 1 else None
        minimal_effect = MINIMAL_EFFECT
    scale = 1.0 if unit == "fraction" else None
    values = {name: _by_item(scores, prepared.item, prepared.counted) for name, scores in scored.scores.items()}
    judged, without, floor = (values[name] for name in (contenders.with_sinks, contenders.without, contenders.floor))
    verdict = judge(judged, without, floor, minimal_effect=minimal_effect, chance=chance, scale=scale)
    index = measure_dependence(judged, without, floor, chance=chance, scale=scale)
    axis = None if task is None else task.axis
    curves = {} if axis is None else {name: _curve(prepared, scores) for name, scores in scored.scores.items()}
    shown = [
        PolicyScore(
            name,
            _score(values[name], scale),
            None if name == contenders.without else mean_over_items(values[name] - without, scale=scale, paired=True),
            float(scored.scores[name].mean()),
        )
        if name in values
        else PolicyScore(name, refused=scored.refused[name])
        for name in contenders.policies
    ]
    points = {
        name: [Point(place, *dataclasses.astuple(_score(numbers, scale))) for place, numbers in curve]
        for name, curve in curves.items()
    }
    return Outcome(
        task=prepared.label, metric=scored.metric, unit=unit, axis=axis, documents=len(prepared.item), items=len(without),
        window=contenders.budget, with_sinks=contenders.with_sinks, without=contenders.without, chance=chance,
        minimal_effect=minimal_effect, verdict=verdict.verdict, reason=verdict.reason, difference=verdict.difference,
        sentence=f"{prepared.label} depends on the sink tokens: {verdict.verdict}.",
        dependence=NoIndex(index) if isinstance(index, str) else index, policies=shown, curves=points,
    )  # fmt: skip


def _by_item(scores: np.ndarray, item: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """One number for each item, ascending: the mean over those of its documents that are given."""
    of_item: dict[int, list[float]] = {}
    for index in indices:
        of_item.setdefault(item[index], []).append(scores[index])
    return np.array([np.mean(of_item[number]) for number in sorted(of_item)])


def _curve(prepared: Prepared, scores: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Places on the task's axis, ascending, each with one number an item."""
    at: dict[int, list[int]] = {}
    for index, place in enumerate(prepared.place):
        at.setdefault(place, []).append(index)
    return [(place, _by_item(scores, prepared.item, at[place])) for place in sorted(at)]


def _score(values: np.ndarray, scale: float | None) -> Interval:
    """Of a mean score; one in a fixed range is that of a share, and so is its interval."""
    interval = mean_over_items(values, scale=scale)
    return interval if scale is None else Interval(interval.mean, max(0.0, interval.low), min(scale, interval.high))


# --- warnings, each a sentence or empty ---------------------------------------------------------------------------------------


def window_warning(loaded: LoadedModel, window: int) -> str:
    """Where a cache and the token at hand have more positions than the model was trained on."""
    trained = trained_length(loaded.model)
    if trained is None or window < trained:
        return ""
    return (
        f"A window of {window:,} tokens and the token at hand take {window + 1:,} positions, and the model was made for "
        f"{trained:,}: scores there, with sinks or without, are those of positions it has never seen. Take a `window` below "
        f"{trained:,}."
    )


def text_warnings(loaded: LoadedModel, prepared: Prepared, contenders: Contenders) -> list[str]:
    """Of a task of ours: where texts are no sample, and where its strongest sink is not among the tokens that are compared."""
    if prepared.own is None:
        return []
    return [_repeats(prepared), _other_sink(loaded, prepared, contenders)]


def _repeats(prepared: Prepared) -> str:
    """Where many texts are scored on tokens that others are scored on, too."""
    assert prepared.own is not None
    if prepared.own.score != "log_likelihood":
        return ""
    # Runs that end in a token that is scored: a few tokens in a row are alike in any two texts.
    ends = [ids[-(scored + RUN - 1) :] for ids, scored in zip(prepared.texts, prepared.scored, strict=True)]
    repeats = count_repeats(ends)
    if repeats <= MOST_REPEATS * len(ends):
        return ""
    return (
        f"{prepared.label}: {repeats} of {len(ends)} texts are scored on tokens that another one is scored on, too (and the "
        f"{RUN - 1} before are alike). Intervals take texts for independent, and are too narrow here: take fewer `items` or a "
        "longer `corpus`."
    )


def _other_sink(loaded: LoadedModel, prepared: Prepared, contenders: Contenders) -> str:
    """Where the strongest sink of the texts is not among the first tokens that are compared."""
    length = min(SEARCHED, *map(len, prepared.texts))
    texts = torch.tensor(sorted({tuple(ids[:length]) for ids in prepared.texts}), device=loaded.device)
    finder = SinkFinder()
    try:
        with torch.no_grad(), attend(loaded.model, [finder]):
            for some in texts.split(16):
                loaded.model(**lean_arguments(loaded.model, {"input_ids": some}))
    except UnsupportedModelError:  # its attention cannot be seen, which no policy needs
        return ""
    sinks = finder.sinks(decode=lambda token: token_text(loaded.tokenizer, token))
    sink = sinks.main
    if sink is None or sink.kind == "null":
        return ""
    if sink.position is not None and sink.position - sinks.front < contenders.num_sinks:
        return ""
    return (
        f"{prepared.label}: the strongest sink of these texts is {sink.name}, and what is compared are the first "
        f"{counted(contenders.num_sinks, 'token')}: verdict and index say nothing of that sink. `sinklab cache` compares "
        "policies that keep other tokens."
    )


def loss_warning(loaded: LoadedModel, found: Outcome) -> str:
    """Where a task is scored by the likelihood of tokens, and no policy predicts them better than a guess."""
    scores = [row.score.mean for row in found.policies if row.score is not None]
    if found.metric != "log_likelihood" or not scores:
        return ""
    return guess_warning(loaded.model, -max(scores), text=found.task)
