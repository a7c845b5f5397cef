"""Output directories: refused early if something is in the way, used by one process at a time, there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from sinklab.errors import InputError, SinklabError

PREFIX, SUFFIX = ".sinklab-", ".partial"
"""Around the names of files that are being written."""


@contextlib.contextmanager
def placed(path: Path) -> Iterator[None]:
    """Around what writes: an error of the operating system names ``path``, whatever library and temporary file it came from."""
    try:
        yield
    except Exception as error:
        number = system_error(error)
        if number is None or isinstance(error, SinklabError):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def system_error(error: Exception) -> int | None:
    """The number of an error of the operating system; libraries in Rust have it in their text alone."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def from_outside(error: BaseException | None) -> bool:
    """Whether the user or the machine has ended the work, by a signal or a full disk: it may go on from what it has kept."""
    if isinstance(error, KeyboardInterrupt):
        return True
    return isinstance(error, Exception) and not isinstance(error, SinklabError) and system_error(error) is not None


def default_out(*parts: str) -> Path:
    """Where a command writes if nobody says where: a folder below that of ``SINKLAB_OUT``, which is the working directory
    unless it is set.
    """
    return Path(os.environ.get("SINKLAB_OUT", "")).expanduser().joinpath(*parts)


def is_partial(path: Path) -> bool:
    """Whether it is, by its name, a file that is being written, or was by a process that was killed."""
    return path.name.startswith(PREFIX) and path.name.endswith(SUFFIX)


def holds_nothing(out: Path) -> bool:
    """Whether there is no directory, or one without a whole file, which a process leaves that is killed at its first one."""
    return not out.exists() or all(
        is_partial(path) or (path.is_dir() and not path.is_symlink() and holds_nothing(path)) for path in out.iterdir()
    )


def require_no_less(folder: Path, kept: Mapping[str, Sequence[object]], asked: Mapping[str, Sequence[object]]) -> None:
    """Refuse to put a result in the place of a larger one, in a folder to which more may be added.

    Args:
        kept: what the result that is there is of, by the name of the option: ``seeds``, ``operations``.
        asked: the same of the new one.

    Raises:
        InputError: something of it is not asked for now.
    """
    lost = {name: [str(entry) for entry in entries if entry not in asked[name]] for name, entries in kept.items()}
    if any(lost.values()):
        named = " and ".join(f"`{name}` {', '.join(entries)}" for name, entries in lost.items() if entries)
        raise InputError(
            f"{folder} holds a result with {named}, which would be lost: ask for them too (more may be added, and what has "
            f"been computed is not done again), or choose another `out`"
        )


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse an output directory that exists, before any work is done."""
    check_place(out)
    if not holds_nothing(out):
        if not overwrite:
            raise InputError(f"output directory {out} exists; choose another with `out`, or replace it with `overwrite`")
        if not (out / "run.json").is_file():
            raise InputError(
                f"output directory {out} holds no run.json, so it is no earlier result and is not replaced; remove it by hand"
            )


def check_place(out: Path) -> None:
    """Refuse a path at which no output directory can be made or replaced, whatever is in it.

    A symbolic link is refused, not followed: the directory is put in place by renaming it, which would put it in the place of
    the link. Links above it are followed.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(partial_folder(out))  # the longest of the names that are needed
    if out.name in ("", "..") or _real(Path.cwd()).is_relative_to(_real(out)):
        raise InputError(
            f"output directory {out} is the working directory or one above it, which no result takes the place of; give the "
            "name of a new directory with `out`"
        )
    if out.is_symlink():
        raise InputError(f"output directory {out} is a symbolic link to {os.readlink(out)}; give that directory with `out`")
    if out.exists() and not out.is_dir():
        raise InputError(f"output {out} exists and is a file; give a directory with `out`")
    check_writable(out, "output directory")


def _real(path: Path) -> Path:
    """Without links; unlike ``resolve`` it takes links that lead to each other."""
    return Path(os.path.realpath(path))


