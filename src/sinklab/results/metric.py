"""Metric: what one number is, declared once; units, versions and definitions everywhere else come from here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from sinklab.errors import ContractError
from sinklab.registry import KINDS

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

__all__ = [
    "FRACTION",
    "LOSS",
    "PERCENTAGE",
    "STEPS",
    "VALUE_RATIO",
    "Coordinates",
    "Declared",
    "Metric",
    "Row",
    "SingleRow",
    "catalogue",
    "definitions",
    "definitions_of",
    "metrics_of",
    "over_seeds",
]

FRACTION, PERCENTAGE = (0.0, 1.0), (0.0, 100.0)
"""Ranges of a share, in parts of one and in percent. A difference or a quotient of shares has the unit and not the range."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """The declaration of one number that sinklab prints or stores: at the top of a file or in a class, so that it can be read.

    Args:
        name: unique in all of sinklab: lower-case words joined by underscores.
        unit: as in the column ``unit`` of the table: percent, fraction, weight, nats, norm, degrees, ….
        text: one sentence: what is averaged over what.
        paper: where the definition comes from, with its arXiv number; empty for our own.
        range: smallest and largest value that the definition allows. Over seeds a number of range ``FRACTION`` or
            ``PERCENTAGE`` has the interval of a share, and any other one that of a mean.
        version: raised when the definition changes; numbers of different versions are never merged.
        outcome: whether it is 1 or 0 of every single case: something that happened or did not. Several are a count, with the
            interval of one.
        over_seeds: what one number of several seeds is: their mean, or of what is the largest or least of a run, the worst
            case or a bound, that of all runs. A mean over texts of the largest of each, or a mean in the head or layer where it
            is largest, is a mean over seeds too.
    """

    name: str
    unit: str
    text: str
    paper: str = ""
    range: tuple[float, float] = (float("-inf"), float("inf"))
    version: int = 1
    outcome: bool = False
    over_seeds: Literal["mean", "max", "min"] = "mean"

    def bound(self, end: str) -> Metric:
        """The ``low`` or ``high`` end of the interval of this number, under its name with ``_low`` or ``_high``."""
        return dataclasses.replace(self, name=f"{self.name}_{end}", text=f"{end} end of the interval of {self.name}.")

    def of(self, unit: str) -> Metric:
        """The same number in the unit of the loss that a run takes."""
        return dataclasses.replace(self, unit=unit)


class Shared(TypedDict, total=False):
    """The columns of :data:`sinklab.results.table.COLUMNS` in which rows that are given at once do not differ."""

    unit: str
    version: int
    run_id: str
    model: str
    revision: str | None
    operation: str
    intervention: str | None
    policy: str | None
    corpus: str
    bos: int | None
    probe: str
    module: str
    part: str | None
    sink: str | None
    step: int | None
    seed: int | None


class Coordinates(Shared, total=False):
    """Where a number was measured, and of how many observations; arrays as in :class:`Row`."""

    count: int | np.ndarray
    layer: int | np.ndarray
    head: int | np.ndarray
    query_position: int | np.ndarray
    key_position: int | np.ndarray | None


class Row(Coordinates, total=False):
    """A row for the long table, by column, or many rows at once, as :func:`~sinklab.results.table.make_table` takes them.

    A value that is an array is a column: one-dimensional, all arrays of a row of one length, an entry for each of the rows.
    ``metric`` is a :class:`Metric`, which says ``unit`` and ``version`` too.
    """

    metric: Metric
    value: float | np.ndarray | None


class SingleRow(Shared, total=False):
    """One row of the long table with its number, and the metric by its name; columns that are null are left out."""

    metric: str
    value: float
    count: int
    layer: int
    head: int
    query_position: int
    key_position: int


LOSS = Metric("loss", "nats", "Mean next-token loss over the tokens that the run scores; count is their number.")
STEPS = Metric("steps", "steps", "Training steps that the run took: until its stop rule, or to its last step.")
VALUE_RATIO = Metric(
    "value_ratio",
    "ratio",
    "L2 norm of the value of the sink, or of the first token, over the mean norm of the other values of the text.",
    paper="Guo et al. 2024 (arXiv 2410.13835)",
)


def definitions(measured_by: Mapping[str, Iterable[Metric]]) -> list[dict[str, object]]:
    """What ``run.json`` says of the metrics in a table.

    Args:
        measured_by: value of the column ``probe`` to the metrics that may stand beside it.
    """
    return [
        {"probe": probe, "metric": m.name, "version": m.version, "text": m.text, "paper": m.paper, "unit": m.unit}
        for probe, metrics in measured_by.items()
        for m in metrics
    ]


def definitions_of(table: pd.DataFrame) -> list[dict[str, object]]:
    """The same for the metrics of a long table, as far as they are in the catalogue."""
    pairs = list(table[["probe", "metric"]].dropna().drop_duplicates().itertuples(index=False))
    known = _known({name for _, name in pairs})
    measured_by: dict[str, list[Metric]] = {}
    for probe, name in pairs:
        if name in known:
            measured_by.setdefault(probe, []).append(known[name].metric)
    return definitions(measured_by)


def over_seeds(names: Iterable[str]) -> dict[str, str]:
    """What one number of several seeds is, by the name of the metric; those that are not in the catalogue are left out."""
    return {name: declared.metric.over_seeds for name, declared in _known(set(names)).items()}


@dataclasses.dataclass(frozen=True)
class Declared:
    """A metric and where it is declared: the file, and its module, such as ``sinklab.probes.sink_rate``."""

    metric: Metric
    module: str
    file: Path


def catalogue(source: Path = Path(__file__).parents[1]) -> dict[str, Declared]:
    """Every metric that is declared in sinklab, and those of plug-ins of other packages that are imported, by name.

    Files are read as text and nothing is imported: a declaration is a call of ``Metric`` at the top of a file or in the body
    of a class, made of literals, f-strings and names of such constants, also those imported from other files of sinklab.

    Args:
        source: the folder of the package.

    Raises:
        ContractError: two declarations under one name, one inside a function, or one that cannot be read.
    """
    return _with_outside(_by_name(_declared(source)), source)


def _by_name(declared: Iterable[Declared]) -> dict[str, Declared]:
    metrics: dict[str, Declared] = {}
    for new in declared:
        known = metrics.setdefault(new.metric.name, new)
        if known is not new:
            raise ContractError(
                f"metric {new.metric.name!r} is declared twice, in {known.file} and {new.file}: import the first, or give the "
                "second another name"
            )
    return metrics


def _with_outside(metrics: dict[str, Declared], source: Path) -> dict[str, Declared]:
    """Those of other packages too, of sinklab itself; a plug-in may measure what another one declares."""
    for new in _outside() if source == Path(__file__).parents[1] else ():
        if metrics.setdefault(new.metric.name, new).metric != new.metric:
            _by_name((metrics[new.metric.name], new))
    return metrics


def _outside() -> Iterator[Declared]:
    """The metrics of plug-ins of other packages that are imported."""
    for plural, registry in KINDS.items():
        for name, plugin in registry.imported.items():
            if not plugin.__module__.startswith("sinklab."):
                file = Path(sys.modules[plugin.__module__].__file__ or "")
                yield from (Declared(metric, plugin.__module__, file) for metric in metrics_of(plural, name))


def _known(names: set[str], source: Path = Path(__file__).parents[1]) -> dict[str, Declared]:
    """The metrics of these names out of :func:`catalogue`, perhaps among others.

    To parse every file takes longer than some measurements: a file is not, if what it declares is written out in it and none of
    it is asked for. A name that is written out nowhere, such as one of several in a comprehension, takes them all.
    """
    reader = _reader(source)
    files = (module for module, text in _texts(source).items() if not names.isdisjoint(_WRITTEN_OUT.findall(text)))
    declared = (declared for module in files for declared in reader.file(module).declared)
    known = _with_outside(_by_name(declared), source)
    ends = {f"{name}_{end}" for name in known for end in ("low", "high")}  # made by ``bound``, and declared nowhere
    return known if names <= known.keys() | ends else catalogue(source)


def metrics_of(plural: str, name: str) -> tuple[Metric, ...]:
    """What a plug-in measures: ``METRICS`` of its file, or ``metrics`` of a class in it; nothing without either.

    Files of sinklab are read as text; of other packages they are imported.

    Raises:
        UnknownNameError: no such plug-in.
        ContractError: as for :func:`catalogue`.
    """
    source = Path(__file__).parents[1]
    if (source / plural / f"{name}.py").is_file():
        return _Reader(source).file(f"sinklab.{plural}.{name}").metrics()
    plugin: object = KINDS[plural][name]
    declared: tuple[Metric, ...] = getattr(plugin, "metrics", ()) or getattr(sys.modules[plugin.__module__], "METRICS", ())
    return declared


@functools.cache
def _declared(source: Path) -> tuple[Declared, ...]:
    reader = _reader(source)
    return tuple(declared for module in _texts(source) for declared in reader.file(module).declared)


@functools.cache
def _texts(source: Path) -> dict[str, str]:
    """Module to text of the files that declare metrics, in the order of their paths."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    modules = {path: ".".join(("sinklab", *path.relative_to(source).with_suffix("").parts)) for path in texts}
    return {modules[path]: text for path, text in texts.items() if "Metric(" in text}


