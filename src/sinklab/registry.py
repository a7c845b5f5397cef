"""Names to plug-ins: one small registry per kind, filled by looking at the files of its package and of other packages.

A plug-in is one file. ``probes/sink_rate.py`` registers the class ``SinkRate`` under ``sink_rate``: file name and registered
name are the same word, so the *names* are known without importing anything and ``sinklab list`` needs no torch; the file is
imported when its plug-in is asked for. Another package names itself with an entry point in the group ``sinklab.packages``; its
files are searched for ``@probes.register("my_probe")`` (see :func:`packages`). A clash of names and a file that fails to import
are errors, never skips.

Wherever a plug-in can be named it can be given settings: ``entropy:sink_position=2``, or ``{"name": "entropy",
"sink_position": 2}``. :meth:`Registry.make` is the one place that reads them, and :meth:`Registry.settings` the one that
writes them into a run record.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from sinklab.errors import ConfigurationError, ContractError, UnknownNameError

T = TypeVar("T")
P = TypeVar("P")

BESIDES = frozenset({"base", "samples"})
"""Files in the folder of a kind that are no plug-in: what one is, and what it gives."""

LISTED = 30
"""Names that a message lists; where there are more, it says how to see them."""

KINDS: dict[str, Registry[Any]] = {}
"""Plural kind (``"probes"``) to its registry, in the order in which ``sinklab list`` shows them."""


class Registry(Generic[T]):
    """The plug-ins of one kind, by name.

    Args:
        kind: singular noun used in messages, such as ``"probe"``.
        plural: the package below ``sinklab`` that holds the built-in plug-ins, and the entry-point group.
        base: qualified name of the class that plug-ins derive from, or ``"function"``; empty for anything.
        default: the plug-in that settings without a name are about; without one, a name is required.
    """

    def __init__(self, kind: str, plural: str, base: str = "", default: str | None = None) -> None:
        self.kind = kind
        self.plural = plural
        self.base = base
        self.default = default
        self._objects: dict[str, type[T]] = {}
        KINDS[plural] = self

    def register(self, name: str) -> Callable[[P], P]:
        """Decorator of a class (of a function, for recipes, read-outs and claims) that enters it under ``name``.

        It writes ``name`` on it too.

        Raises:
            ConfigurationError: the name is not lower-case words joined by underscores.
            ContractError: another class already has the name, or it does not derive from the base class of the kind, or lacks
                what that leaves to it.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ConfigurationError(f"{self.kind} name {name!r} must be lower-case words joined by underscores")

        def enter(cls: P) -> P:
            if self.base == "function" and not inspect.isfunction(cls):
                raise ContractError(f"{self.kind} {name!r}: {_origin(cls)} must be a function")
            # Bases are compared by name, so that nothing is imported for it.
            if self.base not in ("", "function", *map(_origin, getattr(cls, "__mro__", ()))):
                raise ContractError(f"{self.kind} {name!r}: {_origin(cls)} must be a class that derives from {self.base}")
            if lacking := _lacking(cls):
                raise ContractError(f"{self.kind} {name!r}: {_origin(cls)} must define {', '.join(lacking)}")
            known = self._objects.get(name)
            if known is not None and _origin(known) != _origin(cls):
                raise ContractError(f"two {self.kind} plug-ins are called {name!r}: {_origin(known)} and {_origin(cls)}")
            cls.name = name  # type: ignore[attr-defined]
            self._objects[name] = cls  # type: ignore[assignment]
            return cls

        return enter

    def names(self) -> list[str]:
        """All names, sorted; nothing is imported."""
        return sorted(self._files() | self.marked().keys() | self._objects.keys())

    def summary(self, name: str) -> str:
        """First sentence of the docstring of the plug-in's file, or of what is marked in the file of a package; it is parsed,
        not imported.

        Raises:
            UnknownNameError: no such name.
        """
        self._require(name)
        if name in self._files():
            docstring = _file_docstring((self._folder() / f"{name}.py").read_text(encoding="utf-8"))
        elif name in self.marked():
            docstring = self.marked()[name].docstring()
        else:
            docstring = self[name].__doc__
        return " ".join((docstring or "").split("\n\n")[0].split())

    def __getitem__(self, name: str) -> type[T]:
        """The class called ``name``; its file is imported on the first look-up."""
        if name not in self._objects:
            self._require(name)
            marked = self.marked().get(name)
            module = f"sinklab.{self.plural}.{name}" if marked is None else marked.module
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:  # whatever a file of somebody else does
                raise ContractError(
                    f"{self.kind} {name!r}: its file {module} cannot be imported: {type(error).__name__}: {error}"
                ) from error
            if name not in self._objects:
                raise ContractError(f"{module} must register a {self.kind} called {name!r}, the name of the file, and does not")
        return self._objects[name]

    def read(
        self, spec: str | Mapping[str, object], stands_for: Callable[[str], str | None] = lambda name: None
    ) -> dict[str, Any]:
        """Name and settings of ``"name:key=value,key=value"`` (values in YAML) or ``{"name": …, key: value}``, unchecked.

        Of a setting that takes a text the value is what is written where YAML reads something else: ``target=no`` is no truth
        value, ``revision=0012345`` no number.

        Args:
            stands_for: gives the plug-in whose settings these are, where the name is that of something else, such as a path.

        Raises:
            ConfigurationError: it reads like neither, or is a class, a number or a list.
        """
        self._refuse_others(spec)
        return self._read_text(spec, stands_for) if isinstance(spec, str) else self._read_mapping(spec)

    def _read_mapping(self, spec: Mapping[str, object]) -> dict[str, Any]:
        settings = dict(spec)
        name = settings.pop("name", self.default)
        if name is None:
            raise ConfigurationError(f"a {self.kind} needs a name; got {settings}. Known: {', '.join(self)}")
        if not isinstance(name, str):
            raise ConfigurationError(f"{self.kind}: the name {name!r} is no text. Known: {', '.join(self)}")
        return {"name": name, **settings}

    def _read_text(self, spec: str, stands_for: Callable[[str], str | None]) -> dict[str, Any]:
        name, colon, text = (part.strip() for part in spec.partition(":"))
        old = re.fullmatch(r"(\w+)\((.*)\)", spec.strip(), re.DOTALL)
        if old is not None:
            raise ConfigurationError(f"{spec!r} cannot be read; settings follow a colon: {old[1]}:{old[2]}".rstrip(":"))
        parts = _split(text)
        if not name or (colon and not parts) or not all("=" in part for part in parts):
            raise ConfigurationError(f"{spec!r} cannot be read; write name or name:setting=value,setting=value")
        known = (name if name in self else stands_for(name)) if parts else None
        fields: dict[str, Any] = {"name": name}
        for key, _, value in ((piece.strip() for piece in part.partition("=")) for part in parts):
            declared = Any if known is None else _annotation(self[known], key)
            fields[key] = _read_value(spec, key, value, declared)
        return fields

    def make(self, spec: object, *arguments: object) -> Any:
        """The plug-in that ``spec`` describes.

        Args:
            spec: a plug-in, which is given back; a name; ``"name:key=value,key=value"`` with values in YAML; or
                ``{"name": …, key: value}``.
            arguments: what the kind takes before the settings (a position scheme: the architecture it serves).

        Returns:
            An instance. Of a function, what it returns; a function of something (a read-out is one of a trained model) is given
            back with its settings bound.

        Raises:
            UnknownNameError: no such name (did you mean …?).
            ConfigurationError: a setting that the plug-in does not have (did you mean …?), one that is missing or of another
                type, a value that the plug-in refuses, or a class, a number or a list in place of a plug-in.
        """
        self._refuse_others(spec)
        if not isinstance(spec, (str, Mapping)):
            return spec
        settings = self.read(spec)
        plugin: Any = self[settings.pop("name")]
        if self is recipes:  # the settings are fields of the configuration, by their dotted paths
            from sinklab.configuration import with_overrides

            return with_overrides(plugin(), [f"{path}={json.dumps(value)}" for path, value in settings.items()])
        if hasattr(plugin, "Settings"):  # a section, which checks itself
            return plugin(*arguments, settings)
        settings = _checked(f"{self.kind} {plugin.name!r}", plugin, settings)
        if inspect.isfunction(plugin) and any(p.default is p.empty for p in inspect.signature(plugin).parameters.values()):
            return functools.partial(plugin, **settings) if settings else plugin
        return plugin(*arguments, **settings)

    def settings(self, plugin: Any) -> dict[str, Any]:
        """Name and settings of a plug-in, as :meth:`make` takes them and run records keep them."""
        if isinstance(plugin, functools.partial):
            return {"name": plugin.func.name, **plugin.keywords}  # type: ignore[attr-defined]
        if dataclasses.is_dataclass(plugin):
            names = [field.name for field in dataclasses.fields(plugin) if field.init]
        elif hasattr(plugin, "Settings"):
            return {"name": plugin.name, **plugin.settings.model_dump()}
        else:
            names = [] if inspect.isfunction(plugin) else list(_parameters(type(plugin)))
        values = {name: getattr(plugin, name) for name in names}
        return {
            "name": plugin.name,
            **{name: str(value) if isinstance(value, Path) else value for name, value in values.items()},
        }

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _require(self, name: str) -> None:
        names = self.names()
        if name not in names:
            raise UnknownNameError(f"no {self.kind} is called {name!r}.{_did_you_mean(name, names)} {self._known()}")

    def _refuse_others(self, spec: object) -> None:
        """Refuse what neither is nor describes a plug-in: a class of them, numbers, and lists of several."""
        if isinstance(spec, type):
            raise ConfigurationError(f"{spec.__name__} is a class; make one of it: {spec.__name__}(…)")
        if spec is None or isinstance(spec, (int, float, list, tuple, set, frozenset, bytes)):
            raise ConfigurationError(
                f"{spec!r} is no {self.kind}; expected one, its name, or {{'name': …}} with settings. {self._known()}"
            )

    def _known(self) -> str:
        """What there is, in words, or where it is listed."""
        return f"Known: {', '.join(self)}" if len(list(self)) <= LISTED else f"Known: see 'sinklab list {self.plural}'"

    def _folder(self) -> Path:
        return Path(__file__).parent / self.plural

    def _files(self) -> set[str]:
        if not self._folder().is_dir():  # a kind whose plug-ins are all in other packages
            return set()
        stems = {name.removesuffix(".py") for name in os.listdir(self._folder()) if name.endswith(".py")} - BESIDES
        return {stem for stem in stems if not stem.startswith("_")}

    def marked(self) -> dict[str, Marked]:
        """Those in the files of other packages, by name."""
        found: dict[str, Marked] = {}
        for folder in packages():
            for marked in _marks(folder):
                if marked.kind != self.plural:
                    continue
                if marked.name in found or marked.name in self._files():
                    raise ContractError(f"two {self.kind} plug-ins are called {marked.name!r}; one of them is in {marked.file}")
                found[marked.name] = marked
        return found


