"""Runs the command line inside a test: what it prints on both streams, and with which status it leaves."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Invoked:
    """What one line did."""

    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


@functools.cache
def parameters() -> frozenset[str]:
    """What the functions behind all commands call their options."""
    from sinklab.cli.commands import find_commands
    from sinklab.cli.derive import option_names

    return frozenset(name for command in find_commands().values() for name in option_names(command.load()))


def not_options(said: str) -> list[str]:
    """Names in backticks that are options of other commands: the command that said this has none of that name."""
    named = re.findall(r"`(\w+)`", said)
    return [name for name in named if name in parameters()] if named else []


@dataclasses.dataclass(frozen=True)
class CliRunner:
    """Calls ``app`` with other streams; what is no :class:`SystemExit` is a bug, and status 1, as in a process.

    Advice to use an option that the command does not have is one, too.
    """

    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def invoke(self, app: Callable[..., Any], arguments: Sequence[str], input: str | bytes | None = None) -> Invoked:
        given = io.TextIOWrapper(io.BytesIO(input.encode() if isinstance(input, str) else input or b""), encoding="utf-8")
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        status, raised = 0, None
        with mock.patch.dict(os.environ, self.env), mock.patch("sys.stdin", given), redirect_stdout(out), redirect_stderr(err):
            try:
                app(list(arguments))
            except SystemExit as leaving:
                raised, status = leaving, leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            except Exception as bug:
                raised, status = bug, 1
        printed, complained = (stream.buffer.getvalue().decode() for stream in (out, err))
        assert not not_options(complained), complained
        return Invoked(status, printed, complained, raised)
