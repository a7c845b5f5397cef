"""Descriptions of plug-ins, read from their files as text: ``sinklab list`` and ``show`` import no plug-in and no torch."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinklab.errors import ContractError, UnknownNameError
from sinklab.models.embedded import embedded_names, embedded_path
from sinklab.registry import KINDS, Registry, registry_of
from sinklab.results.metric import Declared, Metric, metrics_of
from sinklab.results.metric import catalogue as metrics
from sinklab.results.source_text import file_of, registers, unparsed

__all__ = ["Description", "Parameter", "catalogue", "describe"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a plug-in, as its file writes it; of a recipe one field of its configuration, with what it means."""

    name: str
    type: str
    default: str | None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Description:
    """What a plug-in's file says of it."""

    kind: str
    name: str
    summary: str
    text: str
    parameters: list[Parameter]
    metrics: tuple[Metric, ...]
    papers: list[str]
    version: int | None
    file: str

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        shown = ("name", "text", "unit", "paper", "version")
        record = dataclasses.asdict(self)
        return record | {"metrics": [{key: metric[key] for key in shown} for metric in record["metrics"]]}


def catalogue(kind: str | None = None) -> dict[str, dict[str, str]]:
    """Kind to name to summary; the embedded models are listed as a kind of their own, ``models``.

    Raises:
        UnknownNameError: no such kind.
    """
    if kind in ("model", "models"):
        return {"models": {name: _model_summary(name) for name in embedded_names()}}
    kinds = KINDS if kind is None else {registry_of(kind).plural: registry_of(kind)}
    listed = {plural: {name: _summary(registry, name) for name in registry} for plural, registry in kinds.items()}
    if kind is None:
        listed["models"] = {name: _model_summary(name) for name in embedded_names()}
    return listed


def describe(name: str) -> list[Description]:
    """The plug-ins (of any kind) called ``name``, and the metric of that name where none of them declares it, with what does.

    Raises:
        UnknownNameError: nothing is called so; the message suggests the nearest name, or what can be done with a model.
    """
    descriptions = [_read(registry.kind, plural, name) for plural, registry in KINDS.items() if name in registry]
    if any(metric.name == name for description in descriptions for metric in description.metrics):
        return descriptions
    declared = metrics()
    if name in declared:
        descriptions.append(_metric(declared[name]))
    if descriptions:
        return descriptions
    if _is_model(name):
        raise UnknownNameError(
            f"{name!r} is a model, and this says what plug-ins and metrics are. 'sinklab audit {name}' measures it; in "
            f"Python sinklab.show({name!r}, TEXT) draws its heads"
        )
    known = [plugin for registry in KINDS.values() for plugin in registry]
    near = difflib.get_close_matches(name, [*known, *declared], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"nothing is called {name!r}.{hint} See: sinklab list")


def _is_model(name: str) -> bool:
    """Whether a name is that of an embedded model, of a checkpoint in a directory, or of one on the hub."""
    folder = Path(name)
    return (folder / "config.json").is_file() if folder.is_dir() else name.startswith("embedded:") or "/" in name


def _metric(declared: Declared) -> Description:
    """One metric, and what measures it."""
    metric, (_, *parts) = declared.metric, declared.module.split(".")
    registry = KINDS.get(parts[0])
    if registry is not None and parts[-1] not in registry:
        registry = None
    return Description(
        kind=registry.kind if registry is not None else "metric",
        name=parts[-1] if registry is not None else metric.name,
        summary=registry.summary(parts[-1]) if registry is not None else f"Declared in {declared.module}.",
        text="",
        parameters=[],
        metrics=(metric,),
        papers=_papers(metric.paper),
        version=metric.version,
        file=str(declared.file),
    )


def _papers(text: str) -> list[str]:
    return sorted(set(re.findall(r"\b\d{4}\.\d{5}\b", text)))


def _summary(registry: Registry[Any], name: str) -> str:
    """What a plug-in is; of a foreign one that is broken why, so that the others are listed all the same."""
    try:
        return registry.summary(name)
    except ContractError as error:
        cause = error.__cause__
        text = str(error) if cause is None else f"cannot be imported: {type(cause).__name__}: {cause}"
        return " ".join(text.split())


def _model_summary(name: str) -> str:
    config = json.loads((embedded_path(name) / "config.json").read_text(encoding="utf-8"))
    _, again, seed = name.partition("-")  # a further training of the same recipe
    return (
        f"{config['operation']['name']} attention, {config['num_hidden_layers']} layers of {config['num_attention_heads']} "
        f"heads, context {config['max_position_embeddings']}, trained on Python source{', seed ' + seed if again else ''}"
    )


