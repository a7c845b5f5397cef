"""Cells of a sweep as processes of this machine: how many at a time, with how many threads, on which GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from sinklab.jobs.cell import SweepPlan
from sinklab.jobs.processes import run_processes
from sinklab.jobs.watch import Watch
from sinklab.training.process import chosen_device

__all__ = ["default_jobs", "run_local"]


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