@dataclasses.dataclass(frozen=True)
class Marked:
    """A plug-in in a file of another package that has not been imported."""

    kind: str
    name: str
    file: Path
    module: str
    line: int
    """Of the mark, from 1 on."""

    def docstring(self) -> str | None:
        """That of the class or function below the mark."""
        for node in ast.parse(self.file.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and self.line in [mark.lineno for mark in node.decorator_list]:
                return ast.get_docstring(node)
        return None


MARK = re.compile(r'^@(\w+)\.register\("(\w+)"\)', re.MULTILINE)


def packages() -> list[Path]:
    """The folders of the packages that bring plug-ins, as entry points of the group ``sinklab.packages`` name them.

    ``my_package = "my_package"`` is enough: every file of it is searched, without an import, for the marks
    ``@probes.register("my_probe")`` of each kind.

    Raises:
        ContractError: a package is named that is not there.
    """
    return [_package_folder(name, tuple(sys.path)) for name in sorted({point.value for point in entry_points("packages")})]


@functools.lru_cache(maxsize=16)
def _package_folder(name: str, path: tuple[str, ...]) -> Path:
    """Where a package is; ``path`` is that of the interpreter, which decides it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ContractError(f"an entry point of sinklab.packages names {name}, which is no package")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.lru_cache(maxsize=16)
def _marks(folder: Path) -> tuple[Marked, ...]:
    """All plug-ins that the files below a folder register; they are read once."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        module = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
        for match in MARK.finditer(text):
            found.append(Marked(match[1], match[2], file, module, text.count("\n", 0, match.start()) + 1))
    return tuple(found)


def entry_points(group: str) -> Sequence[importlib.metadata.EntryPoint]:
    """What other packages enter in a group of ours: ``packages`` or ``commands``."""
    # A search through all packages takes 15 ms, and a list of claims asks 200 times. An installation changes its folder.
    folders = tuple((path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.isdir(path))
    return tuple(_entry_points(folders).select(group=f"sinklab.{group}"))


@functools.lru_cache(maxsize=2)
def _entry_points(folders: tuple[tuple[str, int], ...]) -> importlib.metadata.EntryPoints:
    """Those of all packages, of every group."""
    # Python 3.11 gives a class of its own, which selects as the later one does.
    return typing.cast(importlib.metadata.EntryPoints, importlib.metadata.entry_points())


def _file_docstring(text: str) -> str | None:
    """Docstring of a file; where it stands first, in three quotes and without escapes, the rest of the file is not parsed."""
    first = re.match(r'"""([^"\\]*)"""', text)
    return inspect.cleandoc(first[1]) if first else ast.get_docstring(ast.parse(text))


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


def spelled(settings: Mapping[str, object]) -> str:
    """The text that is read as these settings: ``{"name": "entropy", "sink_position": 2}`` is ``entropy:sink_position=2``.

    Args:
        settings: name and settings as :meth:`Registry.settings` gives them; values that JSON has.
    """
    parts = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items() if key != "name"]
    return f"{settings['name']}:{','.join(parts)}" if parts else str(settings["name"])


def split_specs(text: str) -> list[str]:
    """The plug-ins of a list: ``"relu:uncounted=0,power=2,softmax"`` are two; ``key=value`` belongs to the one before."""
    specs: list[str] = []
    for part in _split(text):
        if specs and ":" in specs[-1] and re.match(r"[\w.]+\s*=", part):
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs


_PIECE = re.compile(r"""(?<=[=\[{(,:])\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*')|.""", re.DOTALL)
"""A character, or a quoted value whole; a quote within a value, as in ``path=it's.txt``, is a character."""


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets and quotes, without blanks around them; empty parts are dropped."""
    parts, depth = [""], 0
    for piece in _PIECE.findall(text):
        if len(piece) == 1:
            depth += (piece in "([{") - (piece in ")]}")
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]


def _parameters(plugin: Any) -> dict[str, inspect.Parameter]:
    """Settings of a class or function by name; of a function of something, what it is a function of is none of them."""
    return {
        name: parameter
        for name, parameter in inspect.signature(plugin).parameters.items()
        if isinstance(plugin, type) or parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
    }


def _checked(what: str, plugin: Any, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings of a class or function, converted to the types that it declares."""
    parameters = _parameters(plugin)
    for name in settings:
        if name not in parameters:
            hint = _did_you_mean(name, parameters)
            known = ", ".join(parameters) or "none"
            raise ConfigurationError(f"{what} has no setting {name!r}; it has {known}{'.' if hint else ''}{hint}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in settings:
            raise ConfigurationError(f"{what} needs the setting {name!r}; write {plugin.name}:{name}=…")
    return {name: _converted(f"{what}: {name}", _annotation(plugin, name), value) for name, value in settings.items()}


def _converted(what: str, annotation: Any, value: object) -> object:
    import pydantic

    try:
        adapter = pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    except pydantic.PydanticUserError:  # a type that cannot be checked (a protocol); the plug-in looks itself
        return value
    from sinklab.configuration import check_numbers

    try:
        converted = adapter.validate_python(value)
    except pydantic.ValidationError as error:
        problems = list(dict.fromkeys(problem["msg"][0].lower() + problem["msg"][1:] for problem in error.errors()))
        raise ConfigurationError(f"{what} = {value!r}: {', or '.join(problems)}") from None
    check_numbers(what, converted)
    return converted


def _takes(annotation: Any, value: object, *, strict: bool = False) -> bool:
    """Whether a type is declared and takes a value; a text is strictly no number, though it may be read as one."""
    import pydantic

    if annotation is Any:
        return False
    try:
        adapter = pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
        adapter.validate_python(value, strict=strict)
    except (pydantic.PydanticUserError, pydantic.ValidationError):
        return False
    return True


def _read_value(spec: str, key: str, text: str, declared: Any) -> object:
    """The value of a setting in YAML; as it is written where a text is declared and YAML reads something else."""
    from sinklab.configuration import read_yaml

    is_text = _takes(declared, text, strict=True)
    try:
        value: object = read_yaml(text)
    except ValueError:
        if is_text:
            return text
        raise ConfigurationError(f"{spec!r}: the value {text!r} of {key} is not YAML") from None
    return text if is_text and not _takes(declared, value) else value


def _annotation(plugin: Any, name: str) -> Any:
    """The type that a class or function declares for a setting; ``Any`` where it declares none that exists at run time."""
    owners: Sequence[Any] = [plugin]
    if isinstance(plugin, type):
        owners = plugin.__mro__ if dataclasses.is_dataclass(plugin) else [getattr(plugin, "__init__")]  # noqa: B009
    for owner in owners:
        annotations = getattr(owner, "__annotations__", {})
        if name in annotations:
            holder = types.SimpleNamespace(__annotations__={name: annotations[name]})
            try:
                return typing.get_type_hints(holder, vars(sys.modules[owner.__module__]))[name]
            except NameError:  # imported for type checkers only
                return Any
    return Any


def _lacking(cls: object) -> list[str]:
    """Methods that a class has only in the abstract, and what its bases declare as the class's own, with no value given."""
    declared = {
        name
        for base in getattr(cls, "__mro__", ())
        for name, kind in inspect.get_annotations(base).items()
        if str(kind).startswith("ClassVar") and name != "name" and not hasattr(cls, name)
    }
    return sorted({*getattr(cls, "__abstractmethods__", ()), *declared})


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1) or [longer for longer in known if name in longer.split("_")]
    return f" Did you mean {near[0]!r}?" if near else ""


def _origin(obj: object) -> str:
    return f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', '?')}"


operations: Registry[Any] = Registry("operation", "operations", "sinklab.attention.operation.Operation", default="softmax")
probes: Registry[Any] = Registry("probe", "probes", "sinklab.attention.probe.Probe")
interventions: Registry[Any] = Registry("intervention", "interventions", "sinklab.attention.intervention.Intervention")
corpora: Registry[Any] = Registry("corpus", "corpora", "sinklab.corpora.base.Corpus")
positions: Registry[Any] = Registry("position", "positions", "sinklab.positions.base.PositionScheme", default="rotary")
policies: Registry[Any] = Registry("policy", "policies", "sinklab.policies.base.Policy")
recipes: Registry[Any] = Registry("recipe", "recipes", "function")
tasks: Registry[Any] = Registry("task", "tasks", "sinklab.tasks.base.Task")
read_outs: Registry[Any] = Registry("read-out", "read_outs", "function")
claims: Registry[Any] = Registry("claim", "claims", "function")