def check_writable(path: Path, what: str, name: str = "out") -> None:
    """Refuse a path in a directory that cannot be written, also where that directory is still to be made.

    A file without a name is made there, since nothing else tells: root may write where a file system takes no files.

    Args:
        what: what the path is.
        name: the parameter that it was given with.
    """
    # Found before the minutes of measuring, not after them.
    parent = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not parent.is_dir():
        raise InputError(f"{what} {path} cannot be made: {parent} is not a directory; choose another with `{name}`")
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise InputError(
            f"{what} {path} cannot be made: nothing can be written in {parent} ({error.strerror}); choose another with `{name}`"
        ) from None


def in_use(out: Path) -> bool:
    """Whether a process holds the lock of a folder at this moment; a lock file that a dead process has left holds nothing.

    The lock is taken for an instant to find out, since the system says in no other way who holds it.
    """
    from filelock import FileLock, Timeout

    place = _real(out)
    path = place.with_name(f".{place.name}.lock")
    if not path.is_file():
        return False
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # no locks there, or no right to try: nobody can say that it is in use
        return False
    lock.release()
    return False


class FolderLock:
    """Keeps other processes out of a folder, from its making until :meth:`release`, or for the length of a ``with`` block.

    The lock is that of the library ``filelock`` on a file beside the folder, ``.NAME.lock``. It belongs to the open file, so it
    ends with the process, however that ends. It holds between machines that share a file system if that supports locks. A path
    and a link to it share a lock.

    Args:
        out: the folder, which need not exist. Folders above it that do not exist are made, and removed if they stay empty.
        patience: seconds to wait for another process; infinite for as long as it takes.

    Raises:
        InputError: another process holds it, nothing can be written beside the folder, or the file system has no locks.
    """

    def __init__(self, out: Path, *, patience: float = 0.0) -> None:
        from filelock import FileLock  # a tenth of a second, which commands that write nothing do not need

        self.out, place = out, _real(out)
        # To filelock, a directory that takes no files is a lock that somebody holds: it would be waited for.
        check_writable(place, "output directory")
        self.path = place.with_name(f".{place.name}.lock")
        self._made = [parent for parent in self.path.parents if not parent.exists()]
        # Without flock, filelock would go over to a file that outlives a killed process.
        self._lock = FileLock(self.path, thread_local=False, fallback_to_soft=False)
        self._acquire(patience)
        with contextlib.suppress(OSError):  # where locks are mandatory, nobody can read it either
            self.path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def _acquire(self, patience: float) -> None:
        from filelock import Timeout

        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=-1 if patience == float("inf") else patience)
                return
            except FileNotFoundError:
                continue  # another process has just removed the folder that it had made
            except Timeout:
                holder = self.path.read_text(encoding="utf-8", errors="replace").strip()
                raise InputError(
                    f"output directory {self.out} is in use by {holder}; wait for it, end it, or choose another with `out`"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                raise InputError(
                    f"output directory {self.out} is on a file system without locks ({error.strerror}), so another process "
                    "could write there at the same time; choose another with `out`"
                ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others use the folder; the lock file goes, and folders above it that were made for it and stayed empty."""
        with contextlib.suppress(OSError):  # where an open file cannot be removed, filelock removes it
            self.path.unlink()  # while the lock is held: who opened it before sees that it has no name, and opens anew
        self._lock.release()
        for parent in self._made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def partial_folder(out: Path) -> Path:
    """Where a result lies until it is put in place: beside it, and on the same file system. Only who has the lock uses it."""
    return out.absolute().parent / f".{out.absolute().name}.partial"


def put_in_place(work: Path, out: Path) -> None:
    """Let the folder ``work``, in :func:`partial_folder` of ``out``, take the place of ``out``; what was there is removed."""
    replaced = work.parent / "replaced"
    if out.exists():
        os.replace(out, replaced)
    os.replace(work, out)
    shutil.rmtree(replaced, ignore_errors=True)


def set_aside(out: Path) -> None:
    """Move a folder out of the way of a run that is to replace it, until :func:`clear` puts it back or removes it."""
    if out.exists():
        work = partial_folder(out)
        work.mkdir(exist_ok=True)
        os.replace(out, work / "replaced")


def clear(out: Path) -> None:
    """Remove what a run that did not end well has left beside ``out``, except for its store; put back what it moved aside."""
    work = partial_folder(out)
    if (work / "replaced").is_dir() and not out.exists():
        os.replace(work / "replaced", out)
    for name in ("replaced", "result"):
        shutil.rmtree(work / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        work.rmdir()
