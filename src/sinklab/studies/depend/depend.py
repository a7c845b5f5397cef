"""depend(): the same score under several cache policies, and whether it depends on the sink tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sinklab.errors import ConfigurationError
from sinklab.results.naming import counted
from sinklab.results.run import Result, Run
from sinklab.studies.arguments import (
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
    from sinklab.models.loading import LoadedModel
    from sinklab.policies.base import Policy
    from sinklab.registry import Registry
    from sinklab.results.metric import Row
    from sinklab.results.store import Store
    from sinklab.studies.depend.clock import Clock
    from sinklab.studies.depend.conditions import ConditionPlan
    from sinklab.studies.depend.harness import PreparedHarness
    from sinklab.studies.depend.runner import PreparedTask
    from sinklab.tasks.base import Task

__all__ = ["depend"]

HARNESS = "lm_eval:"


@command
def depend(
    model: ModelSource,
    tasks: Annotated[Sequence[str | Task], "--task", "--tasks"] = ("long_text",),
    *,
    corpus: str | None = None,
    bos: Annotated[Sequence[str], "--bos"] = ("auto",),
    visibility: Sequence[str] = ("visible", "hidden"),
    policies: Sequence[str | Policy] | None = None,
    cache_bits: Sequence[int] = (),
    cross: bool = False,
    window: int | None = None,
    sinks: Sequence[int] = (1, 4),
    items: int = 64,
    seed: Seed = 0,
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
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Test which scores depend on the sink: every task under every condition, with paired intervals and an index of dependence.

    Gives for each task a table, a verdict (yes, no, undecided) and an index of dependence, and up to which length context helps
    under each policy.

    The verdict compares two caches of the same size, one with sinks and one without, on the questions that are asked after the
    cache is full and whose fact both still hold. yes: the score is better with sinks by more than the task's minimal effect
    (the whole interval). no: the whole interval lies within the minimal effect. undecided: neither, or a score at chance. The
    index is the share of the score above chance that is lost when the sink is hidden.

    Several values of --bos or --cache-bits make a grid: one factor at a time differs from the reference, each with the sink
    visible and hidden; --cross takes every combination. docs/scores.md has the rules.

    Args:
        tasks: From 'sinklab list tasks', optionally with settings: needle:corpus=FILE; or lm_eval:TASK.
        corpus: Text for tasks that read one and name none: a UTF-8 text, a folder, or a name from 'sinklab list corpora'; by
            default python_source.
        bos: Beginning-of-sequence tokens in front: auto (what the tokenizer does), none, one, two; or several.
        visibility: Of the sink, in conditions other than the reference, which has both: visible, hidden.
        policies: Policies besides the two that are compared: full, 8+1016 (sinks+window), or a name with settings, which holds
            as many tokens as these if it sets no size; by default full, every number of sinks, recompute, and in a grid full.
        cache_bits: Also with a quantised cache of 8 or 4 bits a number; in 32,8,4 the model's own precision is the reference.
        cross: Every combination of BOS, visibility, policy and bits.
        window: Tokens before the query that a cache holds, sinks included; by default half the trained length, at most 1024, or
            less where every layer has a narrower window.
        sinks: Numbers of first tokens to keep; the verdict is on the largest.
        items: Independent texts, or documents of the harness; more make intervals shorter.
        seed: Seed of the texts; the same seed gives the same tokens.
        level: Confidence level of all intervals.
        out: Directory for table.parquet, summary.json, run.json and plots; an interrupted run continues from what is there.
        say: called with a sentence: how many cells there are, and how long they take.

    In Python:
        ``tasks`` may be objects too.

    Raises:
        SinklabError: see the errors of loading, tasks and policies. A policy other than the two compared that the model
            cannot run is reported with the reason and left out.

    Examples:
        sinklab depend embedded:softmax --task long_text
        sinklab depend embedded:softmax --task needle,line_lookup --window 120 --out build/depend
        sinklab depend embedded:softmax --task long_text,needle --bos none,one,two --cache-bits 8,4 --out build/grid
        sinklab depend ORG/MODEL --task long_text,needle --corpus book.txt
        sinklab depend ORG/MODEL --task long_text:corpus=book.txt --policies 8+1016,strided --json
        sinklab depend ORG/MODEL --task lm_eval:arc_easy --window 64 --items 200  (needs sinklab[evaluation])
    """
    from sinklab.registry import policies as policy_registry
    from sinklab.registry import tasks as registry
    from sinklab.results.table import append, make_table
    from sinklab.streaming.limits import length_known
    from sinklab.studies.depend.clock import Clock
    from sinklab.studies.depend.conditions import counts_of, make_plan, read_bits, read_bos, read_sights
    from sinklab.studies.depend.contenders import make_contenders
    from sinklab.studies.depend.display import display
    from sinklab.studies.depend.heatmap import write_heatmap
    from sinklab.studies.depend.measurement import default_window, loss_warning, require_windows, window_warning
    from sinklab.studies.depend.plot import write_plots
    from sinklab.studies.depend.rows import index_rows
    from sinklab.studies.measure.probing import opened

    settings = {
        "sinks": list(sinks), "items": items, "seed": seed, "bos": read_bos(bos), "visibility": read_sights(visibility),
        "cache_bits": list(cache_bits), "cross": cross, "level": level,
    }  # fmt: skip
    with (
        Run("depend", out=out, overwrite=overwrite, settings=settings, progress=progress) as run,
        length_known(),  # the summary has a warning
    ):
        _check_arguments(tasks, items, level)
        tasks = tasks if corpus is None else _with_corpus(tasks, corpus)
        by_label = _by_label(tasks)
        loaded = opened(
            model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code,
            device_map=device_map, max_memory=max_memory, offload_folder=offload_folder,
        )  # fmt: skip
        require_windows(loaded)
        model_bits = 8 * loaded.model.dtype.itemsize
        counts, bits = counts_of(read_bos(bos), loaded.encoder), read_bits(cache_bits, model_bits)
        budget = default_window(loaded) if window is None else window
        grid = cross or len(counts) > 1 or any(size != model_bits for size in bits)
        contenders = make_contenders(budget, sinks, ["full"] if grid and policies is None else policies)
        largest = max(policy.max_held(1 << 62) - 1 for policy in contenders.policies.values() if policy.bounded)
        warnings = [window_warning(loaded, largest)]  # each a sentence, or empty
        plan = make_plan(contenders, counts, read_sights(visibility), bits, model_bits, cross=cross)
        prepared = [_prepare(loaded, task, label, plan, items, seed) for label, task in by_label.items()]
        warnings += _text_warnings(loaded, prepared, plan)
        clock = Clock(
            ((condition.kind, task.tokens(condition)) for task in prepared for condition in plan.conditions),
            say if plan.grid else lambda text: None,
            run.progress,
        )
        if plan.grid:
            cells = len(plan.conditions)
            size = f"{counted(len(prepared), 'task')}, {counted(cells, 'condition')}"
            say(f"{counted(len(prepared) * cells, 'cell')}: {size}, {clock.tokens:,} tokens to compute")
        identity = _identity(loaded, stored=run.out is not None)
        frames, summaries, records = [], [], []
        for task in prepared:
            summary, rows, record = _score(loaded, task, plan, level, run.store, identity, clock)
            rows += index_rows(summary, plan.reference)
            summaries.append(summary)
            warnings.append(loss_warning(loaded, summary))
            records.append(record)
            frames.append(
                make_table(
                    rows, run_id=run.id, model=loaded.name, revision=loaded.revision, operation=loaded.operation,
                    corpus=task.label, seed=seed, probe="depend",
                )
            )  # fmt: skip

        def write_files(folder: Path) -> None:
            write_plots(summaries, folder)
            if plan.grid:
                write_heatmap(summaries, folder / "grid.png")

        return run.finish(
            summary={
                "model": loaded.name, "operation": loaded.operation, "window": contenders.budget, "bos": plan.reference,
                "items": items, "level": level, "bits": model_bits, "warnings": list(filter(None, warnings)),
                "tasks": summaries,
            },
            table=append(frames),
            display=display,
            files=write_files,
            loaded=loaded,
            config={
                "window": contenders.budget,
                "tasks": _as_given(registry, tasks),
                "policies": policies and _as_given(policy_registry, policies),
            },
            model={"name": loaded.name, "revision": loaded.revision, "operation": loaded.operation},
            policies={name: policy_registry.settings(policy) for name, policy in contenders.policies.items()},
            tasks=records,
        )  # fmt: skip


