"""The document of metrics says of every probe what its class says: nothing missing, nothing more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sinklab.registry import probes

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.mark.parametrize("name", list(probes))
def test_every_metric_is_documented(name):
    derived = DOCUMENT.read_text(encoding="utf-8").split("<!-- begin metrics -->")[1]
    section = re.search(rf"^## {name}\n(.*?)(?=^## |^<!-- end)", derived, flags=re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/metrics.md has no section {name}; run: make docs"
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \| (\d+) \|$", section[1], flags=re.MULTILINE)
    found = {metric: (text.replace("\\|", "|"), unit, paper, int(version)) for metric, text, unit, paper, version in rows}
    expected = {
        metric.name: (metric.text, metric.unit, metric.paper or "ours", metric.version) for metric in probes[name].metrics
    }
    assert found == expected, "docs/metrics.md is stale; run: make docs"


def test_the_worked_example_is_the_pinned_fixture():
    """The matrix in the document is the one whose values are pinned under every definition."""
    from test_sink_rate import PINNED

    block = re.search(r"```\n(1\.0.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    numbers = [[0.0 if cell == "." else float(cell) for cell in line.split()] for line in block[1].splitlines()]
    assert numbers == PINNED.tolist()
