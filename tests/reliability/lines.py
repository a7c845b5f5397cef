"""Command lines for the fuzzer: drawn from the derived commands, with values that are valid, on a boundary, or hostile.

Every path of a line is relative to the working directory in the sandbox; no absolute path and no ``..`` is ever drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from sinklab.cli.catalogue import describe
from sinklab.cli.commands import find_commands
from sinklab.cli.derive import derive
from sinklab.registry import KINDS

__all__ = ["QUICK", "Option", "commands", "line"]

QUICK: dict[str, list[str]] = {
    "audit": ["model", "--samples=2", "--seq-len=8", "--corpus=text.txt", "--no-cache", "--out=out"],
    "cache": ["model", "--tokens=48", "--window=8", "--documents=1", "--corpus=text.txt", "--policies=window", "--sinks=1"],
    "card": ["audit"],
    "causes": ["model", "--texts=12", "--heads=0.0", "--seq-len=8", "--domain=text.txt"],
    "claims": [],
    "compare": ["audit", "audit2"],
    "depend": ["model", "--task=passkey", "--items=2", "--window=64", "--sinks=1", "--policies=full"],
    "export": ["audit", "--to=transformers"],
    "index": ["audit"],
    "measure": ["model", "--probe=sink_rate", "--samples=2", "--seq-len=8", "--corpus=text.txt"],
    "origin": ["model", "--samples=2", "--seq-len=8", "--corpus=text.txt", "--controls=1"],
    "pathways": ["--operations=softpick", "--seeds=0"],
    "plot": ["run"],
    "pretrain": [
        *("tiny", "--set=training.steps=2", "--set=schedule.warmup_steps=0", "--set=data.corpus=text.txt"),
        *("--set=watch.samples=2", "--set=data.max_tokens=4000", "--set=data.held_out_rows=2", "--cache=c"),
    ],
    "quantize": ["model", "--samples=4", "--calibration=1", "--seq-len=8", "--corpus=text.txt", "--schemes=w8a8"],
    "report": ["audit"],
    "reproduce": ["repeated_token_laws", "--seeds=0"],
    "show": ["sink_rate"],
    "stream": ["model", "--prompt=import os", "--max-new-tokens=2", "--window=8"],
    "sweep": [
        *("tiny", "--grid=training.steps=2,3", "--set=schedule.warmup_steps=0", "--set=data.corpus=text.txt"),
        *("--set=data.max_tokens=4000", "--set=data.held_out_rows=2", "--jobs=1", "--cache=c"),
    ],
    "trigger": ["--operation=softmax", "--seeds=0", "--cap=2", "--samples=2", "--batch=2"],
}
"""A line of each command that ends well within a second or so; a command without one starts from its name alone."""

SLOW = {"pathways", "reproduce"}
"""Commands that work for long before they refuse what is wrong; drawn less often."""

LEFT_OUT = {"ray", "watch"}
"""Options that look for other machines, or never end."""

INTEGERS = (
    "0", "-0", "-1", "1", "2", "3", "5", "7", "16", "64", "1000", "4294967296", "2147483647", "2147483648",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775809", "9" * 40, "1" + "0" * 5000,
    "nan", "inf", "1e3", "2.5", "", " ", "x", "０", "٣", "1_000", "0x10", " 7", "+7", "None", "true", "-",
)  # fmt: skip
FLOATS = (
    "0", "-0.0", "1", "-1", "0.5", "2", "1e-3", "0.999999999999", "nan", "-nan", "inf", "-inf", "1e30", "1e308", "1e309",
    "1e-320", "-1e30", "9" * 400, "", " ", "x", "1,5", "½", "None", ".inf", ".nan", "true",
)  # fmt: skip
TEXTS = (
    "", " ", "x", "ü", "\u202e", "a" * 5000, "{}", "%s", "{model}", "null", "None", "nan", "[", "]", "[]", "{a: b}", "a:b=c",
    ":", "=", ",", ",,", "a=b", "\n", "a\tb", "\udcff", "'", '"', "*", "&a", "!!python/object:os.system", "0", "-1", "auto",
    "all", "--", "1e9", "0..2", "0..99999999999", "2..0", "0.0", "0.99", "99.0", "0.0,0.1", "\u2028", "é\u0301", "🜨",
)  # fmt: skip
PATHS = (
    "out", "new/deep/out", "audit", "run", "model", "text.txt", "text.txt/x", "missing", "missing.txt", "curves.png", "x.svg",
    "x.gif", "ü", "a b", "a" * 300, "", "\udcff", "x.pdf", "blank.txt", "trail/",
)  # fmt: skip
DEVICES = ("cpu", "auto", "cuda", "cuda:7", "meta", "mps", "cpu:1", "gpu", "")
DTYPES = ("float32", "bfloat16", "float64", "float16", "auto", "int8", "complex64", "float", "")
MODELS = (
    *(f"embedded:{name}" for name in ("softmax", "sigmoid", "", "x")),
    "model",
    "run",
    "audit",
    "text.txt",
    "org/model",
    "",
)
CORPORA = ("text.txt", "empty.txt", "blank.txt", "one.txt", "model", "missing.txt")
RECIPES = ("tiny", "good.py", "good.py:good", "good.py:x", "raises.py", "leaves.py", "run", "run/run.json", "model", "x.yaml")
POLICIES = ("full", "1+8", "0+8", "8+0", "-1+8", "99999999999+8", "8")
TASKS = ("passkey", "multi_turn", "long_text", "lm_eval:x", "lm_eval:")


@dataclasses.dataclass(frozen=True)
class Option:
    """One argument of a command, as its derived signature has it.

    Attributes:
        names: as on the line; nothing where it is given by its position.
        type: ``int``, ``float``, ``bool``, ``str``, ``Path`` or a ``Literal``: that of an item where it is a list.
    """

    parameter: str
    names: tuple[str, ...]
    type: Any
    is_list: bool
    needed: bool
    help: str


@functools.cache
def commands() -> dict[str, tuple[Option, ...]]:
    """Every command with its arguments, read from what the command line is derived to."""
    found = {}
    for name, place in find_commands().items():
        default = derive(place.load(), name).default_command
        assert default is not None
        found[name] = tuple(_option(parameter) for parameter in inspect.signature(default).parameters.values())
    return found


def _option(parameter: inspect.Parameter) -> Option:
    annotation, about = get_args(parameter.annotation)[:2]
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    kind = next(member for member in members if member is not type(None))
    is_list = get_origin(kind) is list
    return Option(
        parameter=parameter.name,
        names=tuple(about.name or ()) if parameter.kind is not parameter.POSITIONAL_ONLY else (),
        type=get_args(kind)[0] if is_list else kind,
        is_list=is_list,
        needed=parameter.default is parameter.empty,
        help=about.help,
    )


def line(seed: int, index: int) -> list[str]:
    """The arguments of one line; the same seed and index give the same line."""
    draw = random.Random(f"{seed}:{index}")
    if draw.random() < 0.01:
        return draw.choice([[], ["--help"], ["--version"], [_text(draw)], ["-x"], ["--traceback"]])
    name = draw.choice(list(commands()))
    if name in SLOW and draw.random() < 0.75:
        name = draw.choice(list(commands()))
    arguments = list(QUICK.get(name, []))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
        _changed(draw, name, arguments)
    return [name, *arguments]


def _changed(draw: random.Random, name: str, arguments: list[str]) -> None:
    """One change of a line in place: mostly a value, else something left out, doubled, misspelt or too much."""
    kind = draw.random()
    if kind < 0.06 and arguments:
        arguments.pop(draw.randrange(len(arguments)))
    elif kind < 0.09 and arguments:
        arguments.append(draw.choice(arguments))
    elif kind < 0.11:
        arguments.append(_text(draw))
    elif kind < 0.13:
        arguments.append(f"--{draw.choice(['sede', 'x', 'no-', 'out-', 'ou'])}={draw.choice(TEXTS)}")
    elif kind < 0.14:
        arguments.append("--help")
    else:
        option = draw.choice([option for option in commands()[name] if option.parameter not in LEFT_OUT])
        _give(draw, option, arguments)


def _give(draw: random.Random, option: Option, arguments: list[str]) -> None:
    """Gives an option a value."""
    if not option.names:
        value = value_of(draw, option)
        places = [at for at, argument in enumerate(arguments) if not argument.startswith("--")]
        if places and draw.random() < 0.8:
            arguments[places[0]] = value
        else:
            arguments.insert(0, value)
        return
    name = draw.choice(option.names)
    if option.type is bool:
        arguments.append(draw.choice([name, name, name, f"--no-{name[2:]}", f"{name}={draw.choice(TEXTS)}"]))
        return
    value = value_of(draw, option)
    if option.is_list and draw.random() < 0.3:
        value += "," + value_of(draw, option)
    style = draw.random()
    arguments += [f"{name}={value}"] if style < 0.9 else [name, value] if style < 0.98 else [name]


def value_of(draw: random.Random, option: Option) -> str:
    """A value for an option: by its type, and for text by what its help says that it names."""
    if get_origin(option.type) is Literal:
        return draw.choice([*map(str, get_args(option.type)), _text(draw)])
    if option.type is int:
        return draw.choice(INTEGERS)
    if option.type is float:
        return draw.choice(FLOATS)
    if option.type is Path:
        return draw.choice(PATHS)
    if draw.random() < 0.12:
        return _text(draw)
    named = re.search(r"'sinklab (?:list )?(\w+)'", option.help)
    pool = BY_PARAMETER.get(option.parameter)
    if option.parameter in ("changes", "grid"):
        return _override(draw, several=option.parameter == "grid")
    if option.parameter == "seeds":
        return draw.choice([*INTEGERS, "0..1", "0,0", "0..9999999999999", "1..0", "-1..3", "0..", "", ",", "0,,1"])
    if named is None:
        return draw.choice(pool or TEXTS)
    if pool is not None and draw.random() < 0.5:
        return draw.choice(pool)
    return _spec(draw, named[1])


BY_PARAMETER: dict[str, Sequence[str]] = {
    "model": MODELS,
    "corpus": CORPORA,
    "domains": CORPORA,
    "device": DEVICES,
    "dtype": DTYPES,
    "recipe": RECIPES,
    "policies": POLICIES,
    "tasks": TASKS,
    "kind": tuple(KINDS),
    "scale": ("tiny", "small", "medium", "60m", "1b", "huge"),
    "source": ("gu2024", "x", ""),
    "cost": ("seconds", "minutes", "hours", "gpu", "x"),
    "sink": ("auto", "0", "1", "7", "null", "none", "-1", "99999999999999999999", "x"),
    "heads": ("all", "0.0", "0.1,1.0", "9.9", "-1.0", "0", "x", "", "0.0.0", "99999999999999999999.0"),
    "optimizer": ("adamw", "sgd", "both", "x", ""),
}


def _text(draw: random.Random) -> str:
    return draw.choice(TEXTS)


def _misspelt(draw: random.Random, name: str) -> str:
    at = draw.randrange(len(name))
    return name[:at] + draw.choice(["", "x", " ", "é"]) + name[at + 1 :]


def _spec(draw: random.Random, kind: str) -> str:
    """A plug-in of a kind, with settings: their own, of another type, out of range, misspelt, twice or none."""
    registry = KINDS.get(kind)
    if registry is None:
        return _text(draw)
    name = draw.choice(registry.names())
    settings = [] if kind in ("claims", "read_outs", "recipes") else _settings(name, registry.kind)
    if draw.random() < 0.05:
        name = _misspelt(draw, name)
    parts = []
    for setting, declared in draw.sample(settings, min(len(settings), draw.choice((0, 1, 1, 2)))):
        parts.append(f"{_misspelt(draw, setting) if draw.random() < 0.05 else setting}={_setting(draw, declared)}")
    if parts and draw.random() < 0.03:
        parts.append(parts[0])
    return name + (":" if parts or draw.random() < 0.03 else "") + ",".join(parts)


@functools.cache
def _settings(name: str, kind: str) -> list[tuple[str, str]]:
    (found,) = (description for description in describe(name) if description.kind == kind)
    return [(parameter.name, parameter.type) for parameter in found.parameters if parameter.name.isidentifier()]


def _setting(draw: random.Random, declared: str) -> str:
    """A value in YAML for a setting of the type that the plug-in's file declares."""
    pools: dict[str, Sequence[str]] = {
        "int": INTEGERS,
        "float": FLOATS,
        "bool": ("true", "false", "yes", "2", "x", ""),
        "Path": ("text.txt", "model", "missing", ""),
        "tuple": (
            "[0]", "[0, 1]", "[]", "[-1]", "[.nan]", "[1e30]", "[.inf, 1]", "[a]", "0", "[9223372036854775808]", "{0: 1}",
        ),
    }  # fmt: skip
    fitting = [pool for word, pool in pools.items() if word in declared]
    return draw.choice(draw.choice([*fitting, TEXTS]) if fitting and draw.random() > 0.1 else TEXTS)


@functools.cache
def _fields() -> list[tuple[str, str]]:
    (recipe,) = (description for description in describe("tiny") if description.kind == "recipe")
    return [(field.name, field.type) for field in recipe.parameters]


def _override(draw: random.Random, several: bool) -> str:
    """A change of a field: ``path=value``, or several values for a grid."""
    if draw.random() < 0.05:
        return _text(draw)
    path, declared = draw.choice(_fields())
    if draw.random() < 0.03:
        path = _misspelt(draw, path)
    one: Callable[[], str] = functools.partial(_setting, draw, declared)
    if path.startswith(("model.operation", "model.position")) and draw.random() < 0.8:
        kind = "operations" if "operation" in path else "positions"
        one = functools.partial(_spec, draw, kind)
        if draw.random() < 0.5:
            name = draw.choice(KINDS[kind].names())
            path, one = f"{path}.name", lambda: name
    return f"{path}={','.join(one() for _ in range(draw.choice((1, 2)) if several else 1))}"