def _check_arguments(tasks: Sequence[str | Task], items: int, level: float) -> None:
    if not tasks:
        raise ConfigurationError("name at least one task: sinklab list tasks")
    if items < 2:
        raise ConfigurationError(f"`items` {items} must be 2 or more: an interval needs several texts")
    if not 0 < level < 1:
        raise ConfigurationError(f"`level` {level:g} must lie between 0 and 1: 0.95 is that of intervals of 95 %")


def _prepare(
    loaded: LoadedModel, task: str | Task, label: str, plan: ConditionPlan, items: int, seed: int
) -> PreparedTask | PreparedHarness:
    """A task of ours, or one of the harness by its name, ready to be read."""
    if isinstance(task, str):
        from sinklab.studies.depend.harness import prepare_harness

        return prepare_harness(loaded, task.removeprefix(HARNESS), plan, items, seed)
    from sinklab.studies.depend.runner import prepare_task

    return prepare_task(loaded, task, label, plan, items, seed)


def _score(
    loaded: LoadedModel,
    prepared: PreparedTask | PreparedHarness,
    plan: ConditionPlan,
    level: float,
    store: Store,
    identity: dict[str, object],
    clock: Clock,
) -> tuple[dict[str, Any], list[Row], dict[str, Any]]:
    """Read a task under every condition; its part of the summary, its rows of the table and its record."""
    from sinklab.studies.depend.measurement import summarise_task
    from sinklab.studies.depend.runner import PreparedTask, run_task

    if isinstance(prepared, PreparedTask):
        return summarise_task(run_task(loaded, prepared, plan, store, identity, clock), plan, level)
    from sinklab.studies.depend.harness import run_harness

    return run_harness(loaded, prepared, plan, level, store, identity, clock)


