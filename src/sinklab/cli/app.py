"""The command line: finds the command, derives its options from the function, runs it, and turns errors into one line."""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

import cyclopts

from sinklab.cli.commands import find_commands
from sinklab.cli.derive import derive, option_names
from sinklab.cli.guard import (
    INTERRUPTED,
    TERMINATED,
    USER_ERROR,
    Terminated,
    explain,
    is_follower,
    on_the_line,
    terminable,
    warnings_in_a_line,
)
from sinklab.errors import SinklabError
from sinklab.results.environment import installed
from sinklab.results.terminal import Printer

QUIET = ("--quiet", "-q")
INSTALL = "--install-completion"

START = """Start here: sinklab audit embedded:softmax needs no download and takes under a minute.

Outputs go to the working directory, or to SINKLAB_OUT if that is set. NO_COLOR and FORCE_COLOR are respected.
With --traceback anywhere on the line, or SINKLAB_TRACEBACK=1, an error shows its traceback."""


def make_app(arguments: Sequence[str]) -> tuple[cyclopts.App, dict[str, str]]:
    """The command line for these arguments: the command that they name is whole, the others have a name and a summary.

    Returns:
        The application, and how the parameters of the command are called on the line.
    """
    top = cyclopts.App(
        name="sinklab",
        help="Find attention sinks: which position, which token, which heads, and what they do.",
        help_epilogue=START,
        help_format="plaintext",
        console=Printer(),
        version=versions,
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    installs = INSTALL in arguments[:1]
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    names: dict[str, str] = {}
    for name, command in find_commands().items():
        if name == chosen or installs:
            function = command.load()
            names = option_names(function)
            top.command(derive(function, name))
        else:
            top.command(cyclopts.App(name=name, help=command.summary if chosen is None else ""))
    if chosen is None or installs:
        top.register_install_completion_command(INSTALL, help="Complete commands and options at TAB: bash, zsh or fish.")
    return top, names


def versions() -> str:
    """What ``--version`` prints: sinklab, what its numbers depend on, and the platform; torch is not imported for it."""
    libraries = installed(("torch", "transformers"))
    return "\n".join([*(f"{name} {version}" for name, version in libraries.items()), f"platform {platform.platform()}"])


def app(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a line and leave with its status: 0, 1 where parts failed, 2 for what the user can help, 130 after Ctrl-C, 143
    after SIGTERM.

    What the user can do something about is one line, ``error: …``. Anything else that goes wrong is a bug of ours and is shown
    whole. ``--traceback`` anywhere on the line, or ``SINKLAB_TRACEBACK=1``, shows the rest of a user's error too.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    show_all = "--traceback" in words or os.environ.get("SINKLAB_TRACEBACK", "") not in ("", "0")
    words = [argument for argument in words if argument != "--traceback"]
    if len(words) > 1 and words[0] in QUIET:  # of every command, and so behind its name
        words = [words[1], words[0], *words[2:]]
    names: dict[str, str] = {}
    try:
        with terminable(), warnings_in_a_line():
            top, names = make_app(words)
            status = top(words)
    except KeyboardInterrupt as ending:
        word, status = ("terminated", TERMINATED) if isinstance(ending, Terminated) else ("interrupted", INTERRUPTED)
        if is_follower():
            sys.exit(status)
        sys.stderr.write(f"{_with_notes(word, ending, names)}\n")
        sys.exit(status)
    except BrokenPipeError:  # whoever read our output has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        line = explain(error, names)
        if line is None:
            raise
        if is_follower() and isinstance(error, (SinklabError, cyclopts.CycloptsError)):
            sys.exit(USER_ERROR)
        if show_all:
            traceback.print_exc()
        sys.stderr.write(f"error: {_with_notes(line, error, names)}\n")
        sys.exit(USER_ERROR)
    sys.exit(status if isinstance(status, int) else 0)


def _with_notes(line: str, ending: BaseException, names: Mapping[str, str]) -> str:
    """A line with what was noted of its exception behind it: what is kept, and how to go on."""
    return "; ".join([line, *(on_the_line(note, names) for note in getattr(ending, "__notes__", ()))])
