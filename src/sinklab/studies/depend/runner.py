"""The runner: one task under every policy, in batches; which of its questions count, and its scores by item and by place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.lengths import require_positions
from sinklab.models.loading import LoadedModel
from sinklab.policies.base import Policy
from sinklab.results.run import Progress
from sinklab.streaming.reader import open_reader
from sinklab.studies.depend.contenders import Contenders
from sinklab.studies.depend.judge import effective_length, useful_context
from sinklab.studies.depend.score import METRICS, Scores, score_sheet
from sinklab.tasks.base import Sheet, Task

__all__ = ["ScoredTask", "counted_questions", "curve", "effective_lengths", "per_item", "run_task", "table_rows"]

BATCH_TOKENS = 32_768
"""Tokens of a sheet that are read side by side."""
BATCH_LOGITS = 2**27
"""Logits of one answer that are held at once; 0.5 GB in float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredTask:
    """All scores of one task.

    Attributes:
        sheets: what was read.
        scores: by policy, for each sheet, for each question.
        refused: policies that the model cannot run, with the reason.
    """

    task: Task
    sheets: list[Sheet]
    scores: dict[str, list[list[Scores]]]
    refused: dict[str, str]


def run_task(
    loaded: LoadedModel,
    task: Task,
    contenders: Contenders,
    items: int,
    seed: int,
    bos: bool,
    progress: Progress,
) -> ScoredTask:
    """Score every sheet under every policy; a policy that the model refuses is noted, unless the verdict needs it."""
    sheets = list(task.sheets(loaded.encoder, budget=contenders.budget, rows=items, seed=seed, bos=bos))
    scores: dict[str, list[list[Scores]]] = {}
    refused: dict[str, str] = {}
    total = len(contenders.policies) * len(sheets)
    for number, (name, policy) in enumerate(contenders.policies.items()):
        answers = []
        try:
            for index, sheet in enumerate(sheets):
                answers.append(_score_all(loaded, policy, sheet))
                progress(task.name, number * len(sheets) + index + 1, total)
        except (ConfigurationError, UnsupportedModelError) as error:
            if name in (contenders.with_sinks, contenders.without, contenders.floor):
                raise
            refused[name] = " ".join(str(error).split())
            continue
        scores[name] = answers
    return ScoredTask(task, sheets, scores, refused)


def _score_all(loaded: LoadedModel, policy: Policy, sheet: Sheet) -> list[Scores]:
    """All rows of a sheet, as many at a time as make a batch."""
    rows, length = sheet.tokens.shape
    if not policy.bounded:
        require_positions(loaded.model, length)
    longest = max(question.stop - question.start for question in sheet.questions)
    size = max(1, min(rows, BATCH_TOKENS // length, BATCH_LOGITS // (longest * max(1, loaded.encoder.vocab_size))))
    parts = []
    for start in range(0, rows, size):
        part = Sheet(sheet.tokens[start : start + size], sheet.questions, sheet.at)
        parts.append(score_sheet(open_reader(loaded.model, policy), part))
    return [
        Scores(question, {name: torch.cat([part[index].values[name] for part in parts]) for name in parts[0][index].values})
        for index, question in enumerate(sheet.questions)
    ]


def counted_questions(scored: ScoredTask, contenders: Contenders) -> list[tuple[int, int]]:
    """Sheet and index of the questions that can tell sinks from none: something is evicted, and both hold the fact."""
    held = contenders.budget - contenders.num_sinks
    return [
        (number, index)
        for number, sheet in enumerate(scored.sheets)
        for index, question in enumerate(sheet.questions)
        if question.start >= contenders.budget + 2 and question.distance <= held
    ]


def per_item(scores: list[list[Scores]], counted: Sequence[tuple[int, int]], metric: str) -> np.ndarray:
    """One number for each item: its mean over the counted questions."""
    return np.mean([np.asarray(scores[number][index].values[metric]) for number, index in counted], axis=0)


def curve(task: Task, sheets: list[Sheet], scores: list[list[Scores]]) -> list[tuple[int, np.ndarray]]:
    """Place on the task's axis and one number for each item, places ascending."""
    if task.axis == "position":
        points = [(answer.question.start, answer.values[task.metric]) for answers in scores for answer in answers]
    else:
        points = [
            (sheet.at, np.mean([np.asarray(answer.values[task.metric]) for answer in answers], axis=0))
            for sheet, answers in zip(sheets, scores, strict=True)
        ]
    return sorted(((at, np.asarray(values)) for at, values in points), key=lambda point: point[0])


def effective_lengths(task: Task, curves: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> dict[str, int | None]:
    """Effective length of every policy, in tokens of the task's axis."""
    if task.axis == "context":
        return {name: useful_context(curve) for name, curve in curves.items()}
    assert task.chance is not None
    return effective_length(curves, chance=task.chance)


def table_rows(scored: ScoredTask) -> list[dict[str, object]]:
    """One row for every policy, question and metric: the mean over items."""
    return [
        {
            "policy": policy,
            "metric": METRICS[name],
            "query_position": answer.question.start - 1,
            # Where the fact begins; of a text without one, nothing.
            "key_position": answer.question.stop - 2 - answer.question.distance if answer.question.distance else None,
            "value": float(np.mean(np.asarray(values))),
            "count": len(values),
        }
        for policy, sheets in scored.scores.items()
        for answers in sheets
        for answer in answers
        for name, values in answer.values.items()
    ]
