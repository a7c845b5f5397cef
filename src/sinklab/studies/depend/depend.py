"""depend(): the same score under several cache policies, and whether it depends on the sink tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Annotated

from sinklab.errors import ConfigurationError
from sinklab.results.run import Result, Run
from sinklab.studies.arguments import Bos, Known, Loading, ModelSource, Output, Seed, command

if TYPE_CHECKING:
    from sinklab.models.loading import LoadedModel
    from sinklab.tasks.base import Task

HARNESS = "lm_eval:"


@command
def depend(
    model: ModelSource,
    tasks: Annotated[Sequence[str | Task], "--task", "--tasks", Known("tasks", "lm_eval")] = ("long_text",),
    *,
    window: int | None = None,
    sinks: Sequence[int] = (4,),
    items: int = 64,
    seed: Seed = 0,
    bos: Bos = "auto",
    loading: Loading = Loading(),
    output: Output = Output(),
) -> Result:
    """Test which scores depend on the sink: every task under several caches, with paired intervals and a verdict.

    Scores are those of lm-evaluation-harness (sinklab[evaluation]), each read through the cache. Gives for each task a table, a
    verdict (yes, no, undecided) and an index of dependence, and the score by distance or context under each policy.

    The verdict compares two caches of the same size, one with sinks and one without, on the questions that are asked after the
    cache is full and whose fact both still hold. yes: the score is better with sinks by more than the task's minimal effect
    (the whole interval). no: the whole interval lies within the minimal effect. undecided: neither, or a score at chance. The
    index is the share of the score above chance that is lost when the sink is hidden.
    docs/scores.md has the rules.

    Args:
        tasks: From 'sinklab list tasks', optionally with settings: long_text:corpus=FILE; or lm_eval:TASK.
        window: Tokens before the query that a cache holds, sinks included; by default half the trained length, at most 1024, or
            less where every layer has a narrower window.
        sinks: Numbers of first tokens to keep; the verdict is on the largest.
        items: Independent texts, or documents of the harness; more make intervals shorter.
        seed: Seed of the texts; the same seed gives the same texts.
        out: Directory for table.parquet, summary.json, run.json and report.html; an interrupted run continues from what is
            there.

    In Python:
        ``tasks`` may be objects too.

    Raises:
        SinklabError: see the errors of loading and tasks. Where the model cannot read the whole text, that is reported with
            the reason and left out.

    Examples:
        sinklab depend embedded:softmax --task long_text
        sinklab depend embedded:softmax --task passkey,line_lookup --window 120 --out build/depend
        sinklab depend ORG/MODEL --task long_text:corpus=book.txt --sinks 1,4 --json
        sinklab depend ORG/MODEL --task lm_eval:arc_easy --window 64 --items 200
    """
    from sinklab.registry import policies as policy_registry
    from sinklab.registry import tasks as registry
    from sinklab.report.page import write_blocks_page
    from sinklab.results.intervals import LEVEL
    from sinklab.results.sections import to_json
    from sinklab.results.table import append, make_table
    from sinklab.streaming.limits import length_known
    from sinklab.studies.depend.found import TITLE, Found, rows, show
    from sinklab.studies.depend.harness import make_contenders
    from sinklab.studies.measure.probing import uses_bos

    settings = {"sinks": list(sinks), "items": items, "seed": seed, "bos": bos}
    with (
        Run("depend", **vars(output), settings=settings) as run,
        length_known(),  # the summary has a warning
    ):
        if not tasks:
            raise ConfigurationError("name at least one task: sinklab list tasks")
        if items < 2:
            raise ConfigurationError(f"`items` {items} must be 2 or more: an interval needs several texts")
        by_label = _by_label(tasks)
        # Before anything is loaded: without the harness nothing can be read.
        from sinklab.studies.depend.harness import prepare_harness, prepare_task, run_task
        from sinklab.studies.depend.measurement import (
            default_window,
            loss_warning,
            outcome,
            require_windows,
            text_warnings,
            window_warning,
        )

        loaded = loading.open(model)
        require_windows(loaded)
        front = int(uses_bos(loaded.encoder, bos))
        contenders = make_contenders(default_window(loaded) if window is None else window, sinks)
        largest = max(policy.max_held(1 << 62) - 1 for policy in contenders.policies.values() if policy.bounded)
        prepared = [
            prepare_harness(loaded, task.removeprefix(HARNESS), contenders, items, seed, front)
            if isinstance(task, str)
            else prepare_task(loaded, task, label, contenders, items, seed, front)
            for label, task in by_label.items()
        ]
        warnings = [window_warning(loaded, largest)]  # each a sentence, or empty
        # The files of a model that is named are hashed already.
        named = isinstance(model, (str, PathLike))
        identity = _identity(loaded, stored=run.out is not None, weights=loaded.revision if named else None)
        outcomes, records, frames = [], [], []
        of_task = len(contenders.policies)
        for number, task in enumerate(prepared):

            def progress(done: float, number: int = number) -> None:
                share = round(100 * (number * of_task + done))
                run.progress("reading, percent of a policy", share, 100 * of_task * len(prepared))

            progress(0)
            warnings += text_warnings(loaded, task, contenders)
            scored = run_task(loaded, task, contenders, front, run.store, identity, progress)
            outcomes.append(outcome(task, scored, contenders))
            warnings.append(loss_warning(loaded, outcomes[-1]))
            about = {} if task.own is None else {**task.own.settings, "identity": dataclasses.asdict(task.own.identity)}
            records.append({"name": task.label, **about, "texts_sha256": task.sha256, **scored.record})
            frames.append(
                make_table(
                    rows(outcomes[-1], front), run_id=run.id, model=loaded.name, revision=loaded.revision,
                    operation=loaded.operation, corpus=task.label, seed=seed, probe="depend",
                )
            )  # fmt: skip
        found = Found(
            model=loaded.name, operation=loaded.operation, window=contenders.budget, bos=front, items=items, level=LEVEL,
            warnings=list(filter(None, warnings)), tasks=outcomes,
        )  # fmt: skip
        return run.finish(
            summary=to_json(found),
            table=append(frames),
            show=show,
            page=lambda folder: write_blocks_page(folder, *TITLE, show),
            loaded=loaded,
            config={
                "window": contenders.budget,
                "tasks": [task if isinstance(task, str) else registry.settings(task) for task in tasks],
            },
            model={"name": loaded.name, "revision": loaded.revision, "operation": loaded.operation},
            policies={name: policy_registry.settings(policy) for name, policy in contenders.policies.items()},
            tasks=records,
        )


def _identity(loaded: LoadedModel, *, stored: bool, weights: str | None) -> dict[str, object]:
    """What stored scores of a model are found by; its weights are hashed only if scores are ``stored`` and no hash is known."""
    identity: dict[str, object] = {"model": loaded.name, "revision": loaded.revision, "dtype": str(loaded.model.dtype)}
    if not stored:
        return identity
    from sinklab.models.loading import hash_weights
    from sinklab.streaming.traits import fingerprint

    identity["weights"] = weights or hash_weights(loaded.model)
    # Of its configuration, which is in no weight: scaled positions, a window.
    identity["fingerprint"] = fingerprint(loaded.model)
    identity["operation"] = loaded.operation
    return identity


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
