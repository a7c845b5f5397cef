"""Reading files that somebody else may have written: bounded, of the expected kind, and refused in one line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from sinklab.errors import InputError

__all__ = ["LARGEST_JSON", "parse_object", "read_object", "require_plain_file"]

LARGEST_JSON = 64 * 2**20
"""Bytes of a JSON file that are read; the largest legitimate ones (indices of thousands of experts) have a tenth of it."""

DEEPEST_JSON = 64
"""Objects and lists inside each other; copying and comparing what is nested by the thousand overflows the stack."""


def require_plain_file(path: Path) -> None:
    """Refuse what would make a reader wait for ever or read something that is no file.

    Raises:
        FileNotFoundError: nothing there.
        InputError: a directory, a pipe, a socket, a device, a place below a file or in a directory that may not be entered, or
            a symbolic link that leads back to itself.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        file = next((above for above in path.parents if above.is_file()), path.parent)
        raise InputError(f"{file} is a file, and {path.name} is looked for in a directory; give the directory") from error
    except OSError as error:
        to_do = "change its permissions" if isinstance(error, PermissionError) else "put the file itself there"
        raise InputError(f"{path} cannot be opened: {error.strerror}; {to_do}") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise InputError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file; put the file itself there")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: nothing there.
        InputError: it is no regular file, is too large, is not UTF-8 or not JSON, is nested too deep, or holds no object.
    """
    require_plain_file(path)
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise InputError(f"{path} has {size:,} bytes, and no such file has more than {LARGEST_JSON:,}; get the file again")
    return parse_object(path.read_bytes(), str(path))


def parse_object(content: bytes | str, where: str) -> dict[str, Any]:
    """The JSON object in a text.

    Args:
        where: the file, for messages.

    Raises:
        InputError: as for :func:`read_object`.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        value = json.loads(text)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise InputError(f"{where} is damaged: not UTF-8 ({byte}); get the file again") from None
    except RecursionError:
        raise InputError(f"{where} is damaged: nested too deep to be read; get the file again") from None
    except ValueError as error:
        raise InputError(f"{where} is damaged: not valid JSON ({error}); get the file again") from None
    if not isinstance(value, dict):
        raise InputError(f"{where} is damaged: expected a JSON object, got {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(DEEPEST_JSON):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            break
    else:
        raise InputError(f"{where} is damaged: nested more than {DEEPEST_JSON} levels deep; get the file again")
    if "\\u" in text:
        _require_text(value, where)
    return value


def _require_text(value: dict[str, Any], where: str) -> None:
    """Refuse half a surrogate pair, which JSON can write and no file, terminal or page can."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{where} is damaged: it holds half a character (a lone surrogate); get the file again") from None