def _read(kind: str, plural: str, name: str) -> Description:
    path = file_of(plural, name)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if plural == "recipes":
        return _recipe(name, path, tree)
    if plural in ("claims", "read_outs"):
        return _function(kind, plural, name, path, tree)
    cls = next((node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and registers(node, name)), None)
    if cls is None:
        raise ContractError(f"{path} must register a {kind} called {name!r}, by which it is looked for, and does not")
    text = inspect.cleandoc(ast.get_docstring(cls) or "")
    metrics = metrics_of(plural, name) if plural == "probes" else ()
    cited = "\n".join([text, *(metric.paper for metric in metrics), ast.get_docstring(tree) or ""])
    declared = [node.value for node in _fields(cls, "version") if node.value is not None]
    unchanged = 1 if plural == "interventions" else None
    return Description(
        kind=kind,
        name=name,
        summary=registry_of(kind).summary(name),
        text=text,
        parameters=list({parameter.name: parameter for parameter in _parameters(cls, tree)}.values()),
        metrics=metrics,
        papers=_papers(cited),
        version=int(ast.literal_eval(declared[0])) if declared else unchanged,
        file=str(path),
    )


def _recipe(name: str, path: Path, tree: ast.Module) -> Description:
    """A recipe is a function: it is called and its configuration shown field by field; only here is a plug-in imported."""
    recipe = KINDS["recipes"][name]
    text = inspect.getdoc(recipe) or ""
    return Description(
        kind="recipe",
        name=name,
        summary=KINDS["recipes"].summary(name),
        text=text,
        parameters=list(_config_fields(recipe(), "")),
        metrics=(),
        papers=_papers(f"{text}\n{ast.get_docstring(tree) or ''}"),
        version=None,
        file=str(path),
    )


def _function(kind: str, plural: str, name: str, path: Path, tree: ast.Module) -> Description:
    """A claim, with what it states, or a read-out, with its metrics; both are functions."""
    function = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and registers(node, name)), None)
    if function is None:
        raise ContractError(f"{path} must register a {kind} called {name!r}, by which it is looked for, and does not")
    text = inspect.cleandoc(ast.get_docstring(function) or "")
    if plural == "claims":
        claim = KINDS["claims"][name]()
        costs = ", ".join(f"{cost} at scale {scale}" for scale, cost in claim.costs.items())
        published = f"Published: {claim.published}\n{claim.reference}"
        text = "\n\n".join(part for part in (f"Claim: {claim.statement}", published, f"Cost: {costs}.", text) if part)
    metrics = metrics_of(plural, name)
    return Description(
        kind=kind,
        name=name,
        summary=registry_of(kind).summary(name),
        text=text,
        parameters=[],
        metrics=metrics,
        papers=_papers("\n".join([text, ast.get_docstring(tree) or "", *(metric.text for metric in metrics)])),
        version=None,
        file=str(path),
    )


def _config_fields(section: Any, prefix: str) -> Iterator[Parameter]:
    """Every field of a configuration by its dotted path, as ``--set`` takes it."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if hasattr(type(value), "model_fields"):
            yield from _config_fields(value, f"{prefix}{name}.")
        else:
            kind = field.annotation
            shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            yield Parameter(f"{prefix}{name}", shown, json.dumps(value), field.description or "")


def _parameters(cls: ast.ClassDef, tree: ast.Module) -> Iterator[Parameter]:
    """Arguments of ``__init__``, or the fields of a dataclass, those of its bases first; of two of a name the last counts."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            ordered = [*node.args.posonlyargs, *node.args.args][1:]
            defaults: list[ast.expr | None] = [None] * len(ordered)
            if node.args.defaults:
                defaults[-len(node.args.defaults) :] = node.args.defaults
            for argument, default in zip([*ordered, *node.args.kwonlyargs], [*defaults, *node.args.kw_defaults], strict=True):
                yield Parameter(argument.arg, unparsed(argument.annotation) or "", unparsed(default))
            return
    for base, home in _bases(cls, tree):
        yield from _parameters(base, home)
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation)
            if not annotation.startswith("ClassVar"):
                yield Parameter(node.target.id, annotation, unparsed(node.value))


def _bases(cls: ast.ClassDef, tree: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.Module]]:
    """Classes of sinklab that a class derives from, each with the file that it stands in."""
    names = {base.id for base in cls.bases if isinstance(base, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            yield node, tree
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("sinklab."):
            for alias in node.names:
                if (alias.asname or alias.name) in names:
                    yield from _class_in(node.module, alias.name)


def _class_in(module: str, name: str) -> Iterator[tuple[ast.ClassDef, ast.Module]]:
    """The class of a name in a module that is parsed and not imported, with the file; nothing where it has none."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:
        home = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        yield from ((node, home) for node in home.body if isinstance(node, ast.ClassDef) and node.name == name)


def _fields(cls: ast.ClassDef, name: str) -> Iterator[ast.Assign | ast.AnnAssign]:
    for node in cls.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield node  # type: ignore[misc]
