"""Commands that need no model: list and show (what there is to name, without importing any of it), compare and report."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

import sinklab
from sinklab.cli.derive import plain, rejoined
from sinklab.errors import UnknownNameError
from sinklab.models.embedded import embedded_names, embedded_path
from sinklab.registry import KINDS, Registry, registry_of
from sinklab.results.blocks import Block, Facts, Grid, Say
from sinklab.results.file import check_file
from sinklab.results.metric import Metric, metrics_of
from sinklab.results.run import Listing
from sinklab.studies.arguments import OverwriteFile, command

PACKAGE = Path(sinklab.__file__).parent

DEFINITIONS = PACKAGE / "cli" / "definitions.json"
"""Records by name, so that a definition is shown without importing what measures it; ``make docs`` writes it."""


Description = dict[str, Any]
"""What a plug-in or a metric says of itself, as ``--json`` has it: kind, name, summary, text, parameters (each with name, type,
default and text), metrics (each with name, text, unit, paper and version), papers, version and file."""


def catalogue(kind: str | None = None) -> dict[str, dict[str, str]]:
    """Kind to name to summary; the embedded models are listed as a kind of their own, ``models``.

    Raises:
        UnknownNameError: no such kind.
    """
    if kind in ("model", "models"):
        return {"models": {name: _model_summary(name) for name in embedded_names()}}
    kinds = KINDS if kind is None else {registry_of(kind).plural: registry_of(kind)}
    listed = {plural: {name: registry.summary(name) for name in registry} for plural, registry in kinds.items()}
    if kind is None:
        listed["models"] = {name: _model_summary(name) for name in embedded_names()}
    return listed


def describe(name: str) -> list[Description]:
    """The plug-ins (of any kind) called ``name``, and the metric of a probe; ``run.json`` defines those of its table.

    Raises:
        UnknownNameError: nothing is called so; the message suggests the nearest name.
    """
    kept = json.loads(DEFINITIONS.read_text(encoding="utf-8")).get(name, [])  # for which nothing is imported
    kinds = {record["kind"] for record in kept}
    found = [record | {"file": record["file"] and str(PACKAGE / record["file"])} for record in kept]
    found += [plugin_record(one, name) for one in KINDS.values() if name in one and one.kind not in kinds]
    if not found:
        near = difflib.get_close_matches(name, [plugin for registry in KINDS.values() for plugin in registry], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"no plug-in and no metric of a probe is called {name!r}.{hint} See: sinklab list")
    return found


def described(kind: str, name: str, summary: str, text: str, metrics: Sequence[Metric], **more: Any) -> Description:
    """A record of these parts, with the others empty."""
    shown = [{key: getattr(one, key) for key in ("name", "text", "unit", "paper", "version")} for one in metrics]
    record = {"kind": kind, "name": name, "summary": summary, "text": text, "parameters": [], "metrics": shown}
    return record | {"papers": [], "version": None, "file": ""} | more


def papers(text: str) -> list[str]:
    """The numbers of arXiv in a text, sorted."""
    return sorted(set(re.findall(r"\b\d{4}\.\d{5}\b", text)))


def _model_summary(name: str) -> str:
    config = json.loads((embedded_path(name) / "config.json").read_text(encoding="utf-8"))
    _, again, seed = name.partition("-")  # a further training of the same recipe
    return (
        f"{config['operation']['name']} attention, {config['num_hidden_layers']} layers of {config['num_attention_heads']} "
        f"heads, context {config['max_position_embeddings']}, trained on Python source{', seed ' + seed if again else ''}"
    )


def plugin_record(registry: Registry[Any], name: str) -> Description:
    """Docstring, settings, metrics and papers of a plug-in; of a claim what it states, of a recipe its configuration."""
    plugin = registry[name]
    text, plural = inspect.getdoc(plugin) or "", registry.plural
    metrics = metrics_of(plural, name) if plural in ("probes", "read_outs", "claims") else ()
    more: dict[str, Any] = {}
    if plural == "recipes":
        more["parameters"] = list(_config_fields(plugin(), ""))
    elif plural == "claims":
        claim = plugin()
        costs = ", ".join(f"{cost} at scale {scale}" for scale, cost in claim.costs.items())
        published = f"Published: {claim.published}\n{claim.reference}"
        text = "\n\n".join(part for part in (f"Claim: {claim.statement}", published, f"Cost: {costs}.", text) if part)
    elif isinstance(plugin, type):
        more = {"parameters": list(_arguments(plugin)), "version": getattr(plugin, "version", None)}
    module = sys.modules[plugin.__module__]
    about = "\n".join([text, module.__doc__ or "", *(f"{one.paper} {one.text}" for one in metrics)])
    more |= {"papers": papers(about), "file": str(module.__file__)}
    return described(registry.kind, name, registry.summary(name), text, metrics, **more)


def _config_fields(section: Any, prefix: str) -> Iterator[dict[str, Any]]:
    """Every field of a configuration by its dotted path, as ``--set`` takes it."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if hasattr(type(value), "model_fields"):
            yield from _config_fields(value, f"{prefix}{name}.")
        else:
            kind = field.annotation
            shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            yield {"name": f"{prefix}{name}", "type": shown, "default": json.dumps(value), "text": field.description or ""}


