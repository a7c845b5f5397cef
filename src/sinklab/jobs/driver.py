"""What drives a sweep: its plan, its cells here or on a cluster, and one table of all that they have measured."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch

from sinklab.configuration import with_overrides
from sinklab.errors import ConfigurationError, InputError, SinklabError
from sinklab.jobs.cell import ENDED, NUMBERS, PLAN, SweepPlan, read_plan, run_cell, text_of
from sinklab.jobs.estimate import SEEDS, estimate_metric
from sinklab.jobs.grid import Cell, make_cells, short_label
from sinklab.jobs.processes import GRACE, Watch, lasts, run_processes
from sinklab.results.blocks import Block, Facts, Grid, Say
from sinklab.results.folder import FolderLock, check_place, from_outside, is_partial
from sinklab.results.progress import on_screen
from sinklab.results.run import Result, new_run_id
from sinklab.results.table import append, read_run, read_table, write_table, write_text
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import prepare_data
from sinklab.training.process import chosen_device, chosen_dtype, compiles, default_cache
from sinklab.training.train import require_same_config


def import_ray() -> ModuleType:
    """Ray, or how to install it."""
    try:
        import ray
    except ImportError:
        raise ConfigurationError("`ray` needs Ray, which is not installed; try: pip install 'sinklab[ray]'") from None
    return ray


def run_ray(plan: SweepPlan, names: Sequence[str], *, address: str, retries: int, watch: Watch) -> dict[str, str]:
    """Run cells of a plan on the cluster at an address (or ``auto``), and give the errors of those that failed.

    A task takes as many CPUs as its cell has threads, and a GPU where the cluster has some and the cell may use one. A task
    whose worker or node dies, and one that fails with an error that may pass, is run again by Ray, from the last checkpoint, up
    to ``retries`` times. An interrupt is raised after the running cells have stopped, each with a checkpoint.
    """
    ray = import_ray()
    connected = ray.is_initialized()
    if not connected:
        try:
            with _own_handler():
                ray.init(address=address, log_to_driver=False, logging_level="error")
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"`ray` {address}: no Ray cluster answers ({' '.join(str(error).split())}); start one with 'ray start --head', "
                "or leave out `ray` to run the cells on this machine"
            ) from None
    try:
        return _run(ray, plan, {name: _resources(ray, plan, name) for name in names}, retries, watch)
    finally:
        if not connected:
            ray.shutdown()


@contextlib.contextmanager
def _own_handler() -> Iterator[None]:
    """Put the handler of SIGTERM back: Ray sets one that ends the process before a sweep has put anything in order."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _run(ray: ModuleType, plan: SweepPlan, resources: dict[str, dict[str, int]], retries: int, watch: Watch) -> dict[str, str]:
    # A worker of its own for every cell, as with local processes: what one run leaves in its process, the next does not meet.
    task = ray.remote(max_calls=1, max_retries=retries, retry_exceptions=True)(_task)
    tasks = {
        task.options(name=name, **needs).remote(str(plan.folder), name, str(Path.cwd())): name
        for name, needs in resources.items()
    }
    errors: dict[str, str] = {}
    left = list(tasks)
    try:
        while left:
            done, left = ray.wait(left, timeout=0.2)
            for reference in done:
                name = tasks[reference]
                try:
                    error = ray.get(reference)
                except ray.exceptions.RayError as died:
                    error = _reason(died)
                end = plan.outcome(name)
                if error is None and end is None:
                    error = (
                        f"its worker ended and {plan.folder / name / 'run.json'} does not say so; is it on a shared filesystem?"
                    )
                if error is not None:
                    errors[name] = error
                watch.ended(name, error or end or "")
            watch.tick()
    except BaseException:
        watch.note("stopping the running cells with a checkpoint each; once more to stop at once")
        with contextlib.suppress(KeyboardInterrupt):
            for reference in left:
                ray.cancel(reference)  # Ctrl-C in the worker, which pretrain answers with a checkpoint
            ray.wait(left, num_returns=len(left), timeout=GRACE)
        raise
    return errors


