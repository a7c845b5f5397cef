"""Refusals by the name of an argument: what is no path, number or function, and sizes that no memory can hold."""

from __future__ import annotations

import contextlib
import operator
import os
import resource
from pathlib import Path

from sinklab.errors import ConfigurationError

__all__ = [
    "BYTES_OF_NUMBER",
    "in_units",
    "machine_memory",
    "require_function",
    "require_memory",
    "require_number",
    "require_path",
    "require_whole",
]


def require_function(name: str, value: object, of: str) -> None:
    """Refuse what is neither a function nor ``None``, such as a truth value in place of what follows the progress of a run.

    Args:
        of: what it is called with, in words.

    Raises:
        ConfigurationError: it is neither.
    """
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name} is {_shown(value, 'of ')}; expected a function of {of}")


def require_path(name: str, value: object) -> None:
    """Refuse what is no path, as a text or an object of ``pathlib``.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"{name} is {_shown(value, 'of ')}; expected a path")


def require_number(name: str, value: object) -> None:
    """Refuse what is no number, such as a text with one.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor of several
        raise ConfigurationError(f"{name} is {_shown(value, 'of ')}; expected a number") from None


def require_whole(name: str, value: object, least: int, why: str = "") -> None:
    """Refuse a setting ``name`` below ``least``, or that is no whole number.

    Raises:
        ConfigurationError: it is.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, got {_shown(value)}") from None
    if number < least:
        raise ConfigurationError(f"{name} {number} must be {least} or more{why}")


def _shown(value: object, before: str = "") -> str:
    """A value in a message; of what may have pages, such as a model, its class, with a word before it."""
    return repr(value) if isinstance(value, (str, int, float, type(None))) else f"{before}{type(value).__name__}"


BYTES_OF_NUMBER = 36
"""Of an integer in a list: an object of Python, and the pointer to it."""

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def require_memory(needed: int, what: str) -> None:
    """Refuse what needs more memory than the machine has in all, whatever else is running.

    A lower bound will do: what lies between it and what is free at the moment is left to the allocator, whose error the
    command line prints as one line too.

    Args:
        needed: bytes on the CPU, an exact integer however large.
        what: what asks for them, with its value: ``"`keys` 4294967296"``.

    Raises:
        ConfigurationError: the machine has less; the message has both numbers.
    """
    there = machine_memory()
    if needed > there:
        raise ConfigurationError(
            f"{what}: at least {in_units(needed)} of memory would be needed, and there is {in_units(there)} in all; ask for "
            "less"
        )


def machine_memory() -> int:
    """Bytes that this process can have at most: the machine's memory, or a limit on the container or the process below it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


def in_units(size: int) -> str:
    """A number of bytes in the largest unit that leaves a whole number, rounded down: ``12 GB``."""
    for unit in _UNITS:  # noqa: B007
        if size < 1000:
            break
        size //= 1000
    return f"{size:,} {unit}" if size < 10**6 else f"more than {10**6:,} {unit}"
