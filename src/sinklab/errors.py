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
import re
from collections.abc import Iterator


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
