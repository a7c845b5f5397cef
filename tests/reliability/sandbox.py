"""A sandbox for command lines: a forked child for each, limits, and a file system of which only one folder can be written.

Nothing here touches the machine outside a folder of its own. With the right to (root, or user namespaces), everything but
that folder is mounted read-only and there is no network; :func:`enclose` says whether it could.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = ["LAUNCHED", "Ended", "Limits", "enclose", "ran"]

LAUNCHED = 77
"""Status of a line that came as far as starting another Python: all its checks are behind it, and it is stopped there."""

_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one line.

    Attributes:
        seconds: of the call; after them it is interrupted, and two seconds later killed.
        memory: bytes of address space besides what the fork server itself has.
    """

    seconds: float = 8.0
    memory: int = 3 << 30


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a line ended.

    Attributes:
        status: exit status; negative for a signal.
        late: it was interrupted for its time.
        network: it tried to reach a host.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    late: bool
    network: bool


def enclose(scratch: Path) -> str:
    """Make everything but ``scratch`` read-only for this process and its children, without a network.

    Returns:
        Nothing, or why it could not be done.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    flags = _NEW_MOUNTS | _NEW_NETWORK | (0 if user == 0 else _NEW_USER)
    if libc.unshare(flags) != 0:
        return f"no namespace: {os.strerror(ctypes.get_errno())}"
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")

    def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> bool:
        encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
        return libc.mount(encoded[0], encoded[1], encoded[2], flags, encoded[3]) == 0

    if not mount(None, "/", None, _PRIVATE | _RECURSIVE) or not mount("scratch", str(scratch), "tmpfs", 0, "size=1g"):
        return f"no mounts: {os.strerror(ctypes.get_errno())}"
    points = [
        text.split()[4].encode().decode("unicode_escape") for text in Path("/proc/self/mountinfo").read_text().splitlines()
    ]
    for point in points:
        if point != str(scratch):
            mount(None, point, None, _REMOUNT | _BIND | _READ_ONLY)
    writable = [place for place in map(Path, ("/", "/tmp", "/var/tmp", Path.home(), Path.cwd())) if _can_write(place)]
    return f"{writable[0]} can be written" if writable else ""


def _can_write(folder: Path) -> bool:
    probe = folder / f".sinklab-fuzz-{os.getpid()}"
    try:
        probe.touch()
    except OSError:
        return False
    probe.unlink()
    return True


def ran(call: Callable[[], None], work: Path, outputs: Path, limits: Limits) -> Ended:
    """Call in a forked child with ``work`` as its directory; what it prints goes to files in ``outputs``."""
    outputs.mkdir(exist_ok=True)
    files = [outputs / name for name in ("stdout", "stderr", "network", "begun")]
    for path in files[2:]:
        path.unlink(missing_ok=True)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _inside(call, work, files, limits)
    late, status = False, None
    patience = [(limits.seconds, signal.SIGINT), (2.0, signal.SIGKILL)]
    until = math.inf  # the time is that of the call: a fork alone may take as long where many libraries are loaded
    while status is None:
        done, waited = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(waited)
        elif math.isinf(until):
            until = time.monotonic() + limits.seconds if files[3].exists() else math.inf
            time.sleep(0.002)
        elif patience and time.monotonic() > until:
            late, (_, number) = True, patience.pop(0)
            os.kill(child, number)
            until = time.monotonic() + (patience[0][0] if patience else 0)
        else:
            time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):  # what it has started itself
        os.killpg(child, signal.SIGKILL)
    said = [path.read_text(encoding="utf-8", errors="backslashreplace") for path in files[:2]]
    return Ended(status, said[0], said[1], time.monotonic() - started, late, files[2].exists())


def _inside(call: Callable[[], None], work: Path, files: list[Path], limits: Limits) -> None:
    """The child: streams, directory and limits are set, the call is made, and it leaves as Python would."""
    status = 1
    try:
        os.setsid()
        for number, path in ((1, files[0]), (2, files[1])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # As the interpreter sets them up: what cannot be encoded is escaped on stderr and an error on stdout.
        sys.stdin, sys.stdout = open(0), open(1, "w", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        os.chdir(work)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + limits.memory,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.addaudithook(lambda event, arguments: _watch(event, arguments, files[2]))
        try:
            files[3].touch()
            call()
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(status & 255)


def _watch(event: str, arguments: tuple[object, ...], network: Path) -> None:
    if event == "subprocess.Popen" and os.fspath(arguments[0] or "") == sys.executable:  # type: ignore[call-overload]
        os._exit(LAUNCHED)
    if event == "socket.getaddrinfo" or (event == "socket.connect" and getattr(arguments[0], "family", 0) != socket.AF_UNIX):
        network.touch()
