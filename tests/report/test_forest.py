"""The figure of claims: estimates are written as the axis that they stand on counts them."""

from __future__ import annotations

import dataclasses
import math
import re
from xml.etree import ElementTree

import pytest
from sinklab.report.forest import VERDICTS, WIDTH, Mark, Row, draw_forest


def texts(*rows: Row) -> list[str]:
    root = ElementTree.fromstring(draw_forest(rows, title="Claims"))
    return [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


def row(unit: str, middle: float, *interval: float) -> Row:
    mark = Mark("toy", "tiny", middle, interval or None, "open")
    return Row("a_claim", "what it says", unit, 0.5, math.inf, None, (mark,))


@pytest.mark.parametrize(
    ("unit", "middle", "interval", "written"),
    [
        ("ratio", 0.0688, (0.05821, 0.0812), "0.0688 [0.0582, 0.0812]"),  # relative: three digits each
        ("ratio", 0.000976, (-0.000641, 0.00259), "0.0010 [−0.0006, 0.0026]"),  # not taken on the logarithmic scale
        ("points", -20.4, (-26.73, -14.07), "−20.4 [−26.7, −14.1]"),
        ("fraction", 0.1, (), "0.1"),
    ],
)
def test_an_estimate_is_written_as_its_axis_counts(unit, middle, interval, written):
    assert written in texts(row(unit, middle, *interval))


def test_the_longest_verdict_has_room():
    """Of letters of 10.5 px, which are 6.2 px wide in bold."""
    longest = "no BOS: not reproduced"
    assert VERDICTS + 6.2 * len(longest) < WIDTH - 10
    drawn = draw_forest([row("ratio", 1.0, 0.9, 1.1)], title="Claims")
    assert re.search(rf'viewBox="0 0 {WIDTH} \d+"', drawn)


def test_rows_that_differ_in_their_last_word_are_told_apart():
    rows = [
        dataclasses.replace(row("percent", 1.0), says=f"there is no sink on the first token with {last}")
        for last in ("key bias, shared by all heads", "sink token")
    ]
    written = texts(*rows)
    for last in ("bias, shared by all heads", "token"):
        assert written[written.index(last) - 1].startswith("there is no sink on the first token with ")
    one, two = (float(re.search(r'viewBox="0 0 \d+ (\d+)"', draw_forest(of, title="Claims"))[1]) for of in (rows[:1], rows))
    assert two - one >= 3 * 13  # three lines of text have room


def test_a_sentence_of_more_than_two_lines_is_cut_between_words():
    (long,) = (text for text in texts(dataclasses.replace(row("percent", 1.0), says="some words " * 20)) if "…" in text)
    assert long.endswith(" …")
    assert set(long.split()) == {"some", "words", "…"}