def _text_warnings(loaded: LoadedModel, prepared: Sequence[PreparedTask | PreparedHarness], plan: ConditionPlan) -> list[str]:
    """Of the texts of our tasks, a sentence each, or an empty text."""
    from sinklab.studies.depend.measurement import repeats_warning, sink_warning
    from sinklab.studies.depend.runner import PreparedTask

    warnings = []
    for task in prepared:
        if isinstance(task, PreparedTask):
            tokens = task.sheets[plan.reference][0].tokens
            warnings += [repeats_warning(task), sink_warning(loaded, task.label, tokens, plan.contenders)]
    return warnings


def _identity(loaded: LoadedModel, *, stored: bool) -> dict[str, object]:
    """What stored scores of a model are found by; its weights are hashed only if scores are ``stored``."""
    identity: dict[str, object] = {"model": loaded.name, "revision": loaded.revision, "dtype": str(loaded.model.dtype)}
    if not stored:
        return identity
    from sinklab.models.loading import hash_weights
    from sinklab.streaming.traits import fingerprint
    from sinklab.studies.measure.probing import classes_of

    identity["weights"] = hash_weights(loaded.model)
    # Of its configuration, which is in no weight: scaled positions, a window.
    identity["fingerprint"] = fingerprint(loaded.model)
    identity["classes"] = [cls.__qualname__ for cls in classes_of(loaded.model)]
    return identity


def _as_given(registry: Registry[Any], plugins: Sequence[str | Task | Policy]) -> list[object]:
    """Plug-ins for the record: those given as text as they were written, objects by their settings."""
    return [plugin if isinstance(plugin, str) else registry.settings(plugin) for plugin in plugins]


def _with_corpus(tasks: Sequence[str | Task], corpus: str) -> list[str | Task]:
    """The tasks, those named without a corpus of their own on this one; objects have one, and are left alone.

    They stay text, which a command line can name again.
    """
    from sinklab.registry import spelled
    from sinklab.registry import tasks as registry

    with_corpus: list[str | Task] = []
    readers = 0
    for task in tasks:
        if isinstance(task, str) and not task.startswith(HARNESS):
            settings = registry.read(task)
            plugin = registry[settings["name"]]
            if any(field.name == "corpus" for field in dataclasses.fields(plugin)):
                readers += 1
                task = spelled({"corpus": corpus} | settings)
        with_corpus.append(task)
    if not readers:
        raise ConfigurationError(f"`corpus` {corpus}: none of the tasks that are named reads a corpus (sinklab show TASK)")
    return with_corpus


def _by_label(tasks: Sequence[str | Task]) -> dict[str, str | Task]:
    """The tasks by their labels: ours as objects, those of the harness as text."""
    from sinklab.registry import tasks as registry

    made = [task if isinstance(task, str) and task.startswith(HARNESS) else registry.make(task) for task in tasks]
    labels = [_label(task, made) for task in made]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigurationError(f"task {label!r} is named twice; once is enough, or give it other settings")
    return dict(zip(labels, made, strict=True))


def _label(task: str | Task, tasks: Sequence[str | Task]) -> str:
    """A name for a task; where several of ours have one name, also the settings in which they differ."""
    if isinstance(task, str):
        return task
    twins = [other for other in tasks if not isinstance(other, str) and other.name == task.name]
    names = [field.name for field in dataclasses.fields(task)]
    differing = [name for name in names if any(getattr(twin, name) != getattr(task, name) for twin in twins)]
    settings = ",".join(f"{name}={getattr(task, name)}" for name in differing)
    return f"{task.name}:{settings}" if settings else task.name
