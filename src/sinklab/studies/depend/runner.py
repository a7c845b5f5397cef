"""The runner: one task under every condition, in batches; which of its questions count, its scores by item and by place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sinklab.corpora.base import hash_tokens
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.models.positions import require_positions
from sinklab.policies.base import Policy
from sinklab.registry import policies
from sinklab.results.metric import Row
from sinklab.results.store import Store
from sinklab.results.version import __version__
from sinklab.streaming.reader import open_reader
from sinklab.studies.depend.clock import Clock
from sinklab.studies.depend.conditions import Condition, ConditionPlan
from sinklab.studies.depend.contenders import Contenders
from sinklab.studies.depend.judge import effective_length, useful_context
from sinklab.studies.depend.score import METRICS, Scores, score_sheet
from sinklab.tasks.base import Sheet, Task

__all__ = [
    "PreparedTask",
    "ScoredTask",
    "counted_questions",
    "curve",
    "effective_lengths",
    "per_item",
    "prepare_task",
    "run_task",
    "table_rows",
]

BATCH_TOKENS = 32_768
"""Tokens of a sheet that are read side by side."""
BATCH_LOGITS = 2**27
"""Logits of one answer that are held at once; 0.5 GB in float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedTask:
    """A task that is ready to be read, and can be: every one is made before anything is read.

    Attributes:
        label: the name, with settings where two tasks of a run have one name.
        sheets: what is read, by the number of beginning-of-sequence tokens in front; the texts behind these are the same.
        counted: sheet and index of the questions that can tell sinks from none.
    """

    task: Task
    label: str
    sheets: dict[int, list[Sheet]]
    counted: list[tuple[int, int]]

    def tokens(self, condition: Condition) -> int:
        """How many the model computes under one condition: with a cache every one once, by re-computation windows."""
        return sum(tokens_of(sheet, condition) for sheet in self.sheets[condition.bos])


