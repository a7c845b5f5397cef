"""Every error a user of sinklab can meet, in one tree.

    SinklabError
    ├─ UnknownNameError        a name that no registry knows (did you mean …?)
    ├─ ConfigurationError      an option whose value cannot take effect
    ├─ InputError              a model directory, text or output directory that cannot be used
    ├─ UnsupportedModelError   attention that does not pass through the one attention function
    ├─ ContractError           a plug-in that breaks the contract of its kind
    ├─ MeasurementError        a measurement that failed to prove itself
    │  └─ SessionError         a session used in a way that would record nonsense
    ├─ ResultError             a table or run record that does not follow the schema
    └─ DoesNotApply            a claim that says nothing about a checkpoint; caught and kept as a reason

A message says what failed, where, what was found, what was expected and what to do next. The command line prints it as
one line and exits with status 2.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

ELSEWHERE = {
    "attention_sink_size": "num_sinks", "attention_sink_window_size": "window", "num_sink_tokens": "num_sinks",
    "recent_size": "window", "start_size": "num_sinks", "torch_dtype": "dtype", "use_auth_token": "token",
    "window_length": "window", "window_size": "window",
}  # fmt: skip
"""What transformers, attention_sinks and streaming-llm call an argument, and what it is called here."""


class SinklabError(Exception):
    """Base class of every error that sinklab raises on purpose."""


class UnknownNameError(SinklabError, KeyError):
    """A name that is not in its registry; the message suggests close names."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would put quotation marks round the sentence.
        return str(self.args[0]) if self.args else ""


class ConfigurationError(SinklabError, ValueError):
    """A field whose value is not allowed, alone or together with another field."""


class InputError(SinklabError, ValueError):
    """Something given from outside that cannot be used: a path, a checkpoint, a text."""


class UnsupportedModelError(SinklabError):
    """A model whose attention sinklab cannot see or cannot account for."""


class ContractError(SinklabError):
    """A plug-in that does not do what its kind promises."""


class MeasurementError(SinklabError):
    """A measurement whose own checks failed; its numbers are withheld."""


class SessionError(MeasurementError):
    """A session in a state in which recording would give wrong numbers."""


class ResultError(SinklabError, ValueError):
    """A result file that does not follow the schema or mixes versions of a metric."""


class DoesNotApply(SinklabError):
    """A claim says nothing about a checkpoint; the message is the reason, such as "its positions are learned"."""


@contextlib.contextmanager
def calling(**names: str) -> Iterator[None]:
    """Around a call of what has other names for what the caller was given: errors speak of ``seq_len`` as ``tokens``.

    Args:
        names: a parameter, which messages have in backticks, to what the caller calls it.

    Raises:
        SinklabError: of the block, in the caller's words.
    """
    try:
        yield
    except SinklabError as error:
        error.args = (re.sub(r"`(\w+)`", lambda match: f"`{names.get(match[1], match[1])}`", str(error)),)
        raise


def require_known(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse arguments that a function does not take; one that other libraries have is called by its name here.

    Raises:
        TypeError: as Python's own.
    """
    known = list(known)
    for name in given:
        if name not in known:
            ours = ELSEWHERE.get(name)
            what = f"here that is `{ours}`" if ours in known else f"it takes {', '.join(known)}"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {what}")


def known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The function behind :func:`require_known`."""
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name != "self"]
    shown = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*positional: P.args, **named: P.kwargs) -> R:
        require_known(shown, named, names)
        return function(*positional, **named)

    return call


def first_line(error: BaseException) -> str:
    """What a foreign error says, short enough for one line of a terminal: its first line, and the one behind a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    if said.endswith(":") and len(lines) > 1:
        said = f"{said} {lines[1]}"
    return said[:300]
