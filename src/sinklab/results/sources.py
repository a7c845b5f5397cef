"""The digest of the code behind a number: the source of its modules and of all that they import, transitively."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from sinklab.errors import ConfigurationError

__all__ = ["digest_of", "modules_behind"]


def digest_of(*origins: ModuleType | Callable[..., object] | str, without: Sequence[Callable[..., object]] = ()) -> str:
    """Hash of the source text of the modules of ``origins`` and of all that these import from sinklab, transitively.

    An import inside a function counts; one under ``if TYPE_CHECKING:`` does not, as it is never executed. What is looked up by
    its name in a registry is not seen: the plug-ins that a computation uses are to be among the origins. An origin from another
    package counts with what it imports from that package.

    Args:
        origins: modules, names of modules, or functions and classes, which stand for the module that they are in.
        without: functions whose source is left out of their modules, as they do not take part in the computation.

    Returns:
        The first 32 hexadecimal digits of a SHA-256.

    Raises:
        ConfigurationError: the source of an origin cannot be had.
    """
    names = tuple(sorted({_module_name(origin) for origin in origins}))
    if not without:
        return _digest(names)
    return _digest(names, tuple((_module_name(function), inspect.getsource(function)) for function in without))


def modules_behind(*origins: ModuleType | Callable[..., object] | str) -> list[str]:
    """Names of the modules whose source :func:`digest_of` hashes, sorted.

    Raises:
        ConfigurationError: the source of an origin cannot be had.
    """
    return sorted(_closure({_module_name(origin) for origin in origins}))


@functools.cache
def _digest(names: tuple[str, ...], without: tuple[tuple[str, str], ...] = ()) -> str:
    digest = hashlib.sha256()
    for name in modules_behind(*names):
        text = _source(name)
        for module, left_out in without:
            text = text.replace(left_out, "") if module == name else text
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()[:32]


def _closure(names: set[str]) -> set[str]:
    closure: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in closure:
            closure.add(name)
            waiting += _imports(name)
    return closure


def _module_name(origin: ModuleType | Callable[..., object] | str) -> str:
    if isinstance(origin, str):
        return origin
    return origin.__name__ if isinstance(origin, ModuleType) else origin.__module__


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
    """Modules of sinklab, or of its own package, that a module imports; the packages above them are executed too."""
    roots = {"sinklab", name.partition(".")[0]}
    modules: set[str] = set()
    is_package = (path := _path(name)) is not None and path.name == "__init__.py"
    for module, members in _import_statements(name, is_package):
        if module.partition(".")[0] not in roots:
            continue
        if _path(module) is not None:
            modules.add(module)
        for member in members:
            home = sys.modules["sinklab"]._HOMES.get(member) if module == "sinklab" else None
            if home is not None:
                modules.add(home)
            elif _path(f"{module}.{member}") is not None:
                modules.add(f"{module}.{member}")
    modules |= {
        ".".join(parts[:end]) for parts in (each.split(".") for each in (*modules, name)) for end in range(1, len(parts))
    }
    return tuple(sorted(each for each in modules if _path(each) is not None))


def _import_statements(name: str, is_package: bool) -> Iterator[tuple[str, list[str]]]:
    """The absolute name of every module that is imported from, and what is imported from it."""
    waiting: list[ast.AST] = [ast.parse(_source(name))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
            module = node.module or ""
            yield ".".join([*parents, *filter(None, [module])]) if node.level else module, [each.name for each in node.names]
        waiting += ast.iter_child_nodes(node)


@functools.cache
def _path(name: str) -> Path | None:
    """The file of a module; ``None`` where there is none. Nothing below the top of a package is imported to find out."""
    top, *rest = name.split(".")
    loaded = sys.modules.get(top)
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec(top)
    if spec is None:
        return None  # a script or a notebook
    if spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") and not rest else None
    for location in spec.submodule_search_locations:
        path = Path(location, *rest)
        for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if candidate.is_file() and (rest or candidate.name == "__init__.py"):
                return candidate
    return None


@functools.cache
def _source(name: str) -> str:
    path = _path(name)
    if path is not None:
        return path.read_text(encoding="utf-8")
    try:
        return inspect.getsource(sys.modules[name])  # a script, or a notebook, whose lines IPython keeps
    except (KeyError, OSError, TypeError) as error:
        raise ConfigurationError(
            f"the source of {name} cannot be read, so numbers that it computes cannot be kept: {error}; put it in a file"
        ) from error
