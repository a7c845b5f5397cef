"""Cache policies compared: loss, speed and memory of a model under each, over long texts, and which one to use."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence

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
from sinklab.policies.pinned import Pinned
from sinklab.policies.recompute import Recompute
from sinklab.registry import policies as policy_registry
from sinklab.results.metric import LOSS, Coordinates, Metric, Row
from sinklab.results.run import Progress, silent
from sinklab.results.summaries.cache import Comparison, LeftOut, PolicyEntry, Size
from sinklab.results.summaries.shared import Difference
from sinklab.results.table import make_table
from sinklab.sinks import Sinks
from sinklab.streaming.perplexity import Decoding, decoding, estimate, losses
from sinklab.streaming.rotation import read_rotations
from sinklab.studies.cache.policy_plan import each_once, label, left_out_row, plan_policies, scored_from
from sinklab.studies.cache.recommendation import Recommendation, recommend

__all__ = ["compared", "require_next_token"]

SUMMARY_VERSION = 1
LOSS_BY_POSITION = Metric(
    "loss_by_position", "nats", "Mean next-token loss over the texts of the tokens predicted from here on, up to the next row."
)
DECODING_SPEED = Metric("decoding_tokens_per_second", "tokens/s", "Tokens decoded one by one over the time that this took.")
READING_SPEED = Metric("reading_tokens_per_second", "tokens/s", "Tokens of a text read at once over the time that this took.")
BYTES_HELD = Metric("bytes_held", "bytes", "Bytes of keys and values that the cache of one text holds in the end.")
BUCKETS = 24
"""Points of the curve of loss against position."""

STRETCH = 4
"""Tokens of a point of the curve that are scored under re-computation, which encodes a whole window for each of them."""

STEPS, WARM_UP = 128, 16
"""Single tokens that are timed, and those before them that are not, at most one for four of these."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Measured:
    """One policy: losses ``(documents, tokens - 1)`` in nats, NaN where not scored, and tokens scored in a second."""

    policy: Policy
    budget: int | None
    losses: Tensor
    reading: float


def require_next_token(loaded: LoadedModel) -> None:
    """Refuse a model that policies have no loss for.

    Raises:
        UnsupportedModelError: it predicts no next token.
    """
    if not is_causal_lm(loaded.model):
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} predicts no next token, so policies have no loss to compare"
        )


