"""What a result shows: numbers are written in one way, and every rendering shows every number of the blocks."""

from __future__ import annotations

import dataclasses
import io
import math
import re

import pandas as pd
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklab.errors import ResultError
from sinklab.results.blocks import Bar, Curves, Facts, Grid, Heading, HeadMap, Say, interval, markdown, names, number, percent
from sinklab.results.environment import cores, say_threads
from sinklab.results.html import html, steps
from sinklab.results.intervals import Interval
from sinklab.results.run import _table_html
from sinklab.results.sections import from_json, to_json
from sinklab.results.terminal import fitted, print_blocks, terminal

BLOCKS = [
    Heading("Heads"),
    Facts([("cache", "keep 1 + 255", "2.930 nats"), ("", "without sink", "+0.804")]),
    Say("Two heads sink."),
    Grid(["Head", "Weight"], [["4.0", 0.4567], ["5|0", Bar(0.25, -0.5)]]),
    Grid(["Part", "Norm"], [["up_proj", 12.5]], "Weights behind it", folded=True),
    Curves("Norm by block", {"place": [1.0, 10.0, 100.0], "others": [1.0, None, 2.0]}, logarithmic=True, mark=1),
    HeadMap("Labels", {(0, 0): ("D", "dormant", "head 0.0, dormant")}, [("dormant", "D", 1, "rests on the sink")]),
]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (math.nan, "–"), (True, "yes"), (0, "0"), (12345, "12,345"), (0.12345, "0.123"), (1234.5, "1,235"),
        (31.25, "31.3"), (-0.5, "\u22120.500"), (2e-5, "2.00e\u221205"), (3.2e7, "3.20e+07"), ("bos", "bos"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.04, "0.04"), (31.25, "31.3"), (100.0, "100"), (-2.0, "\u22122.0")])
def test_percentages(value, text):
    assert percent(value) == f"{text}\u202f%"


def test_intervals_of_objects_and_of_mappings():
    assert interval(Interval(0.087, -0.015, 0.171), 3) == "+0.087 [\u22120.015, +0.171]"
    assert interval({"mean": 0.5, "low": 0.25, "high": 1}, 2, "") == "0.50 [0.25, 1.00]"
    assert interval({"mean": 0.5, "low": None, "high": None}, 2) == "+0.50"
    assert interval(None) == interval({"mean": None}) == "–"


