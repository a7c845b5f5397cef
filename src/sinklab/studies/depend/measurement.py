"""The measurement behind depend(): one task under all policies, in numbers that a verdict is made of."""

from __future__ import annotations

import dataclasses

from sinklab.corpora.base import hash_tokens
from sinklab.errors import ConfigurationError
from sinklab.models.lengths import trained_length
from sinklab.models.loading import LoadedModel
from sinklab.results.run import Progress
from sinklab.studies.depend.contenders import Contenders
from sinklab.studies.depend.outcome import outcome
from sinklab.studies.depend.runner import (
    ScoredTask,
    counted_questions,
    curve,
    effective_lengths,
    per_item,
    run_task,
    table_rows,
)
from sinklab.studies.depend.score import METRICS
from sinklab.tasks.base import Task

__all__ = ["default_window", "measure_task"]


def default_window(loaded: LoadedModel) -> int:
    """Half of the length that the model was trained on, so that everything held is at a familiar distance; 1,024 at most."""
    trained = trained_length(loaded.model)
    return min(1024, trained // 2) if trained else 1024


def measure_task(
    loaded: LoadedModel,
    task: Task,
    contenders: Contenders,
    *,
    items: int,
    seed: int,
    bos: bool,
    level: float,
    progress: Progress,
) -> tuple[dict[str, object], list[dict[str, object]], dict[str, object]]:
    """The summary, the rows of the table and the record of one task.

    Raises:
        ConfigurationError: no question of the task tells the policies apart.
    """
    scored = run_task(loaded, task, contenders, items, seed, bos, progress)
    return _summary(scored, contenders, level), table_rows(scored), _record(scored)


def _summary(scored: ScoredTask, contenders: Contenders, level: float) -> dict[str, object]:
    task = scored.task
    counted = counted_questions(scored, contenders)
    if not counted:
        raise ConfigurationError(
            f"task {task.name!r} asks nothing that tells policies apart with a window of {contenders.budget}: no question "
            f"comes after so many tokens with its fact still held by {contenders.with_sinks}; choose a larger `window` or "
            "longer texts"
        )
    values = {name: per_item(answers, counted, task.metric) for name, answers in scored.scores.items()}
    curves = {name: curve(task, scored.sheets, answers) for name, answers in scored.scores.items()}
    means = {
        name: {metric: float(per_item(answers, counted, metric).mean()) for metric in METRICS if metric in answers[0][0].values}
        for name, answers in scored.scores.items()
    }
    facts = {
        "task": task.name,
        "metric": task.metric,
        "unit": METRICS[task.metric].unit,
        "axis": task.axis,
        "questions": len(counted),
    }
    return outcome(
        facts,
        values,
        contenders,
        chance=task.chance,
        minimal_effect=task.minimal_effect,
        scale=1.0 if task.metric == "choice" else None,
        level=level,
        refused=scored.refused,
        means=means,
        curves=curves,
        lengths=effective_lengths(task, curves),
    )


def _record(scored: ScoredTask) -> dict[str, object]:
    return {
        **scored.task.settings,
        "identity": dataclasses.asdict(scored.task.identity),
        "token_sha256": [hash_tokens(sheet.tokens) for sheet in scored.sheets],
        "refused": scored.refused,
    }
