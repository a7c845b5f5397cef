"""docs/pathways.md says what the code does: operations, columns, the definition, and the committed results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sinklab.studies.pathways import again, figure
from sinklab.studies.pathways.again import judge_again

from sinklab.errors import InputError
from sinklab.results.metric import FRACTION, PERCENTAGE
from sinklab.results.table import read_run
from sinklab_claims.pathways.columns import COLUMNS, GROUPS
from sinklab_claims.pathways.operations import DEFAULT, PUBLISHED
from sinklab_claims.pathways.show import DEFINITION

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
    assert "\n".join(f"> {line}".rstrip() for line in DEFINITION.splitlines()) in TEXT


@pytest.mark.parametrize("written", sorted(ROOT.glob("results/*/pathways/pathways.md")), ids=lambda path: path.parts[-3])
def test_committed_results_are_there_as_they_were_written(written):
    starts = ("|", "- **", "At the scale")  # but for the bounds, which the page has once and the definition tests
    _, _, text = written.read_text(encoding="utf-8").partition("A bound holds")
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    assert [line for line in lines if line not in TEXT] == []
    assert len([line for line in lines if line.startswith("At the scale")]) == 1
    searched = read_run(written.parent).get("rate") is None  # with the trigger task
    assert len([line for line in lines if line.startswith("- **")]) == (9 if searched else 8)


@pytest.mark.parametrize("written", sorted(ROOT.glob("results/*/pathways/run.json")), ids=lambda path: path.parts[-3])
def test_committed_results_are_what_is_judged_today(written, tmp_path, monkeypatch):
    """The rule of a comparison is not changed without its results; intervals are equal but for rounding."""
    monkeypatch.setattr(again, "write_figure", lambda *arguments, **options: None)
    folder = Path(shutil.copytree(written.parent, tmp_path / "kept"))
    judge_again(folder)
    kept, judged = read_run(written.parent), read_run(folder)
    assert {key: judged[key] for key in judged if key != "rows"} == {key: kept[key] for key in kept if key != "rows"}
    for (*keys, one), (*others, other) in zip(flat(judged["rows"]), flat(kept["rows"]), strict=True):
        assert keys == others
        assert one == (pytest.approx(other, rel=1e-9, abs=1e-12) if isinstance(other, float) else other), keys
    assert (folder / "pathways.md").read_bytes() == (written.parent / "pathways.md").read_bytes()


def test_comparisons_side_by_side_have_the_axis_of_their_text(tmp_path, monkeypatch):
    """Of natural text the distortion is what first tokens give back; on one axis with the loss of a window it is nothing."""
    folders = {name: Path(shutil.copytree(ROOT / "results" / name / "pathways", tmp_path / name)) for name in ("small", "tiny")}
    drawn = []
    monkeypatch.setattr(again, "write_figure", lambda *arguments, **options: None)
    monkeypatch.setattr(figure, "write_image", lambda drawing, path: drawn.append(drawing))
    again.main([folders["small"], folders["small"]])
    assert [axes.get_ylabel() for axes in drawn[0].axes] == ["distortion: worth of first tokens and loss by int8, nats"] * 2
    with pytest.raises(InputError, match="the two share no axis; name them apart"):
        again.main(list(folders.values()))
    assert len(drawn) == 1


def flat(value: object) -> list[tuple[object, ...]]:
    """All numbers and words that nested lists and dictionaries hold, each with its keys."""
    if not isinstance(value, list | dict):
        return [(value,)]
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, *rest) for key, part in parts for rest in flat(part)]


def test_shares_have_the_interval_of_a_share():
    """Student's t alone puts the end of one below 0."""
    for column in COLUMNS:
        if column.metric.unit in ("percent", "fraction"):
            assert column.metric.range in (FRACTION, PERCENTAGE), column.name