def _arguments(cls: type) -> Iterator[dict[str, Any]]:
    """What its constructor takes."""
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind, default = parameter.annotation, parameter.default
        shown = kind if isinstance(kind, str) else "" if kind is parameter.empty else inspect.formatannotation(kind)
        yield {"name": name, "type": shown, "default": None if default is parameter.empty else repr(default), "text": ""}


@command("list")
def list_(kind: str | None = None) -> Listing:
    """List all names that the command line takes, with a sentence on each.

    Args:
        kind: probes, operations, interventions, positions, policies, corpora, tasks, recipes, read_outs, claims or models; by
            default all.

    Examples:
        sinklab list
        sinklab list probes --json
    """
    return Listing(catalogue(kind), _names)


@command
def show(name: str) -> Listing:
    """Say what a plug-in or a metric is: definition, parameters, papers.

    Args:
        name: A name from 'sinklab list' (a probe, an operation, a recipe, a corpus, …), or a metric of a probe.

    Examples:
        sinklab show sink_rate
        sinklab show gu2024
    """
    descriptions = describe(name)
    return Listing(descriptions, _shown)


def _names(listed: Mapping[str, Mapping[str, str]]) -> Iterator[RenderableType]:
    """Names and first sentences, by kind."""
    width = 2 + max((len(name) for names in listed.values() for name in names), default=0)
    for number, (kind, names) in enumerate(listed.items()):
        yield f"{chr(10) if number else ''}[bold]{kind}[/bold]"
        yield from (Text(f"  {name:<{width}}{plain(summary)}") for name, summary in names.items())


def _shown(descriptions: Sequence[Description]) -> Iterator[RenderableType]:
    """Docstring, parameters, definitions and papers of plug-ins, and their files; an empty line between them."""
    for number, one in enumerate(descriptions):
        version = "" if one["version"] is None else f", version {one['version']}"
        yield f"{chr(10) if number else ''}[bold]{one['name']}[/bold] ({one['kind']}{version})"
        yield Text(plain(one["summary"]))
        first, _, rest = one["text"].partition("\n\n")
        is_repeated = " ".join(first.split()) == one["summary"]  # of a plug-in whose class says what its file would
        if text := rest if is_repeated else one["text"]:
            yield Text(f"\n{rejoined(plain(text))}")
        yield from _parameters(one)
        if one["metrics"]:
            yield "\n[bold]definitions[/bold]"
        for metric in one["metrics"]:
            yield f"  [bold]{metric['name']}[/bold] {escape('[' + metric['unit'] + ']')} version {metric['version']}"
            yield Text(f"    {metric['text']}{'  ' if metric['paper'] else ''}{metric['paper']}")
        if one["papers"]:
            yield "\n[bold]papers[/bold]"
            yield from (Text(f"  https://arxiv.org/abs/{paper}") for paper in one["papers"])
        if one["file"]:
            yield "\n[bold]file[/bold]"
            yield Text(f"  {one['file']}")


def _parameters(description: Description) -> Iterator[RenderableType]:
    """Parameters with their types; of a recipe the fields of its configuration, as ``--set`` takes them."""
    is_recipe = description["kind"] == "recipe"
    if description["parameters"]:
        yield f"\n[bold]{'fields, for --set' if is_recipe else 'parameters'}[/bold]"
    for one in description["parameters"]:
        default = "" if one["default"] is None else f" = {one['default']}"
        yield Text(f"  {one['name']}{default}" if is_recipe else f"  {one['name']}: {one['type']}{default}")
        if one["text"]:
            yield Text(f"      {plain(one['text'])}", style="dim")


@command
def compare(folders: list[Path], *, out: Path | None = None, overwrite: OverwriteFile = False) -> Listing:
    """Put audits side by side.

    Prints one table of their numbers and settings, and the finding of each.

    Args:
        folders: Output directories of two or more runs of 'sinklab audit'.
        out: Write the comparison as one HTML page too.

    Examples:
        sinklab compare sinklab-audit/embedded-softmax sinklab-audit/embedded-sigmoid --out both.html
    """
    check_file(out, overwrite)
    from sinklab.studies.audit.compare import Comparison

    comparison = Comparison(folders)
    page = comparison.write(out, overwrite=overwrite) if out is not None else None

    def display(record: object) -> Iterator[Block]:
        shown = comparison.as_text()
        yield Grid(["", *shown.columns], [[row, *shown.loc[row]] for row in shown.index])
        yield from map(Say, comparison.findings)
        if comparison.warning:
            yield Facts([("warning", comparison.warning)])
        if page is not None:
            yield Facts([("page", str(page))])

    return Listing(comparison.table.to_dict(), display)


@command
def report(folder: Path) -> Path:
    """Make report.html again from the files of an audit; needs no model.

    Args:
        folder: Output directory of 'sinklab audit', 'causes' or 'origin'; runs of other commands have no page.

    Examples:
        sinklab report sinklab-audit/embedded-softmax
    """
    from sinklab.studies.audit.page import write_report

    return write_report(folder)
