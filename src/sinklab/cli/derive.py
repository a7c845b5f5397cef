"""From a function to a command: options from its signature, help from its docstring, output from what it returns."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import operator
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import cyclopts
from typing_extensions import Doc

from sinklab.cli.guard import INTERRUPTED, TERMINATED, on_the_line
from sinklab.errors import ConfigurationError
from sinklab.models.quiet import quiet_libraries
from sinklab.registry import split_specs
from sinklab.results.progress import bars, quietly, say
from sinklab.results.run import Listing, Result
from sinklab.studies.arguments import WHOLE, AsJson, InMemory, Quiet, WrittenTo, annotations_of

STATUSES = {"diverged": 3, "stopped": INTERRUPTED}
"""What became of a training to the exit status of its command, unless SIGTERM has stopped it."""


def print_result(result: object, as_json: bool = False, names: Mapping[str, str] | None = None) -> int:
    """Show what a command returned, and give the exit status: that of :data:`STATUSES`, or 1 if parts failed (on stderr).

    Of the processes of ``torchrun`` the first one speaks.

    Args:
        names: parameter to option, as what failed names them.
    """
    status = 0
    if isinstance(result, Result):
        status = STATUSES.get(str(result.summary.get("status")), 0)
        status = TERMINATED if result.record.get("stopped_by") == "SIGTERM" else status
        if os.environ.get("RANK", "0") != "0":
            return status
    if isinstance(result, Result | Listing):
        if as_json:
            sys.stdout.write(result.to_json())
        else:
            result.show()
    elif result is not None:
        sys.stdout.write(f"{result}\n")
    errors = (result.summary.get("errors") or []) if isinstance(result, Result) else []
    for error in errors:
        sys.stderr.write(f"failed: {on_the_line(error, names or {})}\n")
    return 1 if errors else status


OPTIONS = cyclopts.Group("Options")


def derive(function: Callable[..., object], name: str) -> cyclopts.App:
    """The command of a function; see :func:`sinklab.studies.arguments.command` for the rules.

    Raises:
        TypeError: a parameter without help.
    """
    description, texts, examples = read_docstring(inspect.getdoc(function) or "")
    signature = inspect.signature(function)
    wanted = list(_options(function).values())
    gives_result = str(signature.return_annotation).endswith("Result")
    shown = gives_result or str(signature.return_annotation).endswith("Listing")
    if shown:
        wanted.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson))
    if "quiet" not in signature.parameters:
        wanted.append(inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet))
    parameters = [_parameter(function, parameter, texts) for parameter in wanted]

    places = _places(function)

    def call(*positional: object, **given: Any) -> int:
        as_json = bool(given.pop("as_json", False))
        quiet = bool(given.get("quiet", False))
        if "quiet" not in signature.parameters:
            given.pop("quiet", None)
        if gives_result:
            quiet_libraries()
        arguments = signature.bind_partial(*positional, **given).arguments
        for parameter, place in places.items():
            if arguments.get(parameter) is None:
                given[parameter] = place.path({word: folder_name(str(value)) for word, value in arguments.items()})
        if "say" in signature.parameters and not quiet:
            given["say"] = say
        with quietly(quiet):
            if "progress" in signature.parameters:
                with bars("loading") as progress:
                    result = function(*positional, **given, progress=progress)
            else:
                result = function(*positional, **given)
            return print_result(result, as_json, option_names(function))

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    app = cyclopts.App(name=name, help=description, help_epilogue=examples, group_parameters=OPTIONS)
    app.default(call)
    return app


def option_names(function: Callable[..., object]) -> dict[str, str]:
    """Parameter to how the command line calls it: ``seq_len`` to ``--seq-len``, ``model`` to ``MODEL``."""
    return {
        name: name.upper() if _by_position(parameter) else _names(name, _notes(annotations_of(function)[name]))[0]
        for name, parameter in _options(function).items()
    }


def read_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """What a docstring in Google's style says: the description, what is under ``Args:`` by name, and the examples."""
    heading = re.compile(r"^(Args|Attributes|Examples?|In Python|Raises|Returns|Yields):$", re.MULTILINE)
    description, *rest = heading.split(plain(text))
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    entries = re.split(r"^(\w+(?:, \w+)*): ?", _dedented(sections.get("Args", "")), flags=re.MULTILINE)
    texts = {
        name: " ".join(entry.split())
        for names, entry in zip(entries[1::2], entries[2::2], strict=True)
        for name in names.split(", ")
    }
    examples = next((f"{word}:\n\n{_dedented(sections[word], 2)}" for word in ("Example", "Examples") if word in sections), "")
    return rejoined(description.strip()), texts, examples


def rejoined(text: str) -> str:
    """Paragraphs, and entries of lists and of ``Args``, each on one line; other lines that are indented stay as they are."""
    return re.sub(r"(?<=\S)\n(?:(?=[^\s-])| {8,}(?=\S))", " ", text)


def _dedented(section: str, by: int = 0) -> str:
    return textwrap.indent(textwrap.dedent(section.strip("\n")), " " * by).rstrip()


