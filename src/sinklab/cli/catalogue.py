"""The commands ``sinklab list`` and ``sinklab show``: what there is to name, and what it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from sinklab.cli.derive import plain
from sinklab.cli.describe import Description, catalogue, describe
from sinklab.results.run import Listing
from sinklab.studies.arguments import command

__all__ = ["list_", "show"]


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
        name: A name from 'sinklab list' (a probe, an operation, a recipe, a corpus, …), or a metric of a table.

    Examples:
        sinklab show sink_rate
        sinklab show gu2024
    """
    descriptions = describe(name)
    return Listing([description.to_dict() for description in descriptions], lambda record: _descriptions(descriptions))


def _names(listed: Mapping[str, Mapping[str, str]]) -> Iterator[RenderableType]:
    """Names and first sentences, by kind."""
    width = 2 + max((len(name) for names in listed.values() for name in names), default=0)
    for number, (kind, names) in enumerate(listed.items()):
        yield f"{chr(10) if number else ''}[bold]{kind}[/bold]"
        yield from (Text(f"  {name:<{width}}{plain(summary)}") for name, summary in names.items())


def _descriptions(descriptions: Sequence[Description]) -> Iterator[RenderableType]:
    """Plug-ins, an empty line between them."""
    for number, description in enumerate(descriptions):
        if number:
            yield ""
        yield from _description(description)


def _description(description: Description) -> Iterator[RenderableType]:
    """Docstring, parameters, definitions and papers of a plug-in, and its file."""
    version = "" if description.version is None else f", version {description.version}"
    yield f"[bold]{description.name}[/bold] ({description.kind}{version})"
    yield Text(plain(description.summary))
    first, _, rest = description.text.partition("\n\n")
    is_repeated = " ".join(first.split()) == description.summary  # of a plug-in whose class says what its file would
    if text := rest if is_repeated else description.text:
        yield Text(f"\n{plain(text)}")
    if description.parameters:
        yield from _parameters(description)
    if description.metrics:
        yield "\n[bold]definitions[/bold]"
        for metric in description.metrics:
            yield f"  [bold]{metric.name}[/bold] {escape(f'[{metric.unit}]')} version {metric.version}"
            yield Text(f"    {metric.text}{f'  {metric.paper}' if metric.paper else ''}")
    if description.papers:
        yield "\n[bold]papers[/bold]"
        yield from (Text(f"  https://arxiv.org/abs/{paper}") for paper in description.papers)
    if description.file:
        yield "\n[bold]file[/bold]"
        yield Text(f"  {description.file}")


def _parameters(description: Description) -> Iterator[RenderableType]:
    """Parameters with their types; of a recipe the fields of its configuration, as ``--set`` takes them."""
    is_recipe = description.kind == "recipe"
    yield f"\n[bold]{'fields, for --set' if is_recipe else 'parameters'}[/bold]"
    for parameter in description.parameters:
        default = "" if parameter.default is None else f" = {parameter.default}"
        yield Text(f"  {parameter.name}{default}" if is_recipe else f"  {parameter.name}: {parameter.type}{default}")
        if parameter.text:
            yield Text(f"      {plain(parameter.text)}", style="dim")
