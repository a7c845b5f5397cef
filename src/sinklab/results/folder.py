"""Output directories: refused early if something is in the way, used by one process at a time, there whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path

from sinklab.errors import InputError

__all__ = ["FolderLock", "check_free", "clear", "partial_folder", "put_in_place"]


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse an output directory that exists, before any work is done.

    Raises:
        InputError: it exists and ``overwrite`` is off, or it cannot be made here.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"output {out} exists and is a file; give a directory with `out`")
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise InputError(f"output directory {out} exists; choose another with `out`, or replace it with `overwrite`")
        if not (out / "run.json").is_file():
            raise InputError(
                f"output directory {out} holds no run.json, so it is no earlier result and is not replaced; remove it by hand"
            )
    # Found before the minutes of measuring, not after them.
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(
            f"output directory {out} cannot be made: {parent} is not a directory that you may write; choose another with `out`"
        )


class FolderLock:
    """Keeps other processes out of a folder, from its making until :meth:`release`.

    The lock is on a file beside the folder, ``.NAME.lock``, and belongs to the open file: it ends with the process, however
    that ends, and a file that a dead process has left is no obstacle. It holds between machines that share a file system if
    that supports ``flock``.

    Args:
        out: the folder, which need not exist. Folders above it that do not exist are made, and removed if they stay empty.

    Raises:
        InputError: another process holds it, or the file system has no locks.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out.absolute().parent / f".{out.absolute().name}.lock"
        self._made = [parent for parent in self.path.parents if not parent.exists()]
        self._handle = self._acquired()

    def _acquired(self) -> int:
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # another process has just removed the folder that it had made
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(handle, 200).decode(errors="replace").strip()
                os.close(handle)
                raise InputError(
                    f"output directory {self.out} is in use by {holder or 'another process'}; wait for it, end it, or choose "
                    "another with `out`"
                ) from None
            except OSError as error:
                os.close(handle)
                raise InputError(
                    f"output directory {self.out} is on a file system without locks ({error.strerror}), so another process "
                    "could write there at the same time; choose another with `out`"
                ) from error
            if self._is(handle):
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return handle
            os.close(handle)  # its holder removed it between our opening and locking it

    def _is(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False

    @property
    def held(self) -> bool:
        """Whether the lock is still ours: somebody may have removed its file."""
        return self._is(self._handle)

    def require(self) -> None:
        """Check that the lock is still ours, before something is put in place.

        Raises:
            InputError: it is not, so that another process may be at work.
        """
        if not self.held:
            raise InputError(f"{self.path} was removed while this process was using {self.out}; nothing is written there")

    def release(self) -> None:
        """Let others use the folder; the lock file goes, and folders above it that were made for it and stayed empty."""
        if self.held:
            self.path.unlink()  # while the lock is held: who opens it later makes a new one
        os.close(self._handle)
        for parent in self._made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def partial_folder(out: Path) -> Path:
    """Where a result lies until it is put in place: beside it, and on the same file system. Only who has the lock uses it."""
    return out.absolute().parent / f".{out.absolute().name}.partial"


def put_in_place(work: Path, out: Path) -> None:
    """Let the folder ``work`` take the place of ``out``; what was there is removed.

    Args:
        work: in :func:`partial_folder` of ``out``.
    """
    replaced = work.parent / "replaced"
    if out.exists():
        os.replace(out, replaced)
    os.replace(work, out)
    shutil.rmtree(replaced, ignore_errors=True)


def clear(out: Path) -> None:
    """Remove what a run that did not end well has left beside ``out``, except for its store.

    An earlier result that was moved aside by a process that was killed before it had put its own in place is put back.
    """
    work = partial_folder(out)
    if (work / "replaced").is_dir() and not out.exists():
        os.replace(work / "replaced", out)
    for name in ("replaced", "result"):
        shutil.rmtree(work / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        work.rmdir()
