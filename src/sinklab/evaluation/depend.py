"""depend(): the same score under several cache policies, and whether it depends on the sink tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedModel

from sinklab.auditing.measure import opened, uses_bos
from sinklab.auditing.output import check_free, environment, new_run_id, whole_folder
from sinklab.corpora.base import hash_tokens
from sinklab.errors import ConfigurationError
from sinklab.evaluation.contenders import Contenders, make_contenders
from sinklab.evaluation.outcome import outcome
from sinklab.evaluation.runner import ScoredTask, counted_questions, curve, effective_lengths, per_item, run_task, table_rows
from sinklab.evaluation.score import METRICS
from sinklab.models.loading import LoadedModel
from sinklab.policies.base import Policy
from sinklab.registry import policies as policy_registry
from sinklab.registry import tasks as registry
from sinklab.results.table import append, make_table, write_json, write_table
from sinklab.tasks.base import Task

__all__ = ["DependResult", "default_window", "depend"]

Progress = Callable[[str, int, int], None]
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
        tasks: registered names (``sinklab list tasks``), with settings if need be (``"needle:corpus=book.txt"``); tasks made
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
    chosen = [task if isinstance(task, str) and task.startswith(HARNESS) else registry.make(task) for task in tasks]
    if bos != "auto" and any(isinstance(task, str) for task in chosen):
        raise ConfigurationError(
            f"--bos {bos}: the harness leaves the token in front to the tokenizer; leave it out with {HARNESS}"
        )
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
            scored = run_task(loaded, task, contenders, items, seed, with_bos, progress)
            summary, rows = _summary(scored, contenders, level), table_rows(scored)
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
        "policies": {name: policy_registry.settings(policy) for name, policy in contenders.policies.items()},
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


def default_window(loaded: LoadedModel) -> int:
    """Half of the length that the model was trained on, so that everything held is at a familiar distance; 1,024 at most."""
    trained = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    return min(1024, int(trained) // 2) if trained else 1024


def _summary(scored: ScoredTask, contenders: Contenders, level: float) -> dict[str, Any]:
    task = scored.task
    counted = counted_questions(scored, contenders)
    if not counted:
        raise ConfigurationError(
            f"task {task.name!r} asks nothing that tells policies apart with a window of {contenders.budget}: no question "
            f"comes after so many tokens with its fact still held by {contenders.with_sinks}; choose a larger --window or "
            "longer texts"
        )
    values = {name: per_item(found, counted, task.metric) for name, found in scored.scores.items()}
    curves = {name: curve(task, scored.sheets, found) for name, found in scored.scores.items()}
    means = {
        name: {metric: float(per_item(found, counted, metric).mean()) for metric in METRICS if metric in found[0][0].values}
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
        lengths=effective_lengths(task, curves),
    )


def _record(scored: ScoredTask) -> dict[str, Any]:
    return {
        **scored.task.settings,
        "identity": dataclasses.asdict(scored.task.identity),
        "token_sha256": [hash_tokens(sheet.tokens) for sheet in scored.sheets],
        "refused": scored.refused,
    }
