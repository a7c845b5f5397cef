"""What a run shows: nothing, a line per record, or a bar with the newest numbers."""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sinklab.training.progress import Bar, display


def show(screen) -> None:
    screen.note("weights of [somewhere]")
    screen.preparing("encoding", 10, 0)
    screen.step(3)
    screen.record(3, 2.34567, 12345.6, 61.2)
    screen.result(3, {"sink_rate": 12.5, "sink_loss_gap": 0.123456})


def test_lines_where_nobody_watches(capsys):
    with display(10) as screen:
        show(screen)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "weights of [somewhere]",
        "step 3/10  loss 2.3457  12,346 tokens/s  0:01:01 left",
        "step 3/10  sink rate 12.5 %  sink loss gap 0.123",
    ]


def test_nothing_when_not_wanted(capsys):
    with display(10, wanted=False) as screen:
        show(screen)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=160)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
    with Progress(*columns, console=console, auto_refresh=False) as bars:
        screen = Bar(10, bars)
        show(screen)
        bars.refresh()
    assert "weights of [somewhere]" in stream.getvalue()
    for part in (
        "training",
        "3/10",
        "loss 2.346",
        "12,346 tokens/s",
        "0:01:01 left",
        "sink rate 12.5 %",
        "sink loss gap 0.123",
    ):
        assert part in stream.getvalue(), part