_WRITTEN_OUT = re.compile(r'\bMetric\(\s*(?:name=)?"(\w+)"')
"""Name of a metric whose declaration has it as a literal."""


@functools.cache
def _reader(source: Path) -> _Reader:
    return _Reader(source)


class _Reader:
    """Files of one tree by module, each parsed once."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self._files: dict[str, _File] = {}

    def file(self, module: str) -> _File:
        if module not in self._files:
            path = self.source.joinpath(*module.split(".")[1:]).with_suffix(".py")
            if not path.is_file():  # of a tree that is not all of sinklab, and of packages
                spec = importlib.util.find_spec(module)
                path = Path(spec.origin or "") if spec is not None else path
            self._files[module] = _File(module, path, self)
        return self._files[module]


class _File:
    """One file, and the values of its constants as far as they are asked for."""

    def __init__(self, module: str, path: Path, reader: _Reader) -> None:
        self.module, self.path, self.reader = module, path, reader
        self._metrics: list[tuple[int, Metric]] = []
        self._values: dict[str, object] = {}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self._imports = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sinklab.")
            for alias in node.names
        }
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self._constants = dict(_assigned(tree.body))
        self._fields = [field for node in classes for field in _assigned(node.body)]
        outside = {id(part) for _, value in (*self._constants.items(), *self._fields) for part in ast.walk(value)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _declares(node) and id(node) not in outside:
                raise ContractError(f"{path}:{node.lineno}: a Metric is declared at the top of a file or in a class, not here")

    @functools.cached_property
    def declared(self) -> list[Declared]:
        """The metrics of this file, in the order of their lines, whichever of them were asked for before."""
        for name, value in self._constants.items():
            if any(map(_declares, ast.walk(value))):
                self.value(name)
        for number, (name, value) in enumerate(self._fields):
            if any(map(_declares, ast.walk(value))):
                self._values[f"{name} {number}"] = self._evaluated(value)
        in_order = sorted(self._metrics, key=lambda declared: declared[0])
        return [Declared(metric, self.module, self.path) for _, metric in in_order]

    def metrics(self) -> tuple[Metric, ...]:
        """``METRICS`` of the file or ``metrics`` of its classes."""
        if "METRICS" in self._constants:
            return tuple(self.value("METRICS"))
        fields = [self._evaluated(value) for name, value in self._fields if name == "metrics"]
        return tuple(metric for field in fields for metric in field)

    def value(self, name: str) -> Any:
        """The value of a constant of the file, or of one that it imports."""
        if name not in self._values:
            if name in self._constants:
                self._values[name] = self._evaluated(self._constants[name])
            elif name in self._imports:
                module, original = self._imports[name]
                self._values[name] = self.reader.file(module).value(original)
            else:
                raise KeyError(name)
        return self._values[name]

    def _evaluated(self, node: ast.expr) -> Any:
        bound = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        known: dict[str, Any] = {**_PLAIN, "Metric": functools.partial(self._declare, node.lineno), "__builtins__": {}}
        try:
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and part.id not in known and part.id not in bound:
                    known[part.id] = self.value(part.id)
            return eval(compile(ast.Expression(node), str(self.path), "eval"), known)
        except (KeyError, NameError, TypeError, AttributeError) as error:
            raise ContractError(
                f"{self.path}:{node.lineno}: a Metric is declared with literals, f-strings and names of constants, so that it "
                f"can be read without running the file; not understood: {error}"
            ) from error

    def _declare(self, line: int, /, *args: Any, **fields: Any) -> Metric:
        metric = Metric(*args, **fields)
        self._metrics.append((line, metric))
        return metric


_PLAIN = {"range": range, "float": float, "tuple": tuple, "dict": dict}
"""What a declaration may call beside ``Metric``."""


def _declares(node: ast.AST) -> bool:
    """Whether it is a call of ``Metric`` with a name (not of what stands in for it below)."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Metric"
    return called and not any(isinstance(argument, ast.Starred) for argument in node.args)  # type: ignore[attr-defined]


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Names that the statements assign, with what is assigned."""
    for node in body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            values = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                values = list(zip(target.elts, node.value.elts, strict=True))
            yield from ((name.id, value) for name, value in values if isinstance(name, ast.Name))
