"""Processes of this machine: so many at a time, each apart from the others, run again when they die; and what shows them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from pathlib import Path
from typing import TypeAlias

import torch

from sinklab.errors import SinklabError
from sinklab.results.progress import Progress, silent


class Watch:
    """Counts cells that have ended, and says what becomes of each in a line.

    Args:
        cells: of the whole sweep.
        earlier: of these, ended before.
        progress: called with how many have ended.
        note: shows a sentence.
    """

    def __init__(
        self, cells: int, earlier: int, progress: Progress = silent, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.cells, self.done, self.progress, self.note = cells, earlier, progress, note
        progress("cells", earlier, cells)

    def again(self, name: str, why: str) -> None:
        """A cell died and will be run again."""
        self.note(f"{name}: {why}; it goes on from its last checkpoint")

    def ended(self, name: str, outcome: str) -> None:
        """A cell has come to its end, or has failed."""
        self.done += 1
        self.note(f"[{self.done}/{self.cells}] {name}: {outcome}")
        self.progress("cells", self.done, self.cells)

    def tick(self) -> None:
        """Called a few times a second."""


REFUSED = 2
"""Exit status of a process that ended with an error that it would end with again."""

LASTING = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(SinklabError, SyntaxError, TypeError, ValueError),
)
"""Errors that say that the program or what it was given is wrong."""

GRACE = 120.0
"""Seconds that a cell has, when the sweep is interrupted, for the step at hand and a checkpoint."""

Process: TypeAlias = ForkServerProcess | SpawnProcess


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
    again up to ``retries`` times. All stop when this process is gone, however it goes.

    Args:
        commands: by name, each a module with a ``main(arguments)``, and the arguments.
        environments: by name, what is added to the environment of this process.
        gpus: as ``CUDA_VISIBLE_DEVICES`` names them; the processes are spread over them.
    """
    # Imports leave a device alone, and a fork behind them does too; a system without forks starts an interpreter each time.
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(sorted({__name__, *(command[0] for command in commands.values())}))
    waiting = collections.deque(commands)
    deaths = dict.fromkeys(commands, 0)
    free = list(range(min(jobs, len(commands))))
    running: dict[str, _Running] = {}
    errors: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and free:
                name, slot = waiting.popleft(), free.pop(0)
                environment = dict((environments or {}).get(name, {}))
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
                log(name).parent.mkdir(parents=True, exist_ok=True)
                begin = log(name).stat().st_size if log(name).exists() else 0
                process = context.Process(target=_child, args=(*commands[name][:1], commands[name][1:], log(name), environment))
                with _without_main():
                    process.start()
                running[name] = _Running(process, slot, begin)
            for name, job in list(running.items()):
                status = job.process.exitcode
                if status is None:
                    continue
                del running[name]
                free.append(job.slot)
                end = outcome(name) if status == 0 else None
                if end is not None:
                    watch.ended(name, end)
                    continue
                why = _reason(status, last_line(log(name), job.log_start))
                deaths[name] += 1
                if status == REFUSED or deaths[name] > retries:
                    errors[name] = why if deaths[name] == 1 else f"{why} (attempt {deaths[name]})"
                    watch.ended(name, errors[name])
                else:
                    waiting.appendleft(name)
                    watch.again(name, why)
            watch.tick()
            time.sleep(0.05)
    except BaseException:
        _stop([job.process for job in running.values()], watch)
        raise
    return errors


@dataclasses.dataclass(frozen=True)
class _Running:
    process: Process
    slot: int
    log_start: int


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the script that runs here, which a new process would run again to have what is defined in it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _child(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """What a process does: its own session, as Ctrl-C is for the driver, which tells its cells; its output goes to a log."""
    with contextlib.suppress(AttributeError, PermissionError):
        os.setsid()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if "OMP_NUM_THREADS" in environment and "torch" in sys.modules:  # which reads it when it is imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [module, *arguments]
    threading.Thread(target=_stop_with_driver, daemon=True).start()
    importlib.import_module(module).main(arguments)


def _stop_with_driver() -> None:
    """Stop when the driver is gone."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    multiprocessing.connection.wait([driver.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)  # which training answers with a checkpoint


def serve(work: Callable[[], object]) -> None:
    """The work of a process that :func:`run_processes` starts: an error of ours in one line.

    Errors that another attempt would end with too exit with :data:`REFUSED`.
    """
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


def last_line(log: Path, start: int = 0) -> str:
    """The last line with something in it that was written to a log after byte ``start``; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _stop(processes: Sequence[Process], watch: Watch) -> None:
    """End processes with a checkpoint; at once when interrupted again, or when they do not come to it."""
    if not processes:
        return
    watch.note(f"stopping {len(processes)} processes, trainings with a checkpoint; once more to stop at once")
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(KeyboardInterrupt):
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()  # does nothing to one that has ended
        process.join()


def _reason(status: int, said: str) -> str:
    """Why a process ended, in a sentence."""
    if status >= 0:
        return said.removeprefix("error: ") or f"ended with status {status} and said nothing"
    name = signal.Signals(-status).name
    hint = ", as a machine does that runs out of memory; fewer `jobs` take less" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}" + (f"; it said last: {said}" if said else "")