def test_names():
    assert [names(list("abc")[:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert names([str(n) for n in range(9)]) == "0, 1, 2, 3, 4, 5 and 3 more"


def printed(width: int) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    for part in terminal(BLOCKS):
        console.print(part)
    return stream.getvalue()


def test_a_terminal_is_filled_to_its_width_and_no_further():
    long = Facts([("sinks", " ".join(["position"] * 30))])
    stream = io.StringIO()
    Console(file=stream, width=60).print(*terminal([long]))
    first, *rest = stream.getvalue().splitlines()
    assert first.startswith("sinks  position")
    assert rest
    assert all(line.startswith("       position") and len(line.rstrip()) <= 60 for line in rest)


def test_every_rendering_has_the_numbers_of_its_blocks():
    shown = {"terminal": printed(80), "markdown": markdown(BLOCKS), "html": re.sub(r"<[^>]+>", " ", str(html(BLOCKS)))}
    for text in shown.values():
        assert all(part in text for part in ("Heads", "keep 1 + 255", "+0.804", "Two heads sink.", "0.457", "0.250"))
    assert "12.5" in shown["html"]
    assert "12.5" not in shown["terminal"] + shown["markdown"]
    assert "rests on the sink" in shown["terminal"]
    assert "rests on the sink" in shown["html"]


def test_pages_draw_what_is_there():
    page = str(html(BLOCKS))
    assert page.count("<circle") == 3 + 2  # one line lacks its middle
    assert page.count("<polyline") == 2
    assert 'width="50.0%"' in page
    assert html([Curves("nothing", {"a": []})]).strip() == ""


def test_samples_are_points_with_errors_and_no_line():
    drawn = str(html([Curves("Loss", {"all": [1.0, 2.0], "some": [None, 1.5]}, errors={"some": [None, 0.25]})]))
    assert drawn.count("<polyline") == 1
    assert drawn.count("<circle") == 3
    (bar,) = re.findall(r'<line class="line [^"]*" x1="([\d.]+)" x2="([\d.]+)" y1="([\d.]+)" y2="([\d.]+)"', drawn)
    (point,) = re.findall(rf'cx="{bar[0]}" cy="([\d.]+)" r="2.5"><title>some', drawn)
    assert bar[0] == bar[1]
    assert float(bar[2]) - float(point) == pytest.approx(float(point) - float(bar[3]), abs=0.11)


def test_markup_is_escaped_and_commands_become_code():
    page = str(html([Say("<b> run `sinklab audit x`"), Grid(["<i>"], [["<u>"]]), Facts([("<a>", "<s>")])]))
    assert not re.search(r"<(b|i|u|a|s)>", page)
    assert "<code>sinklab audit x</code>" in page


def test_pipes_in_cells_do_not_break_a_table_of_markdown():
    rows = [line for line in markdown(BLOCKS).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {3}


def test_what_is_printed_has_spaces_that_one_can_search_for(capsys):
    print_blocks([Say(f"sinks {percent(16.0)}"), "[bold]markup[/bold]"])
    assert capsys.readouterr().out == "sinks 16.0 %\nmarkup\n"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.3, 0.2), (5.0, 5.0), (0, 1234)])
def test_ticks_lie_within_and_are_few(low, high):
    ticks = steps(low, high)
    assert 1 <= len(ticks) <= 6
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


@dataclasses.dataclass(frozen=True)
class Found:
    place: str
    rates: dict[str, float | None]
    spans: tuple[Interval, ...] = ()


def test_what_was_found_is_read_back_as_it_was_written():
    found = Found("bos", {"0.0": 0.1, "0.1": None}, (Interval(0.1, 0.0, 0.3),))
    assert from_json(Found, to_json(found), "summary.json") == found
    assert from_json(Found, {**to_json(found), "of a newer version": 1}, "summary.json") == found
    assert to_json(Found("bos", {"0.0": math.inf}))["rates"] == {"0.0": None}


def test_what_does_not_fit_is_named():
    with pytest.raises(ResultError, match=r"summary\.json .*rates\.0\.0"):
        from_json(Found, {"place": "bos", "rates": {"0.0": "much"}}, "summary.json")


def fitted_lines(width: int) -> list[str]:
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
        (24, ["not reproduced", "  statement: sinks are", "  at the first of all", "  tokens"]),
    ],
)
def test_a_column_that_must_not_wrap_is_never_cut(width, lines):
    assert fitted_lines(width)[: len(lines)] == lines


def test_a_line_that_is_too_long_goes_on_below_its_text():
    drawn = [str(line) for line in fitted(Text("  name   one two three"), Console(width=20))]
    assert drawn == ["  name   one two ", "         three"]


def test_a_long_table_in_a_notebook_begins_with_what_is_measured():
    table = pd.DataFrame(
        {"run_id": ["a", "a"], "layer": [0, 1], "seed": [None, None], "metric": ["m", "m"], "value": [1.0, 2.0]}
    )
    page = _table_html(table)
    assert re.search(r"run_id.*a.*<table.*metric.*value.*layer", page, re.DOTALL)
    assert "seed" not in page


def test_more_threads_than_cores_are_said_once(capsys):
    say_threads.cache_clear()
    for _ in range(2):
        say_threads(cores() + 1)
    say_threads(cores())
    assert capsys.readouterr().err.count(f"torch computes with {cores() + 1} threads and this process has {cores()} core") == 1
