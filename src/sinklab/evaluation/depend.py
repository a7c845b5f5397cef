"""depend(): the same score under several cache policies, and whether it depends on the sink tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sinklab.arguments import Bos, Device, Dtype, ModelSource, Out, Overwrite, Progress, Revision, Seed, TrustRemoteCode
from sinklab.errors import ConfigurationError
from sinklab.results.run import Result, Run

if TYPE_CHECKING:
    from sinklab.policies.base import Policy
    from sinklab.tasks.base import Task

__all__ = ["depend"]

HARNESS = "lm_eval:"


def depend(
    model: ModelSource,
    tasks: Sequence[str | Task] = ("long_text",),
    *,
    policies: Sequence[str | Policy] | None = None,
    window: int | None = None,
    sinks: Sequence[int] = (1, 4),
    items: int = 64,
    seed: Seed = 0,
    bos: Bos = "auto",
    level: float = 0.95,
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Out = None,
    overwrite: Overwrite = False,
    progress: Progress | None = None,
) -> Result:
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
    from sinklab.auditing.probing import opened, uses_bos
    from sinklab.evaluation.contenders import make_contenders
    from sinklab.evaluation.depend_display import display
    from sinklab.evaluation.depend_measure import default_window, measure_task
    from sinklab.evaluation.plot import write_plots
    from sinklab.registry import policies as policy_registry
    from sinklab.registry import tasks as registry
    from sinklab.results.table import append, make_table

    settings = {"sinks": list(sinks), "items": items, "seed": seed, "bos": bos, "level": level}
    with Run("depend", out=out, overwrite=overwrite, settings=settings, progress=progress) as run:
        if not tasks:
            raise ConfigurationError("name at least one task: sinklab list tasks")
        if items < 2:
            raise ConfigurationError(f"`items` {items} must be 2 or more: an interval needs several texts")
        chosen = [task if isinstance(task, str) and task.startswith(HARNESS) else registry.make(task) for task in tasks]
        if bos != "auto" and any(isinstance(task, str) for task in chosen):
            raise ConfigurationError(
                f"`bos` {bos}: the harness leaves the token in front to the tokenizer; leave it out with {HARNESS}"
            )
        loaded = opened(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        contenders = make_contenders(default_window(loaded) if window is None else window, sinks, policies)
        with_bos = uses_bos(loaded.encoder, bos)
        frames, summaries, records = [], [], []
        for task in chosen:
            if isinstance(task, str):
                from sinklab.evaluation.harness import run_harness

                name = task.removeprefix(HARNESS)
                summary, rows, record = run_harness(loaded, name, contenders, items, seed, level, run.progress)
            else:
                summary, rows, record = measure_task(
                    loaded, task, contenders, items=items, seed=seed, bos=with_bos, level=level, progress=run.progress
                )
            summaries.append(summary)
            records.append(record)
            frames.append(
                make_table(
                    rows, run_id=run.id, model=loaded.name, revision=loaded.revision, operation=loaded.operation,
                    corpus=summary["task"], bos=int(with_bos), seed=seed, probe="depend",
                )
            )  # fmt: skip
        return run.finish(
            summary={
                "model": loaded.name, "operation": loaded.operation, "window": contenders.budget, "bos": with_bos,
                "items": items, "level": level, "tasks": summaries,
            },
            table=append(frames),
            display=display,
            files=lambda folder: write_plots(summaries, folder),
            loaded=loaded,
            config={"window": contenders.budget},
            model={"name": loaded.name, "revision": loaded.revision, "operation": loaded.operation},
            policies={name: policy_registry.settings(policy) for name, policy in contenders.policies.items()},
            tasks=records,
        )  # fmt: skip