def tokens_of(sheet: Sheet, condition: Condition) -> int:
    """Tokens of all rows of a sheet that the model computes under a condition."""
    return len(sheet.tokens) * condition.policy.computed(
        [range(question.start - 1, question.stop - 1) for question in sheet.questions]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredTask:
    """All scores of one task.

    Attributes:
        scores: by condition, for each sheet, for each question.
        refused: conditions that the model cannot be read under, with the reason.
    """

    prepared: PreparedTask
    scores: dict[Condition, list[list[Scores]]]
    refused: dict[Condition, str]


def prepare_task(loaded: LoadedModel, task: Task, label: str, plan: ConditionPlan, items: int, seed: int) -> PreparedTask:
    """The sheets of a task for every number of tokens in front.

    Raises:
        ConfigurationError: no question of the task tells the policies apart.
        InputError: texts that cannot be had.
    """
    contenders = plan.contenders
    base = int(any(plan.bos))
    made = list(task.sheets(loaded.encoder, budget=contenders.budget, rows=items, seed=seed, bos=bool(base)))
    sheets = {count: [_with_bos(sheet, count - base, loaded.encoder.bos_token_id) for sheet in made] for count in plan.bos}
    counted = counted_questions(sheets[min(plan.bos)], contenders)
    if not counted:
        raise ConfigurationError(
            f"task {task.name!r} asks nothing that tells policies apart with a window of {contenders.budget}: no question "
            f"comes after so many tokens with its fact still held by {contenders.with_sinks}; choose a larger `window` or "
            "longer texts"
        )
    return PreparedTask(task, label, sheets, counted)


def _with_bos(sheet: Sheet, more: int, bos_token_id: int | None) -> Sheet:
    """The same texts with so many more beginning-of-sequence tokens in front, or without the one that stands there."""
    if not more:
        return sheet
    tokens = sheet.tokens[:, -more:] if more < 0 else torch.nn.functional.pad(sheet.tokens, (more, 0), value=bos_token_id)
    questions = (dataclasses.replace(q, start=q.start + more, stop=q.stop + more) for q in sheet.questions)
    return Sheet(tokens, tuple(questions), sheet.at)


def run_task(
    loaded: LoadedModel, prepared: PreparedTask, plan: ConditionPlan, store: Store, identity: Mapping[str, object], clock: Clock
) -> ScoredTask:
    """Score every sheet under every condition; one that the model refuses is noted, unless the verdict needs it.

    Args:
        store: scores of earlier runs are taken from there, and new ones put there.
        identity: what they depend on besides the task and the condition.
        clock: is shown every sheet.
    """
    scores: dict[Condition, list[list[Scores]]] = {}
    refused: dict[Condition, str] = {}
    task, conditions = prepared.task, plan.conditions
    # In tokens, not in sheets: re-computation takes many times what a cache takes of the same sheet.
    steps = sum(prepared.tokens(condition) for condition in conditions)
    done = 0
    for condition in conditions:
        sheets, tokens = prepared.sheets[condition.bos], prepared.tokens(condition)
        policy = condition.fitted(max(sheet.tokens.shape[1] for sheet in sheets))
        settings = {
            **identity,
            "task": task.settings,
            "tokens": [hash_tokens(sheet.tokens) for sheet in sheets],
            "policy": policies.settings(policy),
            "quantized": condition.quantized,
        }
        sources = __version__
        stored = None if store.folder is None else store.get(f"{task.name}-scores", settings, sources)
        if stored is not None:
            scores[condition] = _unpacked(stored.arrays, sheets)
            done += tokens
            clock.skip(condition.kind, tokens)
            clock.progress(prepared.label, done, steps)
            continue
        answers: list[list[Scores]] = []
        try:
            with clock.cell(condition.kind, tokens):
                read = done
                for sheet in sheets:
                    answers.append(_score_all(loaded, policy, condition.quantized, sheet))
                    read += tokens_of(sheet, condition)
                    clock.progress(prepared.label, read, steps)
        except (ConfigurationError, UnsupportedModelError) as error:
            if condition in plan.needed:
                raise
            refused[condition] = " ".join(str(error).split())
        else:
            scores[condition] = answers
            store.put(f"{task.name}-scores", settings, sources, arrays=_packed(answers))
        done += tokens
    return ScoredTask(prepared, scores, refused)


def _packed(answers: list[list[Scores]]) -> dict[str, np.ndarray]:
    """Scores as arrays by sheet, question and metric."""
    return {
        f"{number}.{index}.{name}": np.asarray(values)
        for number, scores in enumerate(answers)
        for index, score in enumerate(scores)
        for name, values in score.values.items()
    }


def _unpacked(arrays: Mapping[str, np.ndarray], sheets: Sequence[Sheet]) -> list[list[Scores]]:
    """The reverse of :func:`_packed`."""
    values: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for key, array in arrays.items():
        number, index, name = key.split(".")
        values.setdefault((int(number), int(index)), {})[name] = torch.from_numpy(array)
    return [
        [
            Scores(question, {name: values[number, index][name] for name in METRICS if name in values[number, index]})
            for index, question in enumerate(sheet.questions)
        ]
        for number, sheet in enumerate(sheets)
    ]


def _score_all(loaded: LoadedModel, policy: Policy, quantized: str | None, sheet: Sheet) -> list[Scores]:
    """All rows of a sheet, as many at a time as make a batch."""
    rows, length = sheet.tokens.shape
    if not policy.bounded:
        require_positions(loaded.model, length)
    longest = max(question.stop - question.start for question in sheet.questions)
    size = max(1, min(rows, BATCH_TOKENS // length, BATCH_LOGITS // (longest * max(1, loaded.encoder.vocab_size))))
    parts = []
    for start in range(0, rows, size):
        part = sheet.rows(start, start + size)
        parts.append(score_sheet(open_reader(loaded.model, policy, quantized=quantized), part))
    return [
        Scores(question, {name: torch.cat([part[index].values[name] for part in parts]) for name in parts[0][index].values})
        for index, question in enumerate(sheet.questions)
    ]


def counted_questions(sheets: Sequence[Sheet], contenders: Contenders) -> list[tuple[int, int]]:
    """Sheet and index of the questions that can tell sinks from none: something is evicted, and both hold the fact."""
    held = contenders.budget - contenders.num_sinks
    return [
        (number, index)
        for number, sheet in enumerate(sheets)
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


def table_rows(scored: ScoredTask) -> list[Row]:
    """One row for every condition, question and metric: the mean over items."""
    return [
        {
            "policy": condition.label,
            "bos": condition.bos,
            "metric": METRICS[name],
            "query_position": answer.question.start - 1,
            # Where the fact begins; of a text without one, nothing.
            "key_position": answer.question.stop - 2 - answer.question.distance if answer.question.distance else None,
            "value": float(np.mean(np.asarray(values))),
            "count": len(values),
        }
        for condition, sheets in scored.scores.items()
        for answers in sheets
        for answer in answers
        for name, values in answer.values.items()
    ]
