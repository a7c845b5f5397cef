"""depend(): the same score under several cache policies, and whether it depends on the sink tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.results.run import Result, Run
from sinklab.studies.arguments import (
    Bos,
    Device,
    DeviceMap,
    Dtype,
    MaxMemory,
    ModelSource,
    OffloadFolder,
    Out,
    Overwrite,
    Progress,
    Revision,
    Seed,
    TrustRemoteCode,
    command,
)

if TYPE_CHECKING:
    from sinklab.policies.base import Policy
    from sinklab.tasks.base import Task

__all__ = ["depend"]

HARNESS = "lm_eval:"


@command
def depend(
    model: ModelSource,
    tasks: Annotated[Sequence[str | Task], "--task", "--tasks"] = ("long_text",),
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
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Out = None,
    overwrite: Overwrite = False,
    progress: Progress | None = None,
) -> Result:
    """Say which scores depend on the sink tokens: every task under every cache policy, with intervals.

    Gives a table and a verdict (yes, no, undecided) for each task, and up to where context is of use under each policy.

    The verdict compares two caches of the same size, one with sinks and one without, over those questions that are asked after
    the cache is full and whose fact both still hold. yes: the score is better with sinks by more than the task's minimal
    effect, whole interval. no: the whole interval lies within the minimal effect. undecided: neither, or a score at chance.
    docs/scores-that-depend-on-the-sink.md has the rules.

    Args:
        tasks: From 'sinklab list tasks', with settings if need be: needle:corpus=FILE; or lm_eval:TASK. From Python also tasks.
        policies: What to run besides the two that are compared: full, 8+1016 (sinks+window), or a name with settings; by
            default full, every number of sinks, recompute.
        window: Tokens before the query that a cache holds, sinks included; by default half the trained length, ≤ 1024.
        sinks: First tokens that are kept; the verdict is on the largest.
        items: Independent texts, or documents of the harness; more make intervals shorter.
        seed: Seed of the texts; the same seed gives the same tokens.
        level: Of all intervals.
        out: Directory for table.parquet, summary.json, run.json and a plot for each task.

    Raises:
        SinklabError: see the errors of loading, tasks and policies. A policy other than the two compared that the model
            cannot run is reported with the reason and left out.

    Examples:
        sinklab depend embedded:softmax --task long_text
        sinklab depend embedded:softmax --task needle,line_lookup --window 120 --out build/depend
        sinklab depend ORG/MODEL --task long_text:corpus=book.txt --policies 8+1016,strided --json
        sinklab depend ORG/MODEL --task lm_eval:arc_easy --window 64 --items 200  (needs sinklab[evaluation])
    """
    from sinklab.models.losses import is_causal_lm
    from sinklab.registry import policies as policy_registry
    from sinklab.registry import tasks as registry
    from sinklab.results.table import append, make_table
    from sinklab.studies.depend.contenders import make_contenders
    from sinklab.studies.depend.display import display
    from sinklab.studies.depend.measurement import default_window, measure_task
    from sinklab.studies.depend.plot import write_plots
    from sinklab.studies.measure.probing import opened, uses_bos, writes

    settings = {"sinks": list(sinks), "items": items, "seed": seed, "bos": bos, "level": level}
    with Run("depend", out=out, overwrite=overwrite, settings=settings, progress=progress, writes=writes(model)) as run:
        if not tasks:
            raise ConfigurationError("name at least one task: sinklab list tasks")
        if items < 2:
            raise ConfigurationError(f"`items` {items} must be 2 or more: an interval needs several texts")
        chosen = [task if isinstance(task, str) and task.startswith(HARNESS) else registry.make(task) for task in tasks]
        if bos != "auto" and any(isinstance(task, str) for task in chosen):
            raise ConfigurationError(
                f"`bos` {bos}: the harness leaves the token in front to the tokenizer; leave it out with {HARNESS}"
            )
        loaded = opened(
            model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code,
            device_map=device_map, max_memory=max_memory, offload_folder=offload_folder,
        )  # fmt: skip
        if not is_causal_lm(loaded.model):
            raise UnsupportedModelError(
                f"{type(loaded.model).__name__} predicts no next token of its own text, so no task can be put to it under a "
                "cache policy; depend is for decoders"
            )
        contenders = make_contenders(default_window(loaded) if window is None else window, sinks, policies)
        with_bos = uses_bos(loaded.encoder, bos)
        frames, summaries, records = [], [], []
        for task in chosen:
            if isinstance(task, str):
                from sinklab.studies.depend.harness import run_harness

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
