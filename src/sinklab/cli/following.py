"""What a user does next: the line under ``Next:`` in the docstring of a command, filled in with what this run was about."""

from __future__ import annotations

import inspect
import re
import shlex
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sinklab.cli.commands import find_commands
from sinklab.results.run import Result

__all__ = ["lines_of", "next_line"]

CARRIED = ("revision", "trust_remote_code", "device", "dtype", "device_map", "max_memory", "offload_folder")
"""Options about how a model is loaded: who needed one here needs it in the next command too."""

MEASURED_ON = ("corpus", "bos", "threshold")
"""Options that a sink depends on: with others the next command may find another one, or none."""

DOMAINS = "domains"
"""What the corpus is called by a command that reads several."""

_LINE = re.compile(r"^ +(?:if (?P<conditions>\w+(?: and \w+)*): )?(?P<line>sinklab .+)$", re.MULTILINE)


def lines_of(function: Callable[..., object]) -> Iterator[tuple[list[str], str]]:
    """The lines under ``Next:`` in a docstring, each with the names that must stand for something::

    Next:
        if reading and sink_role: sinklab causes {model}  (what the heads do with {sink_role})
        sinklab show sink_rate
    """
    _, _, section = f"\n{inspect.getdoc(function) or ''}".partition("\nNext:\n")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    for match in _LINE.finditer(section):
        named = [name for _, name, _, _ in string.Formatter().parse(match["line"]) if name]
        yield [*(match["conditions"] or "").split(" and "), *named] if match["conditions"] else named, match["line"]


def next_line(function: Callable[..., object], bound: inspect.BoundArguments, result: object) -> str | None:
    """The first of the lines all of whose names stand for something, filled in; ``None`` if there is none.

    A name is an argument, ``folder`` (where the result was written), or an entry of the summary. Values are quoted for a shell,
    all parts of a list; options about the loading of the model and about what was measured go along where the next command has
    them.
    """
    arguments, parameters = dict(bound.arguments), bound.signature.parameters
    bound.apply_defaults()
    known: dict[str, object] = dict(bound.arguments)
    if isinstance(result, Result):
        known = {**result.summary, **known, "folder": result.folder}
    for names, line in lines_of(function):
        if all(known.get(name) not in (None, False, "", [], (), {}) for name in names):
            command, mark, comment = line.partition("  (")
            words = {name: _words(known[name]) for name in names}
            if "{model}" in command:
                words["model"] += "".join(f" {option}" for option in _carried(command.split()[1], arguments, parameters))
            return command.format_map(words) + mark + comment.format_map({name: str(known[name]) for name in names})
    return None


def _words(value: object) -> str:
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return " ".join(shlex.quote(str(part)) for part in parts)


def _carried(command: str, given: Mapping[str, object], here: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Options that were given on this line and that another command has too.

    Args:
        here: parameters of the command of this line. One of the same name and another type there (several kinds of BOS) may
            refuse the value.
    """
    place = find_commands().get(command)
    there = inspect.signature(place.load()).parameters if place is not None else {}
    for name in (*CARRIED, *MEASURED_ON):
        value, option = given.get(name), f"--{name.replace('_', '-')}"
        if name == "corpus":
            texts = given.get(DOMAINS) or value
            value = texts if isinstance(texts, str) else texts[0] if isinstance(texts, Sequence) and len(texts) == 1 else None
            taken = name in there or DOMAINS in there
        else:
            taken = name in there and (name in CARRIED or (name in here and there[name].annotation == here[name].annotation))
        if taken and value is not None and value is not False:
            yield option if value is True else f"{option} {_words(value if not isinstance(value, Path) else str(value))}"