def _task(folder: str, name: str, directory: str) -> str | None:
    """What a worker does: the error that ended the cell and would do so again, or nothing."""
    plan = read_plan(Path(folder))
    log = plan.log(name)
    log.parent.mkdir(exist_ok=True)
    with contextlib.chdir(directory), log.open("a", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        try:
            status = run_cell(plan.folder, name)
        except SinklabError as error:
            sentence = " ".join(str(error).split())
            print(f"error: {sentence}", file=sys.stderr)
            return sentence
        except BaseException as error:
            traceback.print_exc()
            if isinstance(error, Exception) and lasts(error):
                return _sentence(error)
            raise
    if status == "stopped":
        raise RuntimeError(f"cell {name} was stopped by a signal")  # Ray tries again, unless it was we who cancelled it
    return None


def _reason(died: Exception) -> str:
    """The last line of what happened in a worker, or what became of it."""
    cause = getattr(died, "cause", None)
    if isinstance(cause, BaseException):
        return _sentence(cause)
    return f"{type(died).__name__}: {str(died).strip().splitlines()[0]}"


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _resources(ray: ModuleType, plan: SweepPlan, name: str) -> dict[str, int]:
    """What a task takes, of which some node must have enough: Ray would wait for one for ever."""
    training = plan.cells[name].config.training
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpu = training.device == "cuda" or (training.device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes))
    if training.threads is None:
        raise ConfigurationError(f"cell {name}: Ray must know how many threads it takes; set training.threads")
    if not any(node.get("CPU", 0) >= training.threads and node.get("GPU", 0) >= gpu for node in nodes):
        raise ConfigurationError(
            f"cell {name} takes {training.threads} CPUs (training.threads) and {int(gpu)} GPUs, and no node has them"
        )
    return {"num_cpus": training.threads, "num_gpus": int(gpu)}


