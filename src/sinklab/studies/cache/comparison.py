"""Cache policies compared: loss, speed and memory of a model under each, over long texts, and which one to use."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.corpora.base import hash_tokens
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import guess_warning, is_causal_lm
from sinklab.models.positions import trained_length
from sinklab.policies.base import Policy, SlotPolicy
from sinklab.policies.recompute import Recompute
from sinklab.registry import policies as policy_registry
from sinklab.results.intervals import mean_interval
from sinklab.results.metric import Row
from sinklab.results.progress import Progress, plan, silent
from sinklab.results.sections import Context, to_json
from sinklab.results.table import make_table
from sinklab.streaming.perplexity import CHUNK, Decoding, decoding, estimate, losses
from sinklab.streaming.traits import read_rotations
from sinklab.studies.cache.found import Comparison, Difference, LeftOut, PolicyEntry, Size, policy_rows
from sinklab.studies.cache.plan import (
    affordable,
    checked_budgets,
    default_length,
    each_once,
    label,
    long_texts,
    plan_policies,
    scored_from,
)
from sinklab.studies.cache.recommendation import recommend

SUMMARY_VERSION = 1
BUCKETS = 24
"""Points of the curve of loss against position."""

STRETCH = 4
"""Tokens of a point of the curve that are scored under re-computation, which encodes a whole window for each of them."""

COARSE = 3
"""Points of the curve that are one where few of their tokens were scored."""

LEAST_STEPS, STEPS, WARM_UP = 4, 128, 16
"""Single tokens that are timed, and those before them that are not, at most one for four of these."""

STEP = 32
"""Tokens of a text that are read in the time of a single token: its weights must come from memory all the same."""

IN_AUDIT: dict[str, Any] = {
    "names": ("full", "recompute", "window", "sink_window"),
    "sinks": (0, 1, 4),
    "steps": 32,
    "share": 0.25,
}
LARGEST_CACHE, LONGEST_TEXT, TEXTS = 128, 2048, 4
"""What the section of an audit measures: at most so many tokens held, of so long and so many texts."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Measured:
    """One policy: its losses ``(documents, tokens - 1)`` in nats, NaN where not scored."""

    policy: Policy
    budget: int | None
    losses: Tensor


@dataclasses.dataclass(frozen=True)
class _Curve:
    """Loss by position: means of points, half of their 95 % intervals where they are of samples, and the tokens scored."""

    means: list[float | None]
    errors: list[float | None] | None
    counts: list[int]


def require_next_token(loaded: LoadedModel) -> None:
    """Refuse a model that policies have no loss for."""
    if not is_causal_lm(loaded.model):
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} predicts no next token, so policies have no loss to compare"
        )


def policies_section(context: Context) -> tuple[dict[str, Any], pd.DataFrame]:
    """The section of an audit: one size and few texts, to be quick; ``{"refused": why}`` where it cannot be had."""
    loaded, names = context.loaded, [name for name in IN_AUDIT["names"] if name in policy_registry]
    sinks: Sequence[int] = IN_AUDIT["sinks"]
    try:
        require_next_token(loaded)
        budget = max(max(sinks) + 1, min(checked_budgets(loaded, None, sinks)[-1], LARGEST_CACHE))
        length = max(4 * budget, min(default_length(loaded, [budget]), LONGEST_TEXT))
        number = max(2, min(TEXTS, affordable(loaded.model, length, IN_AUDIT["share"])))
        texts = long_texts(context.corpus, loaded.encoder, tokens=length, documents=number, seed=context.seed, bos=context.bos)
        found, rows = compared(
            loaded, texts, names=names, budgets=[budget], sinks=sinks, corpus=context.corpus.label, bos=context.bos,
            steps=IN_AUDIT["steps"], share=IN_AUDIT["share"], progress=context.progress,
        )  # fmt: skip
    except (ConfigurationError, InputError, UnsupportedModelError) as error:
        return {"refused": str(error)}, make_table([])
    table = make_table(
        rows, run_id=context.run_id, model=loaded.name, revision=loaded.revision, operation=loaded.operation,
        corpus=context.corpus.label, bos=int(context.bos), seed=context.seed,
    )  # fmt: skip
    return to_json(found), table


