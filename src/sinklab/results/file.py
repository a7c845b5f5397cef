"""Files: read if they are what is expected; written whole or not at all, where nothing but a file is replaced."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sinklab.errors import ConfigurationError, InputError
from sinklab.results.folder import PREFIX, SUFFIX, check_writable, placed


def require_plain_file(path: Path) -> None:
    """Refuse what would make a reader wait for ever or read something that is no file; ``FileNotFoundError`` for nothing."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise InputError(f"{path.parent} is a file, and {path.name} is looked for in a directory; give the directory") from None
    except OSError as error:
        to_do = "change its permissions" if isinstance(error, PermissionError) else "put the file itself there"
        raise InputError(f"{path} cannot be opened: {error.strerror}; {to_do}") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise InputError(f"{path} is {kind}; put the file itself there")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ``InputError`` for what is none, ``FileNotFoundError`` for nothing."""
    require_plain_file(path)
    return parse_object(path.read_bytes(), str(path))


def parse_object(content: bytes | str, where: str) -> dict[str, Any]:
    """The JSON object in a text; ``where`` names the file in messages."""
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        value = json.loads(text)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise InputError(f"{where} is damaged: not UTF-8 ({byte}); get the file again") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is damaged: not valid JSON ({error}); get the file again") from None
    if not isinstance(value, dict):
        raise InputError(f"{where} is damaged: expected a JSON object, got {type(value).__name__}")
    return value


def check_file(path: Path | None, overwrite: bool, name: str = "out") -> None:
    """Refuse an output file that cannot be written, before any work is done.

    What is no regular file is refused whatever ``overwrite`` says, and so is a symbolic link: a file is put in place by
    renaming it, which would put it in the place of the link. Links above the file are followed.

    Args:
        path: the file; ``None`` if none is to be written.
        name: the parameter that it was given with.
    """
    if path is None:
        if overwrite:
            raise ConfigurationError(f"`overwrite` is about an output file; give one with `{name}`")
        return
    _require_regular(path)
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"output file {path} exists; choose another with `{name}`, or replace it with `overwrite`")
    check_writable(path, "output file", name)


def write_file(path: Path, write: Callable[[Path], object], *, overwrite: bool, name: str = "out") -> None:
    """Let ``write`` write a file that a user has named; it is there whole, and on the disk, or not at all.

    What appears at its place meanwhile is not replaced without ``overwrite``: what was written is kept under another name.

    Args:
        write: writes the file that it is given, whose name has another suffix.
        overwrite, name: as :func:`check_file`.
    """
    check_file(path, overwrite, name)
    with _temporary(path) as temporary:
        write(temporary)
        flush(temporary)
        try:
            check_file(path, overwrite, name)
        except InputError as error:
            rescued = path.with_name(f"{path.stem}-{secrets.token_hex(3)}{path.suffix}")
            temporary.replace(rescued)
            raise InputError(f"{error}. What was to be written there is in {rescued}") from None
        temporary.replace(path)
        flush(path.parent)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` write a file of a folder of ours, so that it is there whole or not at all; a file there is replaced."""
    _require_regular(path)
    with _temporary(path) as temporary:
        write(temporary)
        temporary.replace(path)


def clear_partial(folder: Path) -> None:
    """Remove what processes that were killed have left half written below a folder; what is being written is left alone."""
    for path in folder.rglob(f"{PREFIX}*{SUFFIX}"):
        _remove_if_dead(path)


def _require_regular(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # whether it can be made is another question
    if stat.S_ISLNK(mode):
        raise InputError(f"output file {path} is a symbolic link to {os.readlink(path)}; give the path of the file itself")
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise InputError(f"output file {path} is {kind}, which is not replaced; give the path of a file")


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A file beside ``path``, on the same file system, that is gone if it was not renamed."""
    with placed(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left_over in path.parent.glob(f"{PREFIX}*{SUFFIX}"):
            _remove_if_dead(left_over)
        temporary, handle = _locked(path.parent)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
            os.close(handle)


def _locked(folder: Path) -> tuple[Path, int]:
    """A new file, and an open handle of it with a lock, which ends with the process and says until then that it is in use."""
    while True:
        # No part of the name of the file to be, which may be as long as a name can be; and open() gives the permissions of any
        # other new file.
        path = folder / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        with contextlib.suppress(OSError):  # no locks here: nobody takes it for dead either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            return path, handle
        os.close(handle)  # somebody took it for dead before it was locked


def _remove_if_dead(path: Path) -> None:
    """Remove a file that is being written by nobody."""
    with contextlib.suppress(OSError):  # in use, gone meanwhile, not ours, or on a file system without locks
        handle = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(handle)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before anything says that it is there."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no directories
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
