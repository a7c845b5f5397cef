"""Cells of a sweep as tasks of a Ray cluster, one each: for when one machine is not enough."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from sinklab.errors import ConfigurationError, SinklabError
from sinklab.jobs.cell import SweepPlan, read_plan, run_cell
from sinklab.jobs.processes import Watch, last_line, lasts

GRACE = 120.0
"""Seconds that the cells have, when the sweep is interrupted, for the step at hand and a checkpoint."""


def import_ray() -> ModuleType:
    """Ray.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ConfigurationError("`ray` needs Ray, which is not installed; try: pip install 'sinklab[ray]'") from None
    return ray


def run_ray(plan: SweepPlan, names: Sequence[str], *, address: str, retries: int, watch: Watch) -> dict[str, str]:
    """Run cells of a plan on a cluster, and give the errors of those that failed.

    A task takes as many CPUs as its cell has threads, and a GPU where the cluster has some and the cell may use one. A task
    whose worker or node dies, and one that fails with an error that may pass, is run again by Ray, from the last checkpoint.

    Args:
        address: ``auto`` or the address of a cluster; of no meaning in a process that is connected already.
        retries: how often a cell that died is run again.

    Raises:
        ConfigurationError: Ray is not installed, no cluster answers, or no node is large enough for a cell.
        KeyboardInterrupt: after the running cells have stopped, each with a checkpoint.
    """
    ray = import_ray()
    connected = ray.is_initialized()
    if not connected:
        _connect(ray, address)
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


def _connect(ray: ModuleType, address: str) -> None:
    try:
        with _own_handler():
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"`ray` {address}: no Ray cluster answers ({' '.join(str(error).split())}); start one with 'ray start --head', or "
            "leave out `ray` to run the cells on this machine"
        ) from None


def _run(ray: ModuleType, plan: SweepPlan, resources: dict[str, dict[str, int]], retries: int, watch: Watch) -> dict[str, str]:
    # A worker of its own for every cell, as with local processes: what one run leaves in its process, the next does not meet.
    task = ray.remote(max_calls=1, max_retries=retries, retry_exceptions=True)(_task)
    before = {name: _size(plan.log(name)) for name in resources}
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
                watch.ended(name, error or end or "", failed=error is not None)
            for reference in left:
                if _size(plan.log(tasks[reference])) > before[tasks[reference]]:
                    watch.started(tasks[reference])
            watch.tick(lambda name: last_line(plan.log(name)))
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


def _size(path: Path) -> int:
    return os.stat(path).st_size if path.exists() else 0
