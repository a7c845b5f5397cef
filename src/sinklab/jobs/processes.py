"""Cells of a sweep as processes of this machine: so many at a time, each with its own interpreter, run again when they die."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from sinklab.jobs.cell import REFUSED, SweepPlan, last_line
from sinklab.jobs.watch import Watch
from sinklab.training.process import chosen_device

__all__ = ["default_jobs", "run_local", "run_processes"]

GRACE = 120.0
"""Seconds that a cell has, when the sweep is interrupted, for the step at hand and a checkpoint."""


def default_jobs(plan: SweepPlan) -> int:
    """Cells at a time: one per GPU, or as many as the cores have threads for."""
    gpus = _gpus(plan)
    return len(gpus) or max(1, _cores() // max(threads_of(plan, name) for name in plan.cells))


def threads_of(plan: SweepPlan, name: str) -> int:
    """Threads that a cell computes with."""
    return plan.cells[name].config.training.threads or _cores()


def run_local(plan: SweepPlan, names: Sequence[str], *, jobs: int, retries: int, watch: Watch) -> dict[str, str]:
    """Run cells of a plan, ``jobs`` at a time, and give the errors of those that failed.

    Args:
        retries: how often a cell that died is run again, from its last checkpoint.

    Raises:
        KeyboardInterrupt: after the running cells have stopped, each with a checkpoint.
    """
    gpus = _gpus(plan)
    environments = {
        # Cells compile side by side; each with a pool of its own over all cores would be too much.
        name: {"OMP_NUM_THREADS": str(threads_of(plan, name)), "TORCHINDUCTOR_COMPILE_THREADS": str(threads_of(plan, name))}
        for name in names
    }
    commands = {name: [sys.executable, "-m", "sinklab.jobs.cell", str(plan.folder), name] for name in names}
    return run_processes(
        commands,
        plan.log,
        plan.outcome,
        jobs=jobs,
        retries=retries,
        watch=watch,
        environments=environments,
        gpus=gpus,
    )


def run_processes(
    commands: Mapping[str, Sequence[str]],
    log: Callable[[str], Path],
    outcome: Callable[[str], str | None],
    *,
    jobs: int,
    retries: int,
    watch: Watch,
    environments: Mapping[str, Mapping[str, str]] | None = None,
    gpus: Sequence[str] = (),
) -> dict[str, str]:
    """Run commands by name, their output in logs; the errors of those that failed.

    One that exits with :data:`REFUSED` has failed; one that dies in another way, or exits well and has no ``outcome``, runs
    again up to ``retries`` times. Its standard input is a pipe that closes when this process is gone, however it goes.
    """
    waiting = collections.deque(commands)
    deaths = dict.fromkeys(commands, 0)
    free = list(range(jobs))
    running: dict[str, _Running] = {}
    errors: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and free:
                name, slot = waiting.popleft(), free.pop(0)
                environment = {**os.environ, **(environments or {}).get(name, {})}
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
                running[name] = _start(commands[name], log(name), slot, environment)
                watch.started(name)
            for name, one in list(running.items()):
                status = one.process.poll()
                if status is None:
                    continue
                del running[name]
                free.append(one.slot)
                one.close()
                end = outcome(name) if status == 0 else None
                if end is not None:
                    watch.ended(name, end)
                    continue
                why = _reason(status, last_line(log(name), one.log_start))
                deaths[name] += 1
                if status == REFUSED or deaths[name] > retries:
                    errors[name] = why if deaths[name] == 1 else f"{why} (attempt {deaths[name]})"
                    watch.ended(name, errors[name], failed=True)
                else:
                    waiting.appendleft(name)
                    watch.again(name, why)
            watch.tick(lambda name: last_line(log(name)))
            time.sleep(0.05)
    except BaseException:
        _stop([one.process for one in running.values()], watch)
        raise
    return errors


@dataclasses.dataclass(frozen=True)
class _Running:
    process: subprocess.Popen
    slot: int
    log_start: int

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


def _start(command: Sequence[str], log: Path, slot: int, environment: Mapping[str, str]) -> _Running:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        before = file.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the driver, which tells its cells
        )
        return _Running(process, slot, before)


def _stop(processes: Sequence[subprocess.Popen], watch: Watch) -> None:
    """End processes with a checkpoint; at once when interrupted again, or when they do not come to it."""
    if not processes:
        return
    watch.note(f"stopping {len(processes)} cells with a checkpoint each; once more to stop at once")
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()  # does nothing to one that has ended
        process.wait()


def _reason(status: int, said: str) -> str:
    """Why a process ended, in a sentence."""
    if status >= 0:
        return said.removeprefix("error: ") or f"ended with status {status} and said nothing"
    name = signal.Signals(-status).name
    hint = ", as a machine does that runs out of memory; fewer --jobs take less" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}" + (f"; it said last: {said}" if said else "")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(plan: SweepPlan) -> list[str]:
    """The GPUs to spread cells over, as ``CUDA_VISIBLE_DEVICES`` names them; none when all cells are for the CPU."""
    if all(chosen_device(cell.config) == "cpu" for cell in plan.cells.values()):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
