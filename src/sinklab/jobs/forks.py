"""Processes that begin with their imports done: one interpreter imports a module, and forks for every command.

Importing torch and transformers takes a core six seconds, a third of what a tiny training takes. A fork of an interpreter that
has imported them and computed nothing starts in milliseconds, and is otherwise as good as a new one: a process of its own that
may die alone, whose memory is its own as soon as it writes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

__all__ = ["Forked", "Forks", "can_fork"]


@functools.cache
def can_fork() -> bool:
    """Whether this system has what it takes: safe forks after imports, and handles of processes; so Linux from 5.3 on."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class Forks:
    """The interpreters that fork, one for each module and environment, begun when they are first asked for."""

    def __init__(self) -> None:
        self._parents: dict[tuple[object, ...], _Parent] = {}
        self._numbers = 0

    def start(self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Forked:
        """A process that calls ``main(arguments)`` of a module and adds what it says to a log; its own session.

        Its standard input closes when the interpreter behind it is gone, which goes with this process.
        """
        key = (module, tuple(sorted(environment.items())))
        parent = self._parents.get(key)
        if parent is None or parent.gone():
            parent = self._parents[key] = _Parent(module, log, environment)
        self._numbers += 1
        parent.tell(("fork", self._numbers, list(arguments), str(log)))
        return Forked(parent, self._numbers)

    def close(self) -> None:
        """Let the interpreters go, and with them what they have forked."""
        for parent in self._parents.values():
            parent.close()
        self._parents.clear()


class Forked:
    """A forked process, with those methods of ``subprocess.Popen`` by which a process is watched and ended."""

    def __init__(self, parent: _Parent, number: int) -> None:
        self._parent, self._number = parent, number

    def poll(self) -> int | None:
        """The exit status; ``None`` while it runs."""
        return self._parent.status(self._number)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once there is one.

        Raises:
            subprocess.TimeoutExpired: not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.02)
        return status

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._parent.tell(("signal", self._number, signal.SIGTERM))

    def kill(self) -> None:
        """Send SIGKILL."""
        self._parent.tell(("signal", self._number, signal.SIGKILL))


class _Parent:
    """An interpreter that forks, as the process sees it that has begun it."""

    def __init__(self, module: str, log: Path, environment: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        with log.open("ab") as file, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sinklab.jobs.forks", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._statuses: dict[int, int] = {}

    def tell(self, message: tuple[object, ...]) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the status of the process will say
            self._connection.send(message)

    def gone(self) -> bool:
        return self._process.poll() is not None

    def status(self, number: int) -> int | None:
        gone = self._process.poll()  # before what it has said is read: nothing comes after it
        with contextlib.suppress(EOFError, OSError):
            while self._connection.poll():
                ended, status = self._connection.recv()
                self._statuses[ended] = status
        return self._statuses.get(number, gone)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()  # it has nothing to finish, and may still be importing
        self._process.wait()


def _serve_forks(module: str, connection: Connection) -> Callable[[], None] | None:
    """Fork when asked to and say how it ended, until the other side is gone; in a fork, what it is to do."""
    main = importlib.import_module(module).main
    gc.freeze()  # what is imported is not garbage; looking for it would copy its pages into every fork
    reader, writer = os.pipe()  # nothing is ever written; it closes with this process
    children: dict[int, tuple[int, int]] = {}  # handle of the process to its number and its identity
    while True:
        for ready in wait([connection, *children]):
            if isinstance(ready, int):
                number, process = children.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with contextlib.suppress(OSError):
                    connection.send((number, status))
                continue
            try:
                what, number, *content = connection.recv()
            except (EOFError, OSError):
                return None
            if what == "signal":
                for process in (process for of_child, process in children.values() if of_child == number):
                    os.kill(process, content[0])
                continue
            arguments, log = content
            process = os.fork()
            if process:
                children[os.pidfd_open(process)] = number, process
                continue
            connection.close()
            for descriptor in (writer, *children):
                os.close(descriptor)
            _settle(log, reader)
            sys.argv = [module, *arguments]
            return functools.partial(main, arguments)


def _settle(log: str, standard_input: int) -> None:
    """Make a fork a process of its own: its session, what it reads and where it writes."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for source, target in ((standard_input, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(standard_input)
    os.close(output)


if __name__ == "__main__":
    # Python 3.12 warns of threads at a fork, and imports leave idle ones; none of them holds a lock, as nothing was computed.
    warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
    work = _serve_forks(sys.argv[1], Connection(int(sys.argv[2])))
    if work is not None:
        work()
