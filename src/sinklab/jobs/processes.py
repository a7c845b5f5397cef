"""Processes of this machine: so many at a time, each apart from the others, run again when they die."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sinklab.errors import SinklabError
from sinklab.jobs.forks import Forked, Forks, can_fork
from sinklab.jobs.watch import Watch

__all__ = ["REFUSED", "last_line", "lasts", "run_processes", "serve"]

REFUSED = 2
"""Exit status of a process that ended with an error that it would end with again."""

LASTING = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(SinklabError, SyntaxError, TypeError, ValueError),
)
"""Errors that say that the program or what it was given is wrong."""

GRACE = 120.0
"""Seconds that a cell has, when the sweep is interrupted, for the step at hand and a checkpoint."""


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
    forked: bool = False,
) -> dict[str, str]:
    """Run commands by name, their output in logs; the errors of those that failed.

    One that exits with :data:`REFUSED` has failed; one that dies in another way, or exits well and has no ``outcome``, runs
    again up to ``retries`` times. Its standard input is a pipe that closes when this process is gone, however it goes.

    Args:
        commands: by name, each an interpreter and what it is given.
        forked: all are ``python -m MODULE …``, none needs a GPU, and MODULE has a ``main(arguments)``. Where the system can,
            they are forks of an interpreter that has imported the module (:mod:`sinklab.jobs.forks`).
    """
    waiting = collections.deque(commands)
    deaths = dict.fromkeys(commands, 0)
    free = list(range(min(jobs, len(commands))))
    running: dict[str, _Running] = {}
    errors: dict[str, str] = {}
    forks = Forks() if forked and can_fork() else None
    try:
        while waiting or running:
            while waiting and free:
                name, slot = waiting.popleft(), free.pop(0)
                environment = {**os.environ, **(environments or {}).get(name, {})}
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
                running[name] = _start(commands[name], log(name), slot, environment, forks)
                watch.started(name)
            for name, job in list(running.items()):
                status = job.process.poll()
                if status is None:
                    continue
                del running[name]
                free.append(job.slot)
                job.close()
                end = outcome(name) if status == 0 else None
                if end is not None:
                    watch.ended(name, end)
                    continue
                why = _reason(status, last_line(log(name), job.log_start))
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
        _stop([job.process for job in running.values()], watch)
        raise
    finally:
        if forks is not None:
            forks.close()
    return errors


def serve(work: Callable[[], object], *, with_driver: bool = True) -> None:
    """The whole of a process that :func:`run_processes` starts: its work, an error of ours in one line, and no life after it.

    Errors that another attempt would end with too exit with :data:`REFUSED`.

    Args:
        with_driver: stop when the process that started this one is gone.
    """
    if with_driver:
        threading.Thread(target=stop_with_driver, daemon=True).start()
    try:
        work()
    except SinklabError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(REFUSED)
    except Exception as error:
        if not lasts(error):
            raise
        traceback.print_exc()
        sys.exit(REFUSED)


def lasts(error: Exception) -> bool:
    """Whether another attempt would end with the same error.

    Memory, disks, networks, devices and killed workers may be better next time. torch reports the last two, and memory of the
    CPU, as a plain ``RuntimeError``; libraries of networks derive some of theirs from ``ValueError`` as well as ``OSError``.
    """
    return isinstance(error, LASTING) and not isinstance(error, OSError)


def stop_with_driver(descriptor: int = 0) -> None:
    """Stop when the driver is gone: it holds the other end of our standard input and never writes."""
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGTERM)  # which training answers with a checkpoint


def last_line(log: Path, start: int = 0) -> str:
    """The last line with something in it that was written to a log after byte ``start``; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclasses.dataclass(frozen=True)
class _Running:
    process: subprocess.Popen | Forked
    slot: int
    log_start: int

    def close(self) -> None:
        if isinstance(self.process, subprocess.Popen) and self.process.stdin is not None:
            self.process.stdin.close()


def _start(command: Sequence[str], log: Path, slot: int, environment: Mapping[str, str], forks: Forks | None) -> _Running:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        before = file.tell()
        if forks is not None:
            _interpreter, _option, module, *arguments = command
            return _Running(forks.start(module, arguments, log, environment), slot, before)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the driver, which tells its cells
        )
        return _Running(process, slot, before)


def _stop(processes: Sequence[subprocess.Popen | Forked], watch: Watch) -> None:
    """End processes with a checkpoint; at once when interrupted again, or when they do not come to it."""
    if not processes:
        return
    watch.note(f"stopping {len(processes)} processes, trainings with a checkpoint; once more to stop at once")
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
    hint = ", as a machine does that runs out of memory; fewer `jobs` take less" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}" + (f"; it said last: {said}" if said else "")
