"""What the commands print: plain text when piped, colour and progress on a terminal; results on stdout, the rest on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.cli.describe import Description
from sinklab.results.run import PIPE_WIDTH, Listing, Result

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "print_catalogue",
    "print_comparison",
    "print_description",
    "print_json",
    "print_result",
]


def _out() -> Console:
    # Made for each call, so that it writes to the stdout of the moment (tests and pagers replace it).
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


STATUSES = {"diverged": 3, "stopped": 130}
"""What became of a training to the exit status of its command."""


def print_result(result: Any, as_json: bool = False) -> int:
    """Show what a command returned, and give the exit status: that of :data:`STATUSES`, or 1 if parts failed (on stderr).

    Of the processes of ``torchrun`` the first one speaks.
    """
    if isinstance(result, Result):
        status = STATUSES.get(str(result.summary.get("status")), 0)
        if os.environ.get("RANK", "0") != "0":
            return status
        if as_json:
            sys.stdout.write(result.to_json())
        else:
            result.show()
        errors = result.summary.get("errors") or []
        for error in errors:
            sys.stderr.write(f"failed: {error}\n")
        return 1 if errors else status
    if isinstance(result, Listing):
        if as_json:
            sys.stdout.write(result.to_json())
        else:
            result.show()
    elif result is not None:
        sys.stdout.write(f"{result}\n")
    return 0


def print_json(record: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_comparison(table: pd.DataFrame, verdicts: Sequence[str]) -> None:
    """One row a number, one column an audit; then what each audit found, in a sentence."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for name in table.columns:
        shown.add_column(escape(str(name)))
    for row, values in zip(table.index, table.itertuples(index=False), strict=True):
        shown.add_row(escape(str(row)), *(escape(str(value)) for value in values))
    out = _out()
    out.print(shown)
    for verdict in verdicts:
        out.print(f"\n{verdict}", markup=False)


def print_catalogue(listed: Mapping[str, Mapping[str, str]]) -> None:
    """Names and first sentences, by kind."""
    out = _out()
    width = 2 + max((len(name) for names in listed.values() for name in names), default=0)
    for number, (kind, names) in enumerate(listed.items()):
        out.print(f"{chr(10) if number else ''}[bold]{kind}[/bold]")
        for name, summary in names.items():
            out.print(f"  {name:<{width}}{summary}", markup=False)


def print_description(description: Description) -> None:
    """Docstring, parameters, definitions and papers of a plug-in."""
    out = _out()
    version = "" if description.version is None else f", version {description.version}"
    out.print(f"[bold]{description.name}[/bold] ({description.kind}{version})")
    out.print(description.summary, markup=False)
    if description.text:
        out.print(f"\n{description.text}", markup=False)
    if description.parameters:
        recipe = description.kind == "recipe"
        out.print(f"\n[bold]{'fields, for --set' if recipe else 'parameters'}[/bold]")
        for parameter in description.parameters:
            default = "" if parameter.default is None else f" = {parameter.default}"
            out.print(
                f"  {parameter.name}{default}" if recipe else f"  {parameter.name}: {parameter.type}{default}", markup=False
            )
            if parameter.text:
                out.print(f"      {parameter.text}", markup=False, style="dim")
    if description.metrics:
        out.print("\n[bold]definitions[/bold]")
        for metric in description.metrics:
            out.print(f"  [bold]{metric.name}[/bold] {escape(f'[{metric.unit}]')} version {metric.version}")
            out.print(f"    {metric.definition}{f'  {metric.paper}' if metric.paper else ''}", markup=False)
    if description.papers:
        out.print("\n[bold]papers[/bold]")
        for paper in description.papers:
            out.print(f"  https://arxiv.org/abs/{paper}", markup=False)
    out.print("\n[bold]file[/bold]")
    out.print(f"  {description.file}", markup=False)
