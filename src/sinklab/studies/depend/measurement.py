"""The measurement behind depend(): one task under all conditions, in numbers that a verdict is made of."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sinklab.corpora._reading import RUN, count_repeats
from sinklab.corpora.base import hash_tokens
from sinklab.errors import UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import guess_warning, is_causal_lm
from sinklab.models.positions import trained_length
from sinklab.results.metric import Row
from sinklab.results.naming import counted
from sinklab.results.progress import SinklabWarning
from sinklab.streaming.limits import most_slots
from sinklab.streaming.rotation import FixedPositions, read_rotations
from sinklab.studies.cache.plan import sinks_of_texts
from sinklab.studies.depend.conditions import ConditionPlan
from sinklab.studies.depend.contenders import Contenders
from sinklab.studies.depend.outcome import Facts, Measured, outcome
from sinklab.studies.depend.runner import PreparedTask, ScoredTask, curve, effective_lengths, per_item, table_rows
from sinklab.studies.depend.score import METRICS

__all__ = [
    "default_window",
    "loss_warning",
    "repeats_warning",
    "require_windows",
    "sink_warning",
    "summarise_task",
    "window_warning",
]

MOST_REPEATS = 0.1
"""Share of texts scored on tokens of another one up to which their intervals stand without a warning."""


def require_windows(loaded: LoadedModel) -> None:
    """Refuse a model that no task can be put to under the two caches that are always compared: they hold a window.

    Raises:
        UnsupportedModelError: it predicts no next token, or what is cached cannot be moved.
    """
    if not is_causal_lm(loaded.model):
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} predicts no next token of its own text, so no task can be put to it under a "
            "cache policy; depend is for decoders"
        )
    try:
        read_rotations(loaded.model)
    except FixedPositions as error:
        raise UnsupportedModelError(
            f"{error.reason}. depend compares caches of a window with and without the sink, which this model cannot have; "
            "'sinklab causes' asks what its sinks do on whole texts"
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


def window_warning(loaded: LoadedModel, window: int) -> str:
    """A sentence where a cache and the token at hand have more positions than the model was trained on; empty otherwise.

    Args:
        window: tokens before the query that the largest cache holds.
    """
    trained = trained_length(loaded.model)
    if trained is None or window < trained:
        return ""
    return (
        f"A window of {window:,} tokens and the token at hand take {window + 1:,} positions, and the model was made for "
        f"{trained:,}: scores there, with sinks or without, are those of positions it has never seen. Take a `window` below "
        f"{trained:,}."
    )


def repeats_warning(prepared: PreparedTask) -> str:
    """A sentence where many texts are scored on tokens that others are scored on, too; empty otherwise.

    Of a task whose answers are the text itself; answers that are drawn are independent whatever text stands around them.
    """
    number, index = prepared.counted[-1]
    sheet = next(iter(prepared.sheets.values()))[number]
    question = sheet.questions[index]
    if prepared.task.metric != "log_likelihood":
        return ""
    # Runs that end in a token that is scored: a few tokens in a row are alike in any two texts.
    first = max(0, question.start - RUN + 1)
    repeats = count_repeats(sheet.tokens[:, first : question.stop].tolist())
    texts = len(sheet.tokens)
    if repeats <= MOST_REPEATS * texts:
        return ""
    return (
        f"{prepared.label}: {repeats} of {texts} texts are scored on tokens that another one is scored on, too (and the "
        f"{RUN - 1} before are alike). Intervals take texts for independent, and are too narrow here: take fewer `items` or a "
        "longer `corpus`."
    )


def sink_warning(loaded: LoadedModel, label: str, tokens: Tensor, contenders: Contenders) -> str:
    """A sentence where the strongest sink of some texts is not among the first tokens that are compared; empty otherwise.

    Args:
        label: of the task.
        tokens: its texts, int64 ``(rows, length)``, in whose first 64 tokens sinks are looked for.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SinklabWarning)  # of texts so short that the first token is called a sink
            sinks = sinks_of_texts(loaded, tokens)
    except UnsupportedModelError:  # its attention cannot be seen, which no policy needs
        return ""
    sink = sinks.main
    if sink is None or sink.kind == "null":
        return ""
    if sink.position is not None and sink.position - sinks.front < contenders.num_sinks:
        return ""
    return (
        f"{label}: the strongest sink of these texts is {sink.name}, and what is compared are the first "
        f"{counted(contenders.num_sinks, 'token')}: verdict and index say nothing of that sink. `sinklab cache` compares "
        "policies that keep other tokens."
    )


def loss_warning(loaded: LoadedModel, summary: Mapping[str, Any]) -> str:
    """A sentence where a task is scored by the likelihood of tokens, and no policy predicts them better than a guess; or empty.

    Args:
        summary: of the task.
    """
    scores = [row["score"]["mean"] for row in summary["policies"] if "refused" not in row]
    if summary["metric"] != "log_likelihood" or not scores:
        return ""
    return guess_warning(loaded.model, -max(scores), text=summary["task"])


def summarise_task(
    scored: ScoredTask, plan: ConditionPlan, level: float
) -> tuple[dict[str, object], list[Row], dict[str, object]]:
    """The summary, the rows of the table and the record of one task."""
    prepared = scored.prepared
    task, counted = prepared.task, prepared.counted
    compared = {
        name: scored.scores[plan.of_policy(name)] for name in plan.contenders.policies if plan.of_policy(name) in scored.scores
    }
    curves = {name: curve(task, prepared.sheets[plan.reference], answers) for name, answers in compared.items()}
    means = {
        name: {metric: float(per_item(answers, counted, metric).mean()) for metric in METRICS if metric in answers[0][0].values}
        for name, answers in compared.items()
    }
    facts: Facts = {
        "task": prepared.label,
        "metric": task.metric,
        "unit": METRICS[task.metric].unit,
        "axis": task.axis,
        "questions": len(counted),
    }
    summary = outcome(
        facts,
        Measured(
            {condition: per_item(answers, counted, task.metric) for condition, answers in scored.scores.items()},
            scored.refused,
            chance=task.chance,
            minimal_effect=task.minimal_effect,
            scale=1.0 if task.metric == "choice" else None,
            level=level,
        ),
        plan,
        means=means,
        curves=curves,
        lengths=effective_lengths(task, curves),
    )
    return summary, table_rows(scored), _record(scored, plan)


def _record(scored: ScoredTask, plan: ConditionPlan) -> dict[str, object]:
    task = scored.prepared.task
    return {
        **task.settings,
        "identity": dataclasses.asdict(task.identity),
        "token_sha256": [hash_tokens(sheet.tokens) for sheet in scored.prepared.sheets[plan.reference]],
        "refused": {condition.label_beside(plan.reference): reason for condition, reason in scored.refused.items()},
    }
