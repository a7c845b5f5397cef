"""depend(): the same score under several cache policies, and whether it depends on the sink tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from sinklab.auditing.measure import opened, uses_bos
from sinklab.auditing.output import check_free, environment, new_run_id, whole_folder
from sinklab.corpora._corpus import hash_tokens
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.evaluation.contenders import Contenders, make_contenders
from sinklab.evaluation.judge import effective_length, useful_context
from sinklab.evaluation.outcome import outcome
from sinklab.evaluation.score import METRICS, Scores, score_sheet
from sinklab.evaluation.spelling import parse_call
from sinklab.models.loading import LoadedModel
from sinklab.results.table import append, make_table, write_json, write_table
from sinklab.streaming.policy import Policy
from sinklab.streaming.reader import open_reader
from sinklab.tasks._task import Sheet, Task

__all__ = ["DependResult", "default_window", "depend"]

Progress = Callable[[str, int, int], None]
BATCH_TOKENS = 32_768
"""Tokens of a sheet that are read side by side."""
VERSION = 1
PROBE = "depend"
HARNESS = "lm_eval:"


@dataclasses.dataclass(frozen=True)
class DependResult:
    """What :func:`depend` gives.

    Attributes:
        table: the long table: one row for every policy, question and metric, meaned over items.
        summary: verdicts, intervals, effective lengths and curves by task; what ``--json`` prints.
        run: the run record.
        folder: where they were written, if anywhere.
    """

    table: pd.DataFrame
    summary: dict[str, Any]
    run: dict[str, Any]
    folder: Path | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Scored:
    """All scores of one task: by policy, for each sheet, for each question."""

    task: Task
    sheets: list[Sheet]
    scores: dict[str, list[list[Scores]]]
    refused: dict[str, str]


def depend(
    model: str | LoadedModel | PreTrainedModel,
    tasks: Sequence[str | Task] = ("long_text",),
    *,
    policies: Sequence[str | Policy] | None = None,
    window: int | None = None,
    sinks: Sequence[int] = (1, 4),
    items: int = 64,
    seed: int = 0,
    bos: str = "auto",
    level: float = 0.95,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    out: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DependResult:
    """Score a model on some tasks under every policy and say whether the scores depend on the sink tokens.

    The verdict compares the policy with the most sinks to the one without, both holding ``window`` tokens before the query,
    over those questions that are asked after the cache is full and whose fact both still hold; see
    :func:`~sinklab.evaluation.judge.judge`.

    Args:
        model: a name for :func:`sinklab.load_model`, or a model in memory.
        tasks: registered names (``sinklab list tasks``), with settings if need be (``"needle(corpus=book.txt)"``); tasks made
            by hand; or ``lm_eval:TASK``.
        policies: what to run beside the two that are compared and the floor; ``None`` for the usual ones.
        window: tokens before the query that bounded policies hold, sinks included; half of what the model was trained on, and
            at most 1,024, by default.
        sinks: numbers of sinks.
        items: independent texts for each task.
        bos: ``auto`` (as the tokenizer does by itself), ``always`` or ``none``.
        level: of all intervals.
        out: directory for ``table.parquet``, ``summary.json``, ``run.json`` and one plot a task.
        progress: told about every sheet.

    Raises:
        SinklabError: see the errors of loading, tasks and policies. A policy other than the two compared that the model
            cannot run is reported with the reason and left out.
    """
    if out is not None:
        check_free(out, overwrite)
    if not tasks:
        raise ConfigurationError("name at least one task: sinklab list tasks")
    if items < 2:
        raise ConfigurationError(f"--items {items} must be 2 or more: an interval needs several texts")
    chosen = [_task(task) if isinstance(task, str) and not task.startswith(HARNESS) else task for task in tasks]
    loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    contenders = make_contenders(default_window(loaded) if window is None else window, sinks, policies)
    with_bos = uses_bos(loaded.encoder, bos)
    started, run_id = time.time(), new_run_id()
    frames, summaries, records = [], [], []
    for task in chosen:
        if isinstance(task, str):
            from sinklab.evaluation.harness import run_harness

            summary, rows, record = run_harness(loaded, task.removeprefix(HARNESS), contenders, items, seed, level, progress)
        else:
            scored = _run(loaded, task, contenders, items, seed, with_bos, progress)
            summary, rows = _summary(scored, contenders, level), _rows(scored)
            record = _record(scored)
        summaries.append(summary)
        records.append(record)
        constants = {"corpus": summary["task"], "bos": int(with_bos), "seed": seed, "probe": PROBE, "version": VERSION}
        frames.append(
            make_table(
                rows, run_id=run_id, model=loaded.name, revision=loaded.revision, operation=loaded.operation, **constants
            )
        )
    summary = {
        "model": loaded.name,
        "operation": loaded.operation,
        "window": contenders.budget,
        "bos": with_bos,
        "items": items,
        "level": level,
        "tasks": summaries,
    }
    run = {
        "run_id": run_id,
        "kind": "depend",
        "model": {"name": loaded.name, "revision": loaded.revision, "operation": loaded.operation},
        "config": {"window": contenders.budget, "sinks": list(sinks), "items": items, "seed": seed, "bos": bos, "level": level},
        "policies": {name: policy.to_dict() for name, policy in contenders.policies.items()},
        "tasks": records,
        **environment(loaded),
        "wall_seconds": round(time.time() - started, 3),
    }
    table = append(frames)
    if out is not None:
        from sinklab.evaluation.plot import write_plot

        with whole_folder(out) as folder:
            write_table(table, folder / "table.parquet")
            write_json(summary, folder / "summary.json")
            write_json(run, folder / "run.json")
            for part in summaries:
                if part["curves"]:
                    write_plot(part, folder / f"{part['task'].replace(':', '-')}.png")
    return DependResult(table, summary, run, out)


def _task(text: str) -> Task:
    return Task.from_dict(parse_call(text, "a task: a name from 'sinklab list tasks', with settings: needle(corpus=FILE)"))


def default_window(loaded: LoadedModel) -> int:
    """Half of the length that the model was trained on, so that everything held is at a familiar distance; 1,024 at most."""
    trained = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    return min(1024, int(trained) // 2) if trained else 1024


def _run(
    loaded: LoadedModel,
    task: Task,
    contenders: Contenders,
    items: int,
    seed: int,
    bos: bool,
    progress: Progress | None,
) -> _Scored:
    """Score every sheet under every policy; a policy that the model refuses is noted, unless the verdict needs it."""
    sheets = list(task.sheets(loaded.encoder, budget=contenders.budget, rows=items, seed=seed, bos=bos))
    scores: dict[str, list[list[Scores]]] = {}
    refused: dict[str, str] = {}
    total = len(contenders.policies) * len(sheets)
    for number, (name, policy) in enumerate(contenders.policies.items()):
        found = []
        try:
            for index, sheet in enumerate(sheets):
                found.append(_score_all(loaded, policy, sheet))
                if progress is not None:
                    progress(task.name, number * len(sheets) + index + 1, total)
        except UnsupportedModelError as error:
            if name in (contenders.with_sinks, contenders.without, contenders.floor):
                raise
            refused[name] = " ".join(str(error).split())
            continue
        scores[name] = found
    return _Scored(task, sheets, scores, refused)


def _score_all(loaded: LoadedModel, policy: Policy, sheet: Sheet) -> list[Scores]:
    """All rows of a sheet, as many at a time as make a batch."""
    rows, length = sheet.tokens.shape
    size = max(1, min(rows, BATCH_TOKENS // length))
    parts = []
    for start in range(0, rows, size):
        part = Sheet(sheet.tokens[start : start + size], sheet.questions, sheet.at)
        parts.append(score_sheet(open_reader(loaded.model, policy), part))
    return [
        Scores(question, {name: _joined([part[index].values[name] for part in parts]) for name in parts[0][index].values})
        for index, question in enumerate(sheet.questions)
    ]


def _joined(parts: list[Any]) -> Any:
    return np.concatenate([np.asarray(part) for part in parts])


def _summary(scored: _Scored, contenders: Contenders, level: float) -> dict[str, Any]:
    task = scored.task
    counted = _counted(scored, contenders)
    if not counted:
        raise ConfigurationError(
            f"task {task.name!r} asks nothing that tells policies apart with a window of {contenders.budget}: no question "
            f"comes after so many tokens with its fact still held by {contenders.with_sinks}; choose a larger --window or longer texts"
        )
    values = {name: _per_item(found, counted, task.metric) for name, found in scored.scores.items()}
    curves = {name: _curve(task, scored.sheets, found) for name, found in scored.scores.items()}
    means = {
        name: {metric: float(_per_item(found, counted, metric).mean()) for metric in METRICS if metric in found[0][0].values}
        for name, found in scored.scores.items()
    }
    facts = {
        "task": task.name,
        "metric": task.metric,
        "unit": METRICS[task.metric],
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
        lengths=_lengths(task, curves),
    )


def _counted(scored: _Scored, contenders: Contenders) -> list[tuple[int, int]]:
    """Sheet and index of the questions that can tell sinks from none: something is evicted, and both hold the fact."""
    held = contenders.budget - (contenders.policies[contenders.with_sinks].num_sinks)  # type: ignore[attr-defined]
    return [
        (number, index)
        for number, sheet in enumerate(scored.sheets)
        for index, question in enumerate(sheet.questions)
        if question.start >= contenders.budget + 2 and question.distance <= held
    ]


def _per_item(scores: list[list[Scores]], counted: Sequence[tuple[int, int]], metric: str) -> np.ndarray:
    """One number for each item: its mean over the counted questions."""
    return np.mean([np.asarray(scores[number][index].values[metric]) for number, index in counted], axis=0)


def _curve(task: Task, sheets: list[Sheet], scores: list[list[Scores]]) -> list[tuple[int, np.ndarray]]:
    """Place on the task's axis and one number for each item, places ascending."""
    if task.axis == "position":
        points = [(one.question.start, one.values[task.metric]) for found in scores for one in found]
    else:
        points = [
            (sheet.at, np.mean([np.asarray(one.values[task.metric]) for one in found], axis=0))
            for sheet, found in zip(sheets, scores, strict=True)
        ]
    return sorted(((place, np.asarray(values)) for place, values in points), key=lambda point: point[0])


def _lengths(task: Task, curves: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> dict[str, int | None]:
    if task.axis == "context":
        return {name: useful_context(curve) for name, curve in curves.items()}
    assert task.chance is not None
    return effective_length(curves, chance=task.chance)


def _rows(scored: _Scored) -> list[dict[str, Any]]:
    return [
        {
            "policy": name,
            "metric": metric,
            "query_position": one.question.start - 1,
            # Where the fact begins; of a text without one, nothing.
            "key_position": one.question.stop - 2 - one.question.distance if one.question.distance else None,
            "value": float(np.mean(np.asarray(values))),
            "count": len(values),
            "unit": METRICS[metric],
        }
        for name, sheets in scored.scores.items()
        for found in sheets
        for one in found
        for metric, values in one.values.items()
    ]


def _record(scored: _Scored) -> dict[str, Any]:
    return {
        **scored.task.settings,
        "identity": dataclasses.asdict(scored.task.identity),
        "token_sha256": [hash_tokens(sheet.tokens) for sheet in scored.sheets],
        "refused": scored.refused,
    }
