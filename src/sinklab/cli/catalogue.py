"""The commands ``sinklab list`` and ``sinklab show``: what there is to name, and what it is."""

from __future__ import annotations

from sinklab.cli import output
from sinklab.cli.describe import catalogue, describe
from sinklab.studies.arguments import AsJson, command

__all__ = ["list_", "show"]


@command("list")
def list_(kind: str | None = None, *, as_json: AsJson = False) -> None:
    """List what there is to name on the command line, with one sentence each.

    Args:
        kind: probes, operations, interventions, positions, policies, corpora, tasks, recipes, read_outs, claims or models; by
            default all.

    Examples:
        sinklab list
        sinklab list probes --json
    """
    listed = catalogue(kind)
    if as_json:
        output.print_json(listed)
    else:
        output.print_catalogue(listed)


@command
def show(name: str, *, as_json: AsJson = False) -> None:
    """Say what a plug-in or a metric is: definition, parameters, papers.

    Args:
        name: A probe, an operation, a recipe, a corpus, …, or a metric of a probe.

    Examples:
        sinklab show sink_rate
        sinklab show gu2024
    """
    descriptions = describe(name)
    if as_json:
        output.print_json([description.to_dict() for description in descriptions])
        return
    for description in descriptions:
        output.print_description(description)