def default_jobs(plan: SweepPlan) -> int:
    """Cells at a time: one per GPU, or as many as the cores have threads for."""
    gpus = _gpus(plan)
    return len(gpus) or max(1, _cores() // max(threads_of(plan, name) for name in plan.cells))


def threads_of(plan: SweepPlan, name: str) -> int:
    """Threads that a cell computes with."""
    return plan.cells[name].config.training.threads or _cores()


def run_local(plan: SweepPlan, names: Sequence[str], *, jobs: int, retries: int, watch: Watch) -> dict[str, str]:
    """Run cells of a plan, ``jobs`` at a time, those that died up to ``retries`` times more; the errors of those that failed.

    An interrupt is raised after the running cells have stopped, each with a checkpoint.
    """
    gpus = _gpus(plan)
    environments = {
        # Cells compile side by side; each with a pool of its own over all cores would be too much.
        name: {"OMP_NUM_THREADS": str(threads_of(plan, name)), "TORCHINDUCTOR_COMPILE_THREADS": str(threads_of(plan, name))}
        for name in names
    }
    commands = {name: ["sinklab.jobs.cell", str(plan.folder), name] for name in names}
    return run_processes(
        commands, plan.log, plan.outcome, jobs=jobs, retries=retries, watch=watch, environments=environments, gpus=gpus
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(plan: SweepPlan) -> list[str]:
    """The GPUs to spread cells over, as ``CUDA_VISIBLE_DEVICES`` names them; none when all cells are for the CPU."""
    if all(chosen_device(cell.config) == "cpu" for cell in plan.cells.values()):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]


CACHE = "cache"


def run_sweep(
    config: PretrainingConfig,
    grid: Mapping[str, Sequence[object]],
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    changes: Sequence[str] = (),
    jobs: int | None = None,
    retries: int = 2,
    ray: str | None = None,
    resume: bool = False,
    cache: Path | None = None,
    progress: bool = True,
) -> Result:
    """Run all combinations of settings and seeds, each as :func:`~sinklab.training.train.run_training` in a process of its own.

    Everything is validated, and the text encoded, before the first cell runs. A cell that dies goes on from its last
    checkpoint; one that diverges is a result; one that fails does not keep the others from running. ``out`` gets
    ``sweep.json`` (the plan), a run folder per cell, ``logs``, ``table.parquet`` and ``cells.csv``.

    ``training.dtype=auto`` is what suits the machine where the sweep is planned: ``dtype`` of ``sweep.json``, and the field in
    the ``config`` of every cell. All cells have it, wherever they run and the sweep is resumed.

    Args:
        grid: field to values; see :func:`~sinklab.jobs.grid.make_cells`.
        seeds: each is the seed of the initialisation and of the data; by default those of ``config``.
        changes: ``path=value``, applied to every cell.
        jobs: processes at a time; by default one per GPU, or cores over ``training.threads``.
        retries: how often a cell that died is run again.
        ray: run on the Ray cluster at this address (``auto`` finds it) instead.
        resume: go on with the sweep in ``out``, if there is one. Cells that have ended are kept; cells may be added.
        cache: directory for encoded text; with ``ray`` it must be shared by all nodes, and is ``out/cache`` by default.
        progress: show bars on a terminal's stderr, lines elsewhere.

    Returns:
        The long tables of all cells that finished or diverged as one, and in ``summary``:

        - ``cells``, one record each, also ``cells.csv``: ``cell``, every varied field, ``seed``, ``status`` (finished,
          diverged, failed, stopped or waiting), ``held_out_loss`` in nats, ``sink_rate`` in percent, ``steps``,
          ``tokens_per_second``, ``seconds`` of all attempts, ``run_id`` (as in the table) and ``error``;
        - ``settings``, one record for every combination: ``settings``; how many cells ``finished``, ``diverged`` and did
          ``other`` things; for ``held_out_loss`` and ``sink_rate`` the ``values`` of the finished ones, and from three seeds on
          their ``mean`` and ``interval`` (95 %, Student's t);
        - ``errors``: a sentence for every cell that failed; ``warnings``: what keeps numbers of cells from being compared.

    Raises:
        ConfigurationError: a grid that names no field, a cell that cannot be, or a sweep to resume that was another.
        InputError: text or a directory that cannot be used, a text that has changed since cells read it, or another process
            that runs this sweep.
        KeyboardInterrupt: after all cells have stopped with a checkpoint; what has ended is in the tables.
    """
    if ray is not None and jobs is not None:
        raise ConfigurationError("`jobs` is for processes of this machine; with `ray` the cluster has as many as fit")
    if (jobs is not None and jobs < 1) or retries < 0:
        raise ConfigurationError(f"`jobs` must be at least 1 and `retries` at least 0, got {jobs} and {retries}")
    cells = {cell.name: cell for cell in make_cells(config, grid, seeds, changes)}
    out = out.expanduser().absolute()
    with FolderLock(out):
        check_machine(cells, ray)
        cells, dtype = _in_one_dtype(cells, out)
        earlier = _earlier(out, cells, resume)
        cache = (cache or (out / CACHE if ray is not None else default_cache())).expanduser().absolute()
        texts = prepare_texts(cells, cache, progress)
        if earlier is not None:
            texts |= _texts_of_begun(earlier, cells, texts)
        plan = SweepPlan(out, earlier.sweep_id if earlier else new_run_id(), cells, texts, cache)
        varied = {path: list(values) for path, values in grid.items()}
        plan.write(recipe=config.name, grid=varied, seeds=seeds and list(seeds), dtype=dtype)
        errors: dict[str, str] = {}
        try:
            try:
                errors = run_waiting(plan, jobs=jobs, retries=retries, ray=ray, progress=progress)
            finally:
                result = _collect(plan, errors)
        except BaseException as stop:
            if from_outside(stop) and any((plan.folder / name).exists() for name in plan.cells):
                how = "the same command goes on from there" if resume else "go on with `resume`"
                stop.add_note(f"what was trained is kept in {plan.folder}: {how}")
            raise
    return result


def run_waiting(
    plan: SweepPlan, wanted: Sequence[str] | None = None, *, jobs: int | None, retries: int, ray: str | None, progress: bool
) -> dict[str, str]:
    """Run the cells of a plan (those ``wanted``) that have not ended, here or on a cluster; the errors of those that failed."""
    names = list(plan.cells) if wanted is None else list(wanted)
    left = [name for name in names if plan.outcome(name) is None]
    with on_screen("cells", wanted=progress) as shown:
        watch = Watch(len(names), len(names) - len(left), shown.progress, shown.note)
        if not left:
            watch.note("the one cell has ended already" if len(names) == 1 else f"all {len(names)} cells have ended already")
            return {}
        if ray is None:
            return run_local(plan, left, jobs=jobs or default_jobs(plan), retries=retries, watch=watch)

        return run_ray(plan, left, address=ray, retries=retries, watch=watch)


def _earlier(out: Path, cells: Mapping[str, Cell], resume: bool) -> SweepPlan | None:
    """The plan to go on with, if there is one, when all of its cells are still asked for."""
    there = {path.name for path in out.iterdir() if not is_partial(path)} - {CACHE} if out.is_dir() else set()
    if not there:
        check_place(out)
        return None
    if PLAN not in there:
        raise InputError(f"output directory {out} holds something else than a sweep; choose another `out`")
    earlier = read_plan(out)
    if not any((out / name).exists() for name in earlier.cells):
        return None  # refused before any cell had begun
    if not resume:
        raise InputError(f"output directory {out} holds a sweep; go on with it with `resume`, or choose another `out`")
    for name, cell in earlier.cells.items():
        if name in cells:
            require_same_config({"config": cell.config.model_dump(mode="json")}, cells[name].config, out / name)
    gone = [name for name in earlier.cells if name not in cells]
    if gone:
        raise ConfigurationError(
            f"the sweep in {out} has cells that are not asked for now, {len(gone)} of them, such as {gone[0]}; resume it with "
            "all of its settings and seeds (more may be added), or choose another `out`"
        )
    for name, cell in cells.items():
        if (out / name / "run.json").is_file():
            require_same_config(read_run(out / name), cell.config, out / name)
    return earlier


def _texts_of_begun(
    earlier: SweepPlan, cells: Mapping[str, Cell], texts: Mapping[str, dict[str, str]]
) -> dict[str, dict[str, str]]:
    """The hashes of what the cells that have begun read, whatever is there now."""
    read = {name: text for name, text in earlier.texts.items() if (earlier.folder / name).exists()}
    left = {cell.config.data.corpus for name, cell in cells.items() if earlier.outcome(name) is None}
    for name, text in read.items():
        corpus = cells[name].config.data.corpus
        if text != texts[name] and corpus in left:
            raise InputError(
                f"data.corpus {corpus!r} gives another text than cell {name} of the sweep in {earlier.folder} has read, and "
                "cells that are compared must read the same; bring the old text back, or sweep again into another `out`"
            )
    return read


def _in_one_dtype(cells: dict[str, Cell], out: Path) -> tuple[dict[str, Cell], str | None]:
    """Cells that leave their dtype to the machine with that of the planned sweep, else with that of this machine."""
    left_open = [cell for cell in cells.values() if cell.config.training.dtype == "auto"]
    dtype = read_run(out, PLAN).get("dtype") if (out / PLAN).is_file() else None
    if left_open and dtype is None:
        # Cells for several devices have float32 where not all of these have instructions for bfloat16.
        dtype = min((chosen_dtype(cell.config) for cell in left_open), key=("float32", "bfloat16").index)
    for cell in left_open:
        cells[cell.name] = dataclasses.replace(cell, config=with_overrides(cell.config, [f"training.dtype={dtype}"]))
    return cells, dtype


def check_machine(cells: Mapping[str, Cell], ray: str | None) -> None:
    """Refuse, before anything is prepared, what this machine cannot do in some cell, by its name."""
    if ray is not None:
        import_ray()
        return
    for cell in cells.values():
        try:
            compiles(cell.config)  # looks for the device too
        except ConfigurationError as error:
            raise ConfigurationError(f"cell {cell.name}: {error}") from None


def prepare_texts(cells: Mapping[str, Cell], cache: Path, progress: bool) -> dict[str, dict[str, str]]:
    """Encode the text of all cells, each once, before several want it at the same time; the hashes of what they read."""
    texts: dict[str, dict[str, str]] = {}
    with on_screen("preparing the text", wanted=progress) as shown:
        for cell in cells.values():
            try:
                texts[cell.name] = text_of(prepare_data(cell.config, cache, shown.progress))
            except (ConfigurationError, InputError) as error:
                raise type(error)(f"cell {cell.name}: {error}") from None
    return texts


def _collect(plan: SweepPlan, errors: dict[str, str]) -> Result:
    """Put together what there is and write it."""
    rows = [_row(plan, cell, errors.get(cell.name)) for cell in plan.cells.values()]
    cells = pd.DataFrame(rows)
    tables = [read_table(plan.folder / row["cell"] / "table.parquet") for row in rows if row["status"] in ENDED]
    table = append(tables)
    write_table(table, plan.folder / "table.parquet")
    write_text(cells.to_csv(index=False), plan.folder / "cells.csv")
    said = [plan.run(row["cell"]).get("warning") for row in rows if row["sink_rate"] is not None]
    summary = {
        "folder": str(plan.folder),
        "settings": _by_settings(plan, rows),
        "cells": rows,
        "errors": [f"{name}: {error}" for name, error in errors.items()],
        "warnings": [*dict.fromkeys(filter(None, said)), *_other_text([plan.texts[row["cell"]] for row in rows])],
    }
    return Result(summary, table, read_run(plan.folder, PLAN), plan.folder, display)


def _other_text(texts: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence where held-out losses of the cells are means over other tokens, so that they say nothing beside each other."""
    if len({text["tokenizer"] for text in texts}) > 1:
        return ["The cells have different tokenizers, and a loss is per token: held-out losses do not compare between them."]
    if len({text["held_out"] for text in texts}) > 1:
        return ["The cells are evaluated on different held-out text: held-out losses do not compare between them."]
    return []


def display(result: Result) -> Iterator[Block]:
    """One row per combination of settings, and where the rest is."""
    settings, folder = result.summary["settings"], Path(result.summary["folder"])
    paths = list(settings[0]["settings"])
    rows = []
    for row in settings:
        others = [
            f"{count} {word}"
            for count, word in ((row["diverged"], "diverged"), (row["other"], "failed or unfinished"))
            if count
        ]
        runs = ", ".join([str(row["finished"]), *others])
        values = [str(row["settings"][path]) for path in paths]
        rows.append([*values, runs, _written(row["held_out_loss"], ".3f"), _written(row["sink_rate"], ".2f")])
    yield Grid((*map(short_label, paths), "runs", "held-out loss (nats)", "sink rate (%)"), rows, text=len(paths) + 3)
    yield from (Say(warning) for warning in result.summary["warnings"])
    yield Facts([("cells", str(folder / "cells.csv")), ("table", str(folder / "table.parquet"))])


def _written(number: dict[str, Any], form: str) -> str:
    """The mean with its 95 % interval, or the values where there are fewer than three."""
    if "mean" not in number:
        return ", ".join(format(value, form) for value in number["values"]) or "–"
    mean, interval = format(number["mean"], form), number["interval"]
    return f"{mean} [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else mean


def _row(plan: SweepPlan, cell: Cell, error: str | None) -> dict[str, Any]:
    run = plan.run(cell.name)
    status = run["status"] if run["status"] in (*ENDED, "waiting") else "stopped"
    result = run.get("result", {})
    return {
        "cell": cell.name,
        **cell.settings,
        "seed": cell.seed,
        "status": "failed" if error is not None else status,
        **{name: result.get(name) for name in (*NUMBERS, "steps", "tokens_per_second")},
        "seconds": run.get("wall_seconds"),
        "run_id": run.get("run_id"),
        "error": error,
    }


def _by_settings(plan: SweepPlan, rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    settings = {}
    for row in rows:
        cell = plan.cells[row["cell"]]
        groups.setdefault(str(cell.settings), []).append(row)
        settings[str(cell.settings)] = cell.settings
    summary = []
    for key, members in groups.items():
        counts = {status: sum(row["status"] == status for row in members) for status in ENDED}
        finished = [row for row in members if row["status"] == "finished"]
        numbers = {name: _spread(name, [row[name] for row in finished if row[name] is not None]) for name in NUMBERS}
        other = len(members) - sum(counts.values())
        summary.append({"settings": settings[key], **counts, "other": other, **numbers})
    return summary


def _spread(name: str, values: list[float]) -> dict[str, object]:
    """Values over seeds; of three or more also their mean and its interval, which is ``None`` where a few are all alike."""
    if len(values) < SEEDS:
        return {"values": values}
    estimate = estimate_metric(name, values)
    return {"values": values, "mean": estimate.middle, "interval": estimate.interval and list(estimate.interval)}
