"""sinklab origin from the command line: what it prints and writes, its page, its section in an audit, refusals."""

from __future__ import annotations

import json

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.errors import ResultError
from sinklab.results.table import read_table, write_json
from sinklab.studies.audit.page import write_report

QUICK = ("--corpus", "random_tokens", "--samples", "4", "--seq-len", "12", "--controls", "2")


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def out(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin") / "out"
    shown = run("origin", checkpoint, *QUICK, "--threshold", "0.05", "--out", folder)
    (folder.parent / "shown").write_text(shown.stdout)
    return folder


def test_files_table_terminal_and_page_say_the_same(out):
    assert {path.name for path in out.iterdir()} == {"report.html", "summary.json", "table.parquet", "run.json"}
    summary = json.loads((out / "summary.json").read_text())
    (first, *_) = summary["origins"]
    table = read_table(out / "table.parquet")
    assert set(table["probe"]) == {"origin"}
    clean = table.query("metric == 'spike_times_median' and intervention.isna() and sink == @first['place']")
    assert clean["value"].tolist() == [first["spike"]]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Norm by block" in page
    for text in (first["verdict"], f"change from {summary['loss']:.3f} of the model as it is"):
        assert text in page
        assert text in (out.parent / "shown").read_text()
    assert len(first["verdict"]) <= 160
    before = (out / "report.html").read_bytes()
    assert run("report", out).stdout.strip() == str(out / "report.html")
    assert (out / "report.html").read_bytes() == before


def test_the_section_of_an_audit(checkpoint, tmp_path):
    out = tmp_path / "out"
    audit = ["audit", checkpoint, "--corpus", "random_tokens", "--samples", "4", "--seq-len", "16", "--no-cache", "--out", out]
    run(*audit, "--origin")
    summary = json.loads((out / "summary.json").read_text())
    # Random weights have no sink and no spike, which is said and not passed over.
    assert summary["origin"]["origins"] == []
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Where the sink is born" in page
    assert "There is no sink at a token and no token whose norm stands out" in page


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--samples", "1"), "--samples 1: an interval over samples needs two or more"),
        (("--controls", "0"), "--controls 0 must be 1 to 1,000: draws of random units"),
        (("--batch-size", "0"), "--batch-size must be at least 1, got 0"),
    ],
)
def test_numbers_that_measure_nothing_are_refused_before_a_model_is_loaded(options, says):
    assert says in run("origin", "nowhere", *options, status=2).stderr


def test_a_summary_that_was_changed_is_refused_by_its_field(out, tmp_path):
    summary = json.loads((out / "summary.json").read_text())
    summary["origins"][0]["spike"] = "high"
    write_json(summary, tmp_path / "summary.json")
    write_json({"run_id": "r", "kind": "origin", "config": {}}, tmp_path / "run.json")
    with pytest.raises(ResultError, match=r"origins\.0\.spike"):
        write_report(tmp_path)