def compared(
    loaded: LoadedModel,
    rows: Tensor,
    *,
    names: Sequence[str],
    budgets: Sequence[int],
    sinks: Sequence[int],
    corpus: str,
    bos: bool,
    steps: int = STEPS,
    share: float = 1.0,
    briefly: bool = False,
    progress: Progress = silent,
) -> tuple[Comparison, list[Row]]:
    """A comparison, with the rows of the long table.

    Args:
        rows: texts, int64 ``(documents, tokens)``.
        steps: single tokens that are timed, fewer of a model of many parameters.
        share: of the work that is done by default to time steps and to compute windows anew.
        briefly: take policies that no recommendation rests on at the largest size only.
    """
    length, held = rows.shape[1], max(budgets)
    if length <= held + 2:  # a query sees itself besides, and the last token is none
        raise InputError(
            f"a window of {held:,} tokens covers the {length:,} tokens of a text, so nothing is ever evicted and all policies "
            f"are one; choose a smaller `windows` or more `tokens` than {held + 2}"
        )
    trained, first = trained_length(loaded.model), scored_from(loaded, length, held)
    left_out: list[LeftOut] = []
    measured: list[_Measured] = []
    # Once each: settings that are given may be those that a name alone stands for, among others.
    chosen = each_once(plan_policies(names, budgets, sinks, left_out, briefly=briefly))
    wanted = [_scored(loaded.model, rows, policy, first, share) for policy, _ in chosen]
    stages = [f"{number}/{len(chosen)} {label(policy)}" for number, (policy, _) in enumerate(chosen, start=1)]
    plan(
        progress, {stage: len(rows) * one[0].computed(parts) for stage, one, parts in zip(stages, chosen, wanted, strict=True)}
    )
    for stage, (policy, budget), parts in zip(stages, chosen, wanted, strict=True):
        try:
            if not policy.bounded and length > (trained or length):
                _require_positions(loaded, length)
            report = functools.partial(progress, stage)
            dense = next((entry.losses for entry in measured if entry.policy.name == "full"), None)
            token_losses = _losses(loaded.model, rows, policy, parts, dense, report)
            measured.append(_Measured(policy, budget, token_losses))
        except (ConfigurationError, UnsupportedModelError) as error:
            left_out.append(LeftOut(policy.name, label(policy), str(error)))
    if not measured:
        why = f"{left_out[0].policy}: {left_out[0].reason}" if left_out else "nothing was asked for"
        raise UnsupportedModelError(f"no policy can be had with {loaded.name}; {why}")
    round_of = sum(max(STEP, entry.policy.max_held(length) * isinstance(entry.policy, Recompute)) for entry in measured)
    steps = min(steps, max(LEAST_STEPS, affordable(loaded.model, round_of, share / 2)))
    warm_up = min(WARM_UP, max(1, steps // 4))
    steps = max(1, min(steps, length - warm_up - 1))
    timed = decoding(
        loaded.model, rows[:1], [entry.policy for entry in measured], steps=steps, warm_up=min(warm_up, length - steps - 1),
        progress=functools.partial(progress, "decoding"),
    )  # fmt: skip
    edges = _edges(length)
    points = list(itertools.pairwise(edges))
    counts = [int((~entry.losses[:, first - 1 :].isnan()).sum()) for entry in measured]
    windows = _windows(measured)
    curves = [_curve(entry, windows.get(entry.budget), first, points) for entry in measured]
    measured = [
        dataclasses.replace(entry, losses=_completed(entry.losses, windows[entry.budget], first, edges))
        if entry.policy.name == "recompute" and entry.budget in windows
        else entry
        for entry in measured
    ]
    scored = [entry.losses[:, first - 1 :] for entry in measured]
    references = _references(measured, scored, budgets)
    entries = [
        _policy_entry(entry, part, references, speed, count, curve)
        for entry, part, speed, count, curve in zip(measured, scored, timed, counts, curves, strict=True)
    ]
    comparison = Comparison(
        SUMMARY_VERSION, loaded.name, loaded.revision, loaded.operation, corpus, int(bos), len(rows), length,
        hash_tokens(rows), first, trained, [list(pair) for pair in points], entries, left_out,
        **_advice(loaded, references, left_out, trained),
    )  # fmt: skip
    return comparison, list(policy_rows(comparison, [curve.counts for curve in curves]))


def _require_positions(loaded: LoadedModel, length: int) -> None:
    """Refuse to read past the end of a table of positions, where torch reports an index and a GPU is lost to the process."""
    try:
        read_rotations(loaded.model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"dense attention over {length:,} tokens needs positions past the {trained_length(loaded.model):,} that "
            f"{loaded.name} was made for, and it may have none: {error}"
        ) from error


def _losses(
    model: PreTrainedModel, rows: Tensor, policy: Policy, wanted: Sequence[range], dense: Tensor | None,
    report: Callable[[int, int], None],
) -> Tensor:  # fmt: skip
    """Losses under a policy; those of tokens that see all before them are taken over from ``dense`` where it is there."""
    if isinstance(policy, Recompute):
        return _recomputed(model, rows, policy, wanted, report)
    same = 0 if dense is None else _tokens_alike(policy, rows.shape[1]) // CHUNK * CHUNK  # chunks stay where they were
    token_losses = losses(model, rows, policy, first=1 + same, progress=report)
    return token_losses if dense is None else torch.cat((dense[:, :same], token_losses), dim=1)


def _tokens_alike(policy: Policy, length: int) -> int:
    """How many of the first queries of a text see all tokens before them."""
    if not isinstance(policy, SlotPolicy):
        return 0
    tokens = torch.arange(min(length, policy.num_slots + 1))
    sees_all = (policy.visible(tokens[:, None], tokens) | (tokens > tokens[:, None])).all(dim=1)
    return int(sees_all.long().cumprod(dim=0).sum())


def _scored(model: PreTrainedModel, rows: Tensor, policy: Policy, first: int, share: float = 1.0) -> list[range]:
    """Tokens whose losses are measured: all, and of re-computation the ends of the points of the curve from ``first`` on."""
    length = rows.shape[1]
    if not isinstance(policy, Recompute):
        return [range(1, length)]
    points = [(begin, stop) for begin, stop in itertools.pairwise(_edges(length)) if stop > first]
    stretch = max(1, min(STRETCH, affordable(model, len(points) * len(rows) * policy.max_held(length), 2 * share)))
    return [range(max(first, begin, stop - stretch), stop) for begin, stop in points]


def _recomputed(
    model: PreTrainedModel,
    rows: Tensor,
    policy: Recompute,
    wanted: Sequence[range],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Losses of these tokens; what such a policy sees is its window, wherever the reading began."""
    length = rows.shape[1]
    token_losses = torch.full((len(rows), length - 1), torch.nan)
    for number, tokens in enumerate(wanted):
        report(number, len(wanted))
        before = max(0, tokens.start - policy.max_held(length))
        part = losses(model, rows[:, before : tokens.stop], policy, first=tokens.start - before)
        token_losses[:, tokens.start - 1 : tokens.stop - 1] = part
    report(len(wanted), len(wanted))
    return token_losses


@dataclasses.dataclass(frozen=True, eq=False)
class _References:
    """Losses of the scored tokens, ``(documents, scored)``: of windows by tokens held and sinks, and of other references."""

    by_sinks: dict[int, dict[int, Tensor]]
    recompute: dict[int | None, Tensor]
    full: Tensor | None


def _references(measured: Sequence[_Measured], scored: Sequence[Tensor], budgets: Sequence[int]) -> _References:
    by_sinks: dict[int, dict[int, Tensor]] = {budget: {} for budget in budgets}
    recompute: dict[int | None, Tensor] = {}
    full: Tensor | None = None
    for entry, part in zip(measured, scored, strict=True):
        policy, budget = entry.policy, entry.budget
        if policy.name in ("window", "sink_window") and budget is not None:
            number = _num_sinks(policy) or 0
            # Of one size with both kinds of positions, the recommendation is about the usual kind.
            if number not in by_sinks[budget] or policy.positions == "in_cache":
                by_sinks[budget][number] = part
        elif policy.name == "full":
            full = part
        elif isinstance(policy, Recompute):
            recompute[budget] = part
    return _References(by_sinks, recompute, full)


def _policy_entry(
    entry: _Measured, part: Tensor, references: _References, speed: Decoding, count: int, curve: _Curve
) -> PolicyEntry:
    """What is reported of a policy."""
    policy, loss, size = entry.policy, estimate(part), entry.budget
    return PolicyEntry(
        policy=policy.name, label=label(policy), num_sinks=_num_sinks(policy), window=getattr(policy, "window", None),
        held=policy.max_held(entry.losses.shape[1] + 1), budget=size, settings=policy_registry.settings(policy),
        loss=loss.mean, loss_low=loss.low, loss_high=loss.high, scored_tokens=count,
        against_window=_difference(part, references.by_sinks.get(size or -1, {}).get(0)),
        against_recompute=_difference(part, references.recompute.get(size)),
        against_full=_difference(part, references.full),
        decoded_tokens=speed.steps, tokens_per_second=speed.tokens_per_second, bytes_held=speed.bytes_held,
        loss_by_position=curve.means, loss_errors=curve.errors,
    )  # fmt: skip


def _difference(part: Tensor, other: Tensor | None) -> Difference | None:
    if other is None or other is part:
        return None
    difference = estimate(part - other)
    return Difference(difference.mean, difference.low, difference.high)


def _advice(loaded: LoadedModel, references: _References, left_out: Sequence[LeftOut], trained: int | None) -> dict[str, Any]:
    """What is recommended; nothing without a size that was measured both with sinks and without."""
    usable = {budget: sizes for budget, sizes in references.by_sinks.items() if 0 in sizes and len(sizes) > 1}
    if not usable:
        have = sorted({number for sizes in references.by_sinks.values() for number in sizes})
        refused = dict.fromkeys(entry.reason for entry in left_out if entry.policy in ("window", "sink_window"))
        measured_with = f"{', '.join(map(str, have))} sinks" if have else "neither"
        why = f"No recommendation: it takes a window without sinks and one with some, and measured were {measured_with}."
        if not have and refused:
            why = "No recommendation: a window cannot be measured with this model."
        return {"sinks_needed": None, "recommended": None, "recommendation": why}
    advice = recommend(usable, trained_length=trained)
    warning = guess_warning(loaded.model, advice.loss.mean)
    return {
        "sinks_needed": advice.needed, "recommended": Size(advice.num_sinks, advice.window),
        "recommendation": advice.sentence, "notes": [*advice.notes, *([warning] if warning else [])],
    }  # fmt: skip


def _windows(measured: Sequence[_Measured]) -> dict[int | None, Tensor]:
    """Losses of the windows without sinks, to which differences are added of what was scored at some tokens; by size."""
    windows: dict[int | None, Tensor] = {}
    for entry in measured:
        # Others than a window without sinks, under either name, may pin no token and see something else.
        plain = entry.policy.name in ("window", "sink_window") and _num_sinks(entry.policy) == 0
        if entry.budget and plain and (entry.budget not in windows or entry.policy.positions == "in_cache"):
            windows[entry.budget] = entry.losses
    return windows


def _curve(entry: _Measured, window: Tensor | None, first: int, points: Sequence[tuple[int, int]]) -> _Curve:
    """Loss by position; of re-computation, which is scored at some tokens, at fewer points and with errors."""
    counts = [int((~entry.losses[:, start - 1 : stop - 1].isnan()).sum()) for start, stop in points]
    if entry.policy.name != "recompute":
        means = [float(entry.losses[:, start - 1 : stop - 1].nanmean()) for start, stop in points]
        return _Curve([None if mean != mean else mean for mean in means], None, counts)
    known = [index for index, count in enumerate(counts) if count]
    curve = _Curve([None] * len(points), [None] * len(points), [0] * len(points))
    assert curve.errors is not None
    reference = torch.zeros_like(entry.losses) if window is None else window
    for group in (known[start : start + COARSE] for start in range(0, len(known), COARSE)):
        parts = [slice(max(first, points[index][0]) - 1, points[index][1] - 1) for index in group]
        differences = torch.cat([(entry.losses - reference)[:, part].nanmean(dim=1) for part in parts]).tolist()
        shift, half = mean_interval(differences) if len(differences) > 1 else (differences[0], None)
        mean = shift + float(reference[:, parts[0].start : parts[-1].stop].mean())
        middle = group[len(group) // 2]
        if mean >= 0:  # no cross-entropy is less, and a sum with a difference may be
            curve.means[middle], curve.errors[middle] = mean, half
            curve.counts[middle] = sum(counts[index] for index in group)
    return curve


def _completed(sampled: Tensor, reference: Tensor, first: int, edges: Sequence[int]) -> Tensor:
    """Losses of all tokens from ``first`` on, of a policy scored at some: its mean difference added to another's loss."""
    result = sampled.clone()
    for start, stop in itertools.pairwise(edges):
        if stop > first:
            part = slice(max(first, start) - 1, stop - 1)
            result[:, part] = reference[:, part] + (sampled - reference)[:, part].nanmean(dim=1, keepdim=True)
    return result


def _edges(length: int) -> list[int]:
    """Positions of tokens at which the points of the curve begin, and the end."""
    points = min(BUCKETS, length - 1)
    return [1 + (length - 1) * point // points for point in range(points + 1)]


def _num_sinks(policy: Policy) -> int | None:
    if isinstance(policy, SlotPolicy):
        return len(policy.pinned)
    number = getattr(policy, "num_sinks", None)
    return number if isinstance(number, int) else None