def compared(
    loaded: LoadedModel,
    rows: Tensor,
    *,
    names: Sequence[str],
    budgets: Sequence[int],
    sinks: Sequence[int],
    corpus: str,
    bos: bool,
    run_id: str,
    seed: int,
    found: Sinks | None = None,
    steps: int = STEPS,
    briefly: bool = False,
    progress: Progress = silent,
) -> tuple[Comparison, pd.DataFrame]:
    """Summary and long table of a comparison.

    Args:
        rows: texts, int64 ``(documents, tokens)``.
        found: where the sinks are, if that is known; looked for if ``None``.
        steps: single tokens that are timed.
        briefly: take policies that no recommendation rests on at the largest size only.

    Raises:
        InputError: texts of which nothing is ever evicted.
        ConfigurationError: two policies that are called alike.
        UnsupportedModelError: no policy can be had with the model.
    """
    require_next_token(loaded)
    length, held = rows.shape[1], max(budgets)
    if length <= held + 2:  # a query sees itself besides, and the last token is none
        raise InputError(
            f"a window of {held:,} tokens covers the {length:,} tokens of a text, so nothing is ever evicted and all policies "
            f"are one; choose a smaller `windows` or more `tokens` than {held + 2}"
        )
    trained = trained_length(loaded.model)
    first = scored_from(loaded, length, held)
    left_out: list[LeftOut] = []
    measured: list[_Measured] = []
    # Once each: settings that are given may be those that a name alone stands for, among others.
    plan = each_once(plan_policies(loaded, rows, names, budgets, sinks, found, left_out, briefly=briefly))
    for number, (policy, budget) in enumerate(plan, start=1):
        stage = f"{number}/{len(plan)} {label(policy)}"
        report = functools.partial(progress, stage)
        try:
            if not policy.bounded and length > (trained or length):
                _require_positions(loaded, length)
            measured.append(_measure(loaded.model, rows, policy, budget, first, report))
        except (ConfigurationError, UnsupportedModelError) as error:
            left_out.append({**left_out_row(policy.name, str(error)), "label": label(policy)})
    if not measured:
        raise UnsupportedModelError(
            f"no policy can be had with {loaded.name}; {left_out[0]['policy'] if left_out else 'none'}: "
            f"{left_out[0]['reason'] if left_out else 'nothing was asked for'}"
        )
    warm_up = min(WARM_UP, max(1, steps // 4))
    steps = max(1, min(steps, length - warm_up - 1))
    timed = decoding(
        loaded.model, rows[:1], [entry.policy for entry in measured], steps=steps, warm_up=min(warm_up, length - steps - 1),
        progress=functools.partial(progress, "decoding"),
    )  # fmt: skip
    summary = _summary(loaded, rows, measured, timed, left_out, first, trained, budgets, corpus, bos)
    return summary, _table(summary, _counts(measured, length), loaded, corpus, bos, run_id, seed)


# --- one policy ---------------------------------------------------------------------------------------------------------------


def _require_positions(loaded: LoadedModel, length: int) -> None:
    """Refuse to read past the end of a table of positions, where torch reports an index and a GPU is lost to the process."""
    try:
        read_rotations(loaded.model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"dense attention over {length:,} tokens needs positions past the {trained_length(loaded.model):,} that "
            f"{loaded.name} was made for, and it may have none: {error}"
        ) from error


def _measure(
    model: PreTrainedModel,
    rows: Tensor,
    policy: Policy,
    budget: int | None,
    first: int,
    report: Callable[[int, int], None],
) -> _Measured:
    started = time.perf_counter()
    if policy.name == "recompute":
        token_losses, read = _recomputed(model, rows, policy, first, report)
    else:
        token_losses, read = losses(model, rows, policy, progress=report), rows.numel()
    seconds = time.perf_counter() - started
    return _Measured(policy, budget, token_losses, read / seconds)


def _recomputed(
    model: PreTrainedModel, rows: Tensor, policy: Policy, first: int, report: Callable[[int, int], None] | None
) -> tuple[Tensor, int]:
    """Losses at stretches of tokens from ``first`` on; what such a policy sees is its window, wherever the reading began.

    Where it reads blocks, a stretch is one of them long or several, since the first token of a block sees least, and reading
    begins where a block does.
    """
    assert isinstance(policy, Recompute)
    length, stretch = rows.shape[1], -(-STRETCH // policy.every) * policy.every
    token_losses = torch.full((len(rows), length - 1), torch.nan)
    points = itertools.pairwise(_edges(length))
    stretches = [range(max(first, begin, stop - stretch), stop) for begin, stop in points if stop > first]
    read = 0
    for number, (start, stop) in enumerate(((part.start, part.stop) for part in stretches), start=1):
        before = max(0, start - policy.max_held(length))
        before -= before % policy.every
        part = losses(model, rows[:, before:stop], policy, first=start - before)
        token_losses[:, start - 1 : stop - 1] = part
        read += part.numel()
        if report is not None:
            report(number, len(stretches))
    return token_losses, read


# --- what is reported ---------------------------------------------------------------------------------------------------------


def _summary(
    loaded: LoadedModel,
    rows: Tensor,
    measured: list[_Measured],
    timed: list[Decoding],
    left_out: list[LeftOut],
    first: int,
    trained: int | None,
    budgets: Sequence[int],
    corpus: str,
    bos: bool,
) -> Comparison:
    length = rows.shape[1]
    edges = _edges(length)
    counts = [int((~entry.losses[:, first - 1 :].isnan()).sum()) for entry in measured]
    measured = _all_completed(measured, first, edges)
    scored = [entry.losses[:, first - 1 :] for entry in measured]
    references = _references(measured, scored, budgets)
    entries = [
        _policy_entry(entry, part, references, speed, count, edges)
        for entry, part, speed, count in zip(measured, scored, timed, counts, strict=True)
    ]
    advice = _advice(references, length, trained)
    return {
        "summary_version": SUMMARY_VERSION,
        "model": loaded.name,
        "revision": loaded.revision,
        "operation": loaded.operation,
        "corpus": corpus,
        "bos": int(bos),
        "documents": len(rows),
        "tokens": length,
        "token_sha256": hash_tokens(rows),
        "scored_from": first,
        "trained_length": trained,
        "positions": [list(pair) for pair in itertools.pairwise(edges)],
        "policies": entries,
        "left_out": left_out,
        "sinks_needed": advice.needed if advice else None,
        "better_pinned": advice.better if advice else None,
        "recommended": _recommended(measured, advice) if advice else None,
        "recommendation": _advised(loaded, advice) if advice else _no_advice(references.by_sinks, left_out),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class _References:
    """Losses of the scored tokens, ``(documents, scored)``, of the policies that others are compared with.

    Attributes:
        by_sinks: of windows: tokens held before the query, to number of sinks, to losses.
        recompute: of re-computation for every token, by tokens held.
        full: of dense attention.
        pinned: of policies that keep other tokens than the first ones: tokens held, to label, to losses.
    """

    by_sinks: dict[int, dict[int, Tensor]]
    recompute: dict[int | None, Tensor]
    full: Tensor | None
    pinned: dict[int, dict[str, Tensor]]


def _references(measured: Sequence[_Measured], scored: Sequence[Tensor], budgets: Sequence[int]) -> _References:
    by_sinks: dict[int, dict[int, Tensor]] = {budget: {} for budget in budgets}
    pinned: dict[int, dict[str, Tensor]] = {budget: {} for budget in budgets}
    recompute: dict[int | None, Tensor] = {}
    full: Tensor | None = None
    for entry, part in zip(measured, scored, strict=True):
        policy, budget = entry.policy, entry.budget
        if policy.name in ("window", "sink_window") and budget is not None:
            number = _num_sinks(policy) or 0
            # Of one size with both kinds of positions, the recommendation is about the usual kind.
            if number not in by_sinks[budget] or policy.positions == "in_cache":
                by_sinks[budget][number] = part
        elif policy.name == "pinned" and budget is not None:
            pinned[budget][label(policy)] = part
        elif policy.name == "full":
            full = part
        elif isinstance(policy, Recompute) and policy.every == 1:
            # Blocks that share a window are another reading than one anew for every token, which others are compared with.
            recompute[budget] = part
    return _References(by_sinks, recompute, full, pinned)


def _policy_entry(
    entry: _Measured, part: Tensor, references: _References, speed: Decoding, count: int, edges: Sequence[int]
) -> PolicyEntry:
    """What the summary says of a policy.

    Args:
        part: its losses of the scored tokens, ``(documents, scored)``; the very tensor, if it is one of the references.
        count: losses that were measured.
    """
    policy, loss = entry.policy, estimate(part)
    return {
        "policy": policy.name,
        "label": label(policy),
        "num_sinks": _num_sinks(policy),
        "window": getattr(policy, "window", None),
        "held": policy.max_held(edges[-1]),
        "budget": entry.budget,
        "settings": policy_registry.settings(policy),
        "loss": loss.mean,
        "loss_low": loss.low,
        "loss_high": loss.high,
        "scored_tokens": count,
        "against_window": _difference(part, references.by_sinks.get(entry.budget or -1, {}).get(0)),
        "against_recompute": _difference(part, references.recompute.get(entry.budget)),
        "against_full": _difference(part, references.full),
        "decoded_tokens": speed.steps,
        "tokens_per_second": speed.tokens_per_second,
        "reading_tokens_per_second": entry.reading,
        "bytes_held": speed.bytes_held,
        "loss_by_position": [_mean(entry.losses[:, start - 1 : stop - 1]) for start, stop in itertools.pairwise(edges)],
    }


def _advice(references: _References, length: int, trained: int | None) -> Recommendation | None:
    """What is recommended; ``None`` without a size that was measured both with sinks and without."""
    usable = {budget: sizes for budget, sizes in references.by_sinks.items() if 0 in sizes and len(sizes) > 1}
    if not usable:
        return None
    recomputed = {budget: part for budget, part in references.recompute.items() if budget is not None}
    return recommend(
        usable,
        recompute=recomputed,
        full=references.full,
        pinned=references.pinned,
        length=length,
        trained_length=trained,
    )


def _all_completed(measured: Sequence[_Measured], first: int, edges: Sequence[int]) -> list[_Measured]:
    """The same, with losses of all tokens for re-computation too, where there is a window of its size to add differences to."""
    windows: dict[int, Tensor] = {}
    for entry in measured:
        if entry.budget and _is_window(entry.policy) and (entry.budget not in windows or entry.policy.positions == "in_cache"):
            windows[entry.budget] = entry.losses
    return [
        dataclasses.replace(entry, losses=_completed(entry.losses, windows[entry.budget], first, edges))
        if entry.policy.name == "recompute" and entry.budget in windows
        else entry
        for entry in measured
    ]


def _completed(sampled: Tensor, reference: Tensor, first: int, edges: Sequence[int]) -> Tensor:
    """Losses of all tokens from ``first`` on, of a policy that was scored at some of them.

    Texts differ from place to place far more than policies do. So what is taken from the sample is the difference to another
    policy, its mean in each row and stretch, and what it is added to is that policy's loss on all tokens.
    """
    result = sampled.clone()
    for start, stop in itertools.pairwise(edges):
        if stop > first:
            part = slice(max(first, start) - 1, stop - 1)
            result[:, part] = reference[:, part] + (sampled - reference)[:, part].nanmean(dim=1, keepdim=True)
    return result


def _advised(loaded: LoadedModel, advice: Recommendation) -> str:
    warning = guess_warning(loaded.model, advice.loss.mean)
    return f"{advice.sentence} {warning}".rstrip()


def _recommended(measured: Sequence[_Measured], advice: Recommendation) -> Size:
    pins = next((entry.policy for entry in measured if advice.better == label(entry.policy)), None)
    if isinstance(pins, Pinned):
        return {"num_sinks": len(pins.pinned), "window": pins.window, "pinned": list(pins.pinned)}
    return {"num_sinks": advice.num_sinks, "window": advice.window}


def _no_advice(by_sinks: dict[int, dict[int, Tensor]], left_out: Sequence[LeftOut]) -> str:
    have = sorted({number for sizes in by_sinks.values() for number in sizes})
    refused = dict.fromkeys(entry["reason"] for entry in left_out if entry["policy"] in ("window", "sink_window"))
    if not have and refused:
        return f"No recommendation: a window cannot be measured with this model. {'; '.join(refused)}."
    return (
        "No recommendation: it takes a window without sinks and one with some, and measured were "
        f"{', '.join(map(str, have)) + ' sinks' if have else 'neither'}."
    )


def _edges(length: int) -> list[int]:
    """Positions of tokens at which the points of the curve begin, and the end."""
    points = min(BUCKETS, length - 1)
    return [1 + (length - 1) * point // points for point in range(points + 1)]


def _counts(measured: Sequence[_Measured], length: int) -> list[list[int]]:
    """Tokens of every point of the curve that were scored, of all texts together, for each policy."""
    points = list(itertools.pairwise(_edges(length)))
    scored = (~entry.losses.isnan() for entry in measured)
    return [[int(known[:, start - 1 : stop - 1].sum()) for start, stop in points] for known in scored]


def _is_window(policy: Policy) -> bool:
    """Whether it is a window without sinks, under either name; others may pin no token and see something else."""
    return policy.name in ("window", "sink_window") and _num_sinks(policy) == 0


def _num_sinks(policy: Policy) -> int | None:
    if isinstance(policy, SlotPolicy):
        return len(policy.pinned)
    number = getattr(policy, "num_sinks", None)
    return number if isinstance(number, int) else None


def _difference(part: Tensor, other: Tensor | None) -> Difference | None:
    if other is None or other is part:
        return None
    difference = estimate(part - other)
    return {"mean": difference.mean, "low": difference.low, "high": difference.high}


def _mean(part: Tensor) -> float | None:
    mean = float(part.nanmean())
    return None if mean != mean else mean


def _table(
    summary: Comparison, counts: Sequence[Sequence[int]], loaded: LoadedModel, corpus: str, bos: bool, run_id: str, seed: int
) -> pd.DataFrame:
    """The long table of a comparison; ``counts`` as :func:`_counts` gives them."""
    rows: list[Row] = []
    for entry, by_point in zip(summary["policies"], counts, strict=True):
        of_policy: Coordinates = {"policy": entry["label"]}
        for number, metric, count in (
            (entry["loss"], LOSS, entry["scored_tokens"]),
            (entry["tokens_per_second"], DECODING_SPEED, entry["decoded_tokens"]),
            (entry["reading_tokens_per_second"], READING_SPEED, 1),
            (entry["bytes_held"], BYTES_HELD, 1),
        ):
            rows.append({**of_policy, "metric": metric, "value": float(number), "count": count})
        for (start, _), value, scored in zip(summary["positions"], entry["loss_by_position"], by_point, strict=True):
            if value is not None:
                columns: Coordinates = {"query_position": start - 1, "count": scored}
                rows.append({**of_policy, "metric": LOSS_BY_POSITION, "value": value, **columns})
    return make_table(
        rows, run_id=run_id, model=loaded.name, revision=loaded.revision, operation=loaded.operation, corpus=corpus,
        bos=int(bos), seed=seed, probe="cache_policies",
    )  # fmt: skip
