"""Names to plug-ins: one small registry per kind, filled by looking at the files of one package and at entry points.

A plug-in is one file. ``probes/sink_rate.py`` registers the class ``SinkRate`` under ``sink_rate``: file name and registered
name are the same word, so the *names* are known without importing anything and ``sinklab list`` needs no torch; the file is
imported when its plug-in is asked for. Outside packages use the same door with an entry point in the group
``sinklab.<kind>`` (``sinklab.probes``: ``my_probe = "my_package.my_probe:MyProbe"``). A clash of names and a file that fails
to import are errors, never skips.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from sinklab.errors import ConfigurationError, ContractError, UnknownNameError

__all__ = [
    "KINDS",
    "Registry",
    "claims",
    "corpora",
    "interventions",
    "operations",
    "policies",
    "positions",
    "probes",
    "read_outs",
    "recipes",
    "registry_of",
    "tasks",
]

T = TypeVar("T")
P = TypeVar("P")

KINDS: dict[str, Registry[Any]] = {}
"""Plural kind (``"probes"``) to its registry, in the order in which ``sinklab list`` shows them."""


class Registry(Generic[T]):
    """The plug-ins of one kind, by name.

    Args:
        kind: singular noun used in messages, such as ``"probe"``.
        plural: the package below ``sinklab`` that holds the built-in plug-ins, and the entry-point group.
    """

    def __init__(self, kind: str, plural: str) -> None:
        self.kind = kind
        self.plural = plural
        self._objects: dict[str, type[T]] = {}
        KINDS[plural] = self

    def register(self, name: str) -> Callable[[P], P]:
        """Decorator of a class (of a function, for recipes, read-outs and claims) that enters it under ``name``.

        It writes ``name`` on it too.

        Raises:
            ConfigurationError: the name is not lower-case words joined by underscores.
            ContractError: another class already has the name.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ConfigurationError(f"{self.kind} name {name!r} must be lower-case words joined by underscores")

        def enter(cls: P) -> P:
            known = self._objects.get(name)
            if known is not None and _origin(known) != _origin(cls):
                raise ContractError(f"two {self.kind} plug-ins are called {name!r}: {_origin(known)} and {_origin(cls)}")
            cls.name = name  # type: ignore[attr-defined]
            self._objects[name] = cls  # type: ignore[assignment]
            return cls

        return enter

    def names(self) -> list[str]:
        """All names, sorted; nothing is imported."""
        return sorted(self._files() | self._entry_points().keys() | self._objects.keys())

    def summary(self, name: str) -> str:
        """First sentence of the docstring of the plug-in's file; the file is parsed, not imported.

        Raises:
            UnknownNameError: no such name.
        """
        self._require(name)
        if name in self._files():
            docstring = ast.get_docstring(ast.parse((self._folder() / f"{name}.py").read_text(encoding="utf-8")))
        else:
            docstring = self[name].__doc__
        return " ".join((docstring or "").split("\n\n")[0].split())

    def __getitem__(self, name: str) -> type[T]:
        """The class called ``name``; its file is imported on the first look-up.

        Raises:
            UnknownNameError: no such name; the message lists the known ones and suggests the nearest.
            ContractError: its file cannot be imported, or does not register the name.
        """
        if name not in self._objects:
            self._require(name)
            points = self._entry_points()
            module = points[name].value.partition(":")[0] if name in points else f"sinklab.{self.plural}.{name}"
            try:
                importlib.import_module(module)
            except Exception as error:
                raise ContractError(
                    f"{self.kind} {name!r}: its file {module} cannot be imported: {type(error).__name__}: {error}"
                ) from error
            if name not in self._objects:
                raise ContractError(f"{module} must register a {self.kind} called {name!r}, the name of the file, and does not")
        return self._objects[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _require(self, name: str) -> None:
        names = self.names()
        if name not in names:
            raise UnknownNameError(f"no {self.kind} is called {name!r}.{_did_you_mean(name, names)} Known: {', '.join(names)}")

    def _folder(self) -> Path:
        return Path(__file__).parent / self.plural

    def _files(self) -> set[str]:
        return {path.stem for path in self._folder().glob("*.py") if not path.stem.startswith("_")}

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        points: dict[str, importlib.metadata.EntryPoint] = {}
        for point in importlib.metadata.entry_points(group=f"sinklab.{self.plural}"):
            if point.name in points or point.name in self._files():
                raise ContractError(f"two {self.kind} plug-ins are called {point.name!r}; one of them is {point.value}")
            points[point.name] = point
        return points


def registry_of(kind: str) -> Registry[Any]:
    """The registry of a kind given in the singular or the plural.

    Raises:
        UnknownNameError: no such kind.
    """
    for plural, registry in KINDS.items():
        if kind in (plural, registry.kind):
            return registry
    raise UnknownNameError(
        f"there is no kind of plug-in called {kind!r}.{_did_you_mean(kind, KINDS)} Kinds: {', '.join(KINDS)}"
    )


def _did_you_mean(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _origin(obj: object) -> str:
    return f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', '?')}"


operations: Registry[Any] = Registry("operation", "operations")
probes: Registry[Any] = Registry("probe", "probes")
interventions: Registry[Any] = Registry("intervention", "interventions")
corpora: Registry[Any] = Registry("corpus", "corpora")
positions: Registry[Any] = Registry("position", "positions")
policies: Registry[Any] = Registry("policy", "policies")
recipes: Registry[Any] = Registry("recipe", "recipes")
tasks: Registry[Any] = Registry("task", "tasks")
read_outs: Registry[Any] = Registry("read-out", "read_outs")
claims: Registry[Any] = Registry("claim", "claims")
