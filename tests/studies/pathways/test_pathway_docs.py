"""docs/pathways.md says what the code does: operations, columns, the definition, and the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinklab.results.table import read_run
from sinklab.studies.pathways.columns import COLUMNS, GROUPS
from sinklab.studies.pathways.operations import DEFAULT, PUBLISHED
from sinklab.studies.pathways.words import DEFINITION

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "pathways.md").read_text(encoding="utf-8")


def test_every_operation_is_there():
    for name, published in PUBLISHED.items():
        assert f"| `{name}` | {published.no_op} | {published.source} |" in TEXT
    assert len(DEFAULT) == len(PUBLISHED) + 1  # normalised sigmoid, which the text names


def test_every_column_is_there_below_its_training():
    for source, what in GROUPS.items():
        section = TEXT.split(f"**{what[0].upper()}{what[1:]}**")[1].split("\n**")[0].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        metrics = [column.metric for column in COLUMNS if column.source == source]
        texts = [metric.text.replace("|", chr(92) + "|") for metric in metrics]
        assert rows == [f"| `{one.name}` | {one.unit} | {text} |" for one, text in zip(metrics, texts, strict=True)]


def test_the_definition_is_there():
    assert f"> {DEFINITION}" in TEXT


@pytest.mark.parametrize("written", sorted(ROOT.glob("results/*/pathways/pathways.md")), ids=lambda path: path.parts[-3])
def test_committed_results_are_there_as_they_were_written(written):
    lines = [
        line for line in written.read_text(encoding="utf-8").splitlines() if line.startswith(("|", "- **", "At the scale"))
    ]
    assert [line for line in lines if line not in TEXT] == []
    assert len([line for line in lines if line.startswith("At the scale")]) == 1
    searched = read_run(written.parent).get("rate") is None  # with the trigger task
    assert len([line for line in lines if line.startswith("- **")]) == (8 if searched else 7)
