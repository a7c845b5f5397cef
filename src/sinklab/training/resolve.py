"""From a recipe's name, a Python file or a written configuration to the configuration."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from sinklab.errors import ConfigurationError, InputError, SinklabError
from sinklab.registry import KINDS, recipes
from sinklab.results.progress import warn
from sinklab.training.config import PretrainingConfig

__all__ = ["resolve_recipe"]


def resolve_recipe(name: str | os.PathLike[str] | PretrainingConfig) -> PretrainingConfig:
    """The configuration that ``name`` stands for.

    Args:
        name: a recipe from ``sinklab list recipes``, with settings if need be (``tiny:model.window=8``); a ``.py`` file with a
            function without parameters that returns a :class:`PretrainingConfig`, ``file.py:function`` where there are several;
            a ``run.json``, or a JSON or YAML file with the fields of one; or the output directory of a run.

    Raises:
        UnknownNameError: no recipe of that name.
        InputError: a file that is missing or cannot be read.
        ConfigurationError: a file whose content is no configuration.
    """
    if isinstance(name, PretrainingConfig):
        return name
    if not isinstance(name, str | os.PathLike):
        raise ConfigurationError(f"a training is a recipe, a file or a PretrainingConfig, and this is of {type(name).__name__}")
    file, _, function = os.fspath(name).partition(":")
    path = Path(file).expanduser()
    if path.suffix == ".py":
        return _from_python(path, function)
    if path.suffix in (".json", ".yaml", ".yml") or (path.is_dir() and file not in recipes):
        return _from_fields(path / "run.json" if path.is_dir() else path)
    return _checked(lambda: recipes.make(name), f"recipe {name!r}")


def _from_python(path: Path, wanted: str) -> PretrainingConfig:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"sinklab_recipe_{path.stem}", path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as import does: dataclasses and types that are texts are looked up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file does
        del sys.modules[spec.name]
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    _warn_of_plugins(path, spec.name)
    functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and _callable_bare(value)
    }
    if wanted:
        functions = {name: value for name, value in functions.items() if name == wanted}
    elif path.stem in functions:
        functions = {path.stem: functions[path.stem]}
    if len(functions) != 1:
        number = f"it has {', '.join(functions)}" if functions else "it has none"
        raise ConfigurationError(
            f"{path} must define one function {wanted or 'without parameters'} that returns a PretrainingConfig, and {number}; "
            f"name one of several as {path}:function"
        )
    ((name, function),) = functions.items()

    def call() -> object:
        try:
            return function()
        except SinklabError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"{path}:{name} failed: {type(error).__name__}: {error}") from error

    return _checked(call, f"{path}:{name}")


def _warn_of_plugins(path: Path, module: str) -> None:
    """Say that what a recipe's file registers is known in this process alone, where a sweep starts others."""
    mine = [
        f"{registry.kind} {name!r}"
        for registry in KINDS.values()
        for name, plugin in registry.imported.items()
        if plugin.__module__ == module
    ]
    if mine:
        warn(
            f"{path} registers {', '.join(mine)}, for this process alone: the cells of a sweep, and commands on the trained "
            "model, find a plug-in of yours once it is installed with an entry point (CONTRIBUTING.md, From another package)"
        )


def _callable_bare(function: Callable[..., object]) -> bool:
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in starred for p in inspect.signature(function).parameters.values())


def _checked(function: Callable[[], object], what: str) -> PretrainingConfig:
    config = function()
    if not isinstance(config, PretrainingConfig):
        raise ConfigurationError(f"{what} must return a PretrainingConfig, and returned {type(config).__name__}")
    return config


def _from_fields(path: Path) -> PretrainingConfig:
    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(fields, dict) and fields.get("kind") == "pretrain":
        fields = fields["config"]
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{path} must hold the fields of a configuration, and holds {type(fields).__name__}")
    return PretrainingConfig.parse(fields)