def plain(text: str) -> str:
    """A docstring without the markup of Sphinx."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda match: match[1].rpartition(".")[2] if "~" in match[0] else match[1], text)
    return text.replace("``", "")


def folder_name(text: str) -> str:
    """A name as one folder name: ``embedded-softmax``, ``org-model``, or the last two parts of a path that exists.

    The last part alone would be the same for many: checkpoints of different models are called ``hf`` or ``final``.
    """
    path = Path(text).expanduser()
    if path.exists():
        text = "-".join(path.resolve().parts[1:][-2:])
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "model"


def _options(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters that a line can give."""
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("progress", "say") and _members(annotations_of(function)[name])
    }


def _places(function: Callable[..., object]) -> dict[str, WrittenTo]:
    """Parameter to where the command line writes if it is not given."""
    return {
        name: note
        for name, parameter in _options(function).items()
        for note in _notes(annotations_of(function)[name])
        if isinstance(note, WrittenTo)
    }


def _parameter(function: Callable[..., object], parameter: inspect.Parameter, texts: Mapping[str, str]) -> inspect.Parameter:
    """One argument or option, as cyclopts takes it."""
    annotation = annotations_of(function).get(parameter.name, parameter.annotation)
    notes = _notes(annotation)
    text = texts.get(parameter.name) or next((note.documentation for note in notes if isinstance(note, Doc)), "")
    text += "".join(
        f" By default {note.template.replace('{', '<').replace('}', '>')}." for note in notes if isinstance(note, WrittenTo)
    )
    if not text:
        raise TypeError(f"{function.__qualname__}: parameter {parameter.name!r} needs an entry under Args, or a Doc")
    kind, item = _type(annotation)
    about: dict[str, Any] = {"help": text, "negative": "", "allow_repeating": True}  # of two values the last one holds
    if not _by_position(parameter):
        names = _names(parameter.name, notes)
        about["name"] = names
        if item is not None:
            about |= {
                "converter": _of_list(item, names[0], WHOLE in notes),
                "n_tokens": 1,
                "show_default": _shown if parameter.default else False,
            }
            about["name"] = list(dict.fromkeys((*names, *map(_singular, names))))
        if kind is bool:
            about |= {"show_default": False} if parameter.default is False else {"negative": None}
    return parameter.replace(
        kind=parameter.POSITIONAL_ONLY if _by_position(parameter) else parameter.kind,
        annotation=Annotated[kind, cyclopts.Parameter(**about)],
    )


def _notes(annotation: Any) -> tuple[object, ...]:
    return getattr(annotation, "__metadata__", ())


def _names(parameter: str, notes: Sequence[object]) -> list[str]:
    """How an option is called on the line."""
    return [str(note) for note in notes if str(note).startswith("-")] or [f"--{parameter.replace('_', '-')}"]


def _by_position(parameter: inspect.Parameter) -> bool:
    """Whether it has no name on the line: what cannot be left out and is no keyword."""
    return parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty


def _singular(name: str) -> str:
    """What one item of a list is called; words such as ``corpus``, ``bos`` and ``loss`` are singular as they are."""
    if name.endswith(("us", "os", "ss")):
        return name
    return f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _type(annotation: Any) -> tuple[Any, Any]:
    """The type that the command line reads, and that of its items where it is a list (else ``None``)."""
    members = _members(annotation)
    none = [type(None)] if type(None) in members else []
    # What can be written as text is; the rest of a union is what callers from Python may give instead.
    real = [str] if str in members else [member for member in members if member is not type(None)]
    if len(real) == 1 and get_origin(real[0]) in _LISTS:
        item, _ = _type(get_args(real[0])[0])
        return functools.reduce(operator.or_, [list[item], *none]), item  # type: ignore[valid-type]
    return functools.reduce(operator.or_, [*real, *none]), None


def _members(annotation: Any) -> list[Any]:
    """The types of a union that a line can give; nothing where there is none but ``None``."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    kinds = [part for part in members if part not in (InMemory, Any) and get_origin(part) not in _IN_MEMORY]
    return kinds if set(kinds) - {type(None)} else []


_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_IN_MEMORY = (dict, collections.abc.Mapping, collections.abc.Callable)


def _of_list(item: Any, name: str, whole: bool) -> Callable[[Any, Sequence[cyclopts.Token]], list[Any]]:
    """Reads a list: parts between commas, of all times that the option was given."""

    def convert(type_: Any, tokens: Sequence[cyclopts.Token]) -> list[Any]:
        values: list[Any] = []
        for token in tokens:
            parts = [token.value] if whole else split_specs(token.value)
            try:
                values += [_read(item, part) for part in parts]
                if not parts:
                    raise ValueError
            except ValueError:
                kind = {int: "whole numbers", float: "numbers", str: "names"}.get(item, " or ".join(map(str, get_args(item))))
                example = ", such as 0,1,4" if item is int else ""
                raise ConfigurationError(f"{name} {token.value!r} must be {kind} with commas between them{example}") from None
        return values

    return convert


def _read(item: Any, part: str) -> Any:
    if (item is int and not part.isdecimal()) or (get_origin(item) is Literal and part not in get_args(item)):
        raise ValueError(part)
    return part if get_origin(item) is Literal else item(part)
