"""Arguments that are to be a path, a number or a function: anything else is refused by the name of the argument."""

from __future__ import annotations

import operator
import os

from sinklab.errors import ConfigurationError

__all__ = ["require_function", "require_number", "require_path", "require_whole"]


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
