"""Tables on narrow terminals: nothing is cut off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from sinklab.results.terminal import fitted


def printed(width: int) -> list[str]:
    table = Table(box=None, pad_edge=False)
    table.add_column("verdict", no_wrap=True)
    table.add_column("statement")
    table.add_row("not reproduced", "sinks are at the first of all tokens")
    console = Console(file=io.StringIO(), width=width)
    for part in fitted(table, console):
        console.print(part)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (52, ["verdict         statement", "not reproduced  sinks are at the first of all tokens"]),
        (32, ["verdict         statement", "not reproduced  sinks are at the", f"{'':16}first of all", f"{'':16}tokens"]),
        (25, ["verdict         statement", "not reproduced  sinks are", f"{'':16}at the", f"{'':16}first of", f"{'':16}all"]),
        (24, ["not reproduced", "  statement: sinks are", "at the first of all", "tokens"]),
    ],
)
def test_a_column_that_must_not_wrap_is_never_cut(width, lines):
    assert printed(width)[: len(lines)] == lines
