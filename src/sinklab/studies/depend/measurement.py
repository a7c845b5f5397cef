"""The measurement behind depend(): one task under all conditions, in numbers that a verdict is made of."""

from __future__ import annotations

import dataclasses

from sinklab.corpora.base import hash_tokens
from sinklab.models.lengths import trained_length
from sinklab.models.loading import LoadedModel
from sinklab.results.metric import Row
from sinklab.studies.depend.conditions import ConditionPlan
from sinklab.studies.depend.outcome import Facts, Measured, outcome
from sinklab.studies.depend.runner import ScoredTask, curve, effective_lengths, per_item, table_rows
from sinklab.studies.depend.score import METRICS

__all__ = ["default_window", "summarise_task", "window_warning"]


def default_window(loaded: LoadedModel) -> int:
    """Half of the length that the model was trained on, so that everything held is at a familiar distance; 1,024 at most."""
    trained = trained_length(loaded.model)
    return min(1024, trained // 2) if trained else 1024


def window_warning(loaded: LoadedModel, window: int) -> str:
    """A sentence where a cache and the token at hand have more positions than the model was trained on; empty otherwise."""
    trained = trained_length(loaded.model)
    if trained is None or window < trained:
        return ""
    return (
        f"A window of {window:,} tokens and the token at hand take {window + 1:,} positions, and the model was made for "
        f"{trained:,}: scores there, with sinks or without, are those of positions it has never seen. Take a `window` below "
        f"{trained:,}."
    )


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
