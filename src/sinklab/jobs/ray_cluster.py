"""Cells of a sweep as tasks of a Ray cluster, one each: for when one machine is not enough."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypedDict

from sinklab.errors import ConfigurationError, InputError, SinklabError
from sinklab.jobs.cell import PLAN, SweepPlan, read_plan, run_cell
from sinklab.jobs.processes import Watch, last_line, lasts
from sinklab.results.table import read_run
from sinklab.results.version import __version__

__all__ = ["import_ray", "require_cluster", "run_ray"]

GRACE = 120.0
"""Seconds that the cells have, when the sweep is interrupted, for the step at hand and a checkpoint."""

ANSWER = 180.0
"""Seconds that a node has to start Python, import sinklab and look for the output directory."""


class Node(TypedDict):
    """What Ray says of a node, as far as we ask."""

    Alive: bool
    NodeID: str
    NodeManagerHostname: str
    Resources: dict[str, float]


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


def require_cluster(address: str) -> None:
    """Refuse an address at which no cluster listens, at once and before anything is prepared.

    Ray itself finds a cluster that has gone at the address that it has left in a file, or that ``RAY_ADDRESS`` names, and tries
    for minutes to reach it.

    Args:
        address: as for :func:`run_ray`; of no meaning in a process that is connected already.

    Raises:
        ConfigurationError: Ray is not installed, it knows of no cluster, or none answers.
    """
    if import_ray().is_initialized():
        return
    place = address
    try:
        place = _place(address)
        host, _, port = place.rpartition(":")
        if host and "://" not in place:
            socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise _refusal(address, place, error) from None


def _place(address: str) -> str:
    """Where Ray would look for a cluster: ``host:port``, or the address as it is."""
    said = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
    if said != "auto":
        return said
    services = importlib.import_module("ray._private.services")
    find = getattr(services, "canonicalize_bootstrap_address", None)  # no part of its interface, and perhaps not there
    return said if find is None else str(find(said))


def _refusal(address: str, place: str, error: Exception) -> ConfigurationError:
    why = "which RAY_ADDRESS names" if os.environ.get("RAY_ADDRESS") else "where Ray has started one before"
    where = "" if place == address else f" at {place}, {why}"
    return ConfigurationError(
        f"`ray` {address}: no Ray cluster answers{where} ({' '.join(str(error).split())}); start one with 'ray start --head', "
        "or leave out `ray` to run the cells on this machine"
    )


def run_ray(plan: SweepPlan, names: Sequence[str], *, address: str, retries: int, watch: Watch) -> dict[str, str]:
    """Run cells of a plan on a cluster, and give the errors of those that failed.

    A task takes as many CPUs as its cell has threads, and a GPU where the cluster has some and the cell may use one. A task
    whose worker or node dies, and one that fails with an error that may pass, is run again by Ray, from the last checkpoint.

    Args:
        address: ``auto`` or the address of a cluster; of no meaning in a process that is connected already.
        retries: how often a cell that died is run again.

    Raises:
        ConfigurationError: Ray is not installed, no cluster answers, or no node is large enough for a cell.
        InputError: a node that does not see the output directory, or has another sinklab.
        KeyboardInterrupt: after the running cells have stopped, each with a checkpoint.
    """
    ray = import_ray()
    connected = ray.is_initialized()
    if not connected:
        _connect(ray, address)
    try:
        resources = {name: _resources(ray, plan, name) for name in names}
        _require_shared(ray, plan, _fitting_nodes(ray, resources))
        return _run(ray, plan, resources, retries, watch)
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
    require_cluster(address)
    try:
        with _own_handler():
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        raise _refusal(address, address, error) from None


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
    training = plan.cells[name].config.training
    cluster = ray.cluster_resources()
    gpu = training.device == "cuda" or (training.device == "auto" and cluster.get("GPU", 0) >= 1)
    if training.threads is None:
        raise ConfigurationError(f"cell {name}: Ray must know how many threads it takes; set training.threads")
    return {"num_cpus": training.threads, "num_gpus": int(gpu)}


def _fitting_nodes(ray: ModuleType, resources: dict[str, dict[str, int]]) -> list[Node]:
    """Nodes that may get a cell."""
    nodes = [node for node in ray.nodes() if node["Alive"]]

    def fits(node: Node, needs: dict[str, int]) -> bool:
        has = node["Resources"]
        return has.get("CPU", 0) >= needs["num_cpus"] and has.get("GPU", 0) >= needs["num_gpus"]

    for name, needs in resources.items():
        if not any(fits(node, needs) for node in nodes):
            sizes = ", ".join(
                f"{node['NodeManagerHostname']} has {node['Resources'].get('CPU', 0):g} and {node['Resources'].get('GPU', 0):g}"
                for node in nodes
            )
            raise ConfigurationError(
                f"cell {name} takes {needs['num_cpus']} CPUs (training.threads) and {needs['num_gpus']} GPUs, and no node has "
                f"them: {sizes}"
            )
    return [node for node in nodes if any(fits(node, needs) for needs in resources.values())]


def _require_shared(ray: ModuleType, plan: SweepPlan, nodes: list[Node]) -> None:
    """Have every node look for the plan before any of them gets a cell."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    answers = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(str(plan.folder)): (
            node["NodeManagerHostname"]
        )
        for node in nodes
    }
    for reference, host in answers.items():
        try:
            version, sweep_id = ray.get(reference, timeout=ANSWER)
        except ray.exceptions.GetTimeoutError:
            raise InputError(
                f"node {host} has not begun a task within {ANSWER:.0f} seconds: it is busy or out of reach; see `ray status`"
            ) from None
        except ray.exceptions.RayError as error:
            raise InputError(
                f"node {host} cannot run sinklab: {_reason(error)}; install sinklab {__version__} for the Python of its Ray"
            ) from None
        if version != __version__:
            raise InputError(f"node {host} has sinklab {version} and this machine {__version__}; install the same on all nodes")
        if sweep_id != plan.sweep_id:
            raise InputError(
                f"node {host} does not see the sweep in {plan.folder}; all nodes need the same directory under the same path"
            )


def _look(folder: str) -> tuple[str, str | None]:
    """Version of sinklab here, and identity of the sweep in the folder as this machine sees it."""
    try:
        return __version__, read_run(Path(folder), PLAN).get("sweep_id")
    except InputError:
        return __version__, None


def _size(path: Path) -> int:
    return os.stat(path).st_size if path.exists() else 0
