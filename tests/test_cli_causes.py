"""The command sinklab causes: its table, JSON, files, the section of an audit, and one line for what cannot be."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app

QUICK = ["--domains", "random_tokens", "--texts", "10", "--seq-len", "16", "--sink", "0"]


def run(*arguments: object, command: str = "causes", status: int = 0):
    result = CliRunner().invoke(app, [command, *(str(argument) for argument in arguments)])
    assert result.exit_code == status, result.output
    return result


def test_table_and_files(checkpoint, tmp_path):
    out = tmp_path / "out"
    result = run(checkpoint, *QUICK, "--out", out)
    first, *lines = result.stdout.splitlines()
    assert re.fullmatch(r"4 heads: .* undecided; the sink is position 0\.", first)
    assert [line.split()[0] for line in lines if re.match(r"[01]\.[01] +(undecided|unneeded)", line)][:4] == [
        "0.0", "0.1", "1.0", "1.1",
    ]  # fmt: skip
    assert {path.name for path in out.iterdir()} == {"report.html", "summary.json", "table.parquet", "run.json"}
    card = run(out, command="card").stdout
    assert first in card
    assert f"sinklab causes {checkpoint} --sink=0 --texts=10 --seq-len=16 --domains=random_tokens\n" in card
    before = (out / "report.html").read_bytes()
    assert run(out, command="report").stdout.strip() == str(out / "report.html")
    assert (out / "report.html").read_bytes() == before


def test_json_is_the_summary(checkpoint):
    result = run(checkpoint, *QUICK, "--heads", "1.0,0.1", "--json", "--seed", 3)
    summary = json.loads(result.stdout)
    assert sorted((head["layer"], head["head"]) for head in summary["heads"]) == [(0, 1), (1, 0)]
    assert {
        "heads", "counts", "sink", "texts", "level", "minimal_effect", "location", "key_bias", "massive", "spread",
        "notes",
    } <= set(summary)  # fmt: skip
    assert {"layer", "head", "module", "label", "domains", "sink_weight", "value_ratio", "effects"} <= set(summary["heads"][0])
    assert summary["texts"] == 10


def test_the_section_of_an_audit(checkpoint, tmp_path):
    out = tmp_path / "out"
    audit = [checkpoint, "--corpus", "random_tokens", "--samples", "4", "--seq-len", "16", "--no-cache", "--out", out]
    result = run(*audit, "--causes", command="audit")
    summary = json.loads((out / "summary.json").read_text())
    # Random weights have no sink: the section goes by what the audit found, and heads are judged by zeroing.
    assert summary["sinks"]["sinks"] == []
    assert summary["causes"]["sink"]["place"] is None
    assert "read as a model without a sink." in result.stdout
    assert "read as a model without a sink." in (out / "report.html").read_text(encoding="utf-8")
    run(*audit, "--causes", "--threshold", "0.01", "--overwrite", command="audit")
    section = json.loads((out / "summary.json").read_text())["causes"]
    assert len(section["heads"]) == 4
    assert section["texts"] == 64
    assert "Edits of a head on random_tokens" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--heads", "1"], "--heads '1' must be all, or heads written layer.head with commas between, such as 0.1,3.0"),
        (["--heads", ","], "--heads names no head; leave it out"),
        (["--heads", "9.0"], "--heads 9.0: there is no such head; the model has 2 layers of 2 heads"),
        (["--sink", "first"], "--sink first must be auto, a position from 0, null or none"),
        (
            ["--sink", "auto"],
            "no sink found: no head gives any place a mean weight of 0.3; tried, with the largest mean weight",
        ),
        (["--budget", "0"], "--budget 0 must be a time above 0, such as 90s, 10m or 1.5h"),
        (["--texts", "3"], "3 texts of domain 'random_tokens' are too few: 32 hypotheses"),
        (["--domains", "python_sorce"], "Did you mean 'python_source'?"),
    ],
)
def test_bad_input_is_one_line(checkpoint, arguments, complaint):
    result = run(checkpoint, *QUICK, *arguments, status=2)
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert complaint in last


@pytest.mark.slow
def test_the_demo_shows_a_head_that_rests_where_nothing_can_be_said(tmp_path):
    makefile = (Path(__file__).parents[1] / "Makefile").read_text().replace("\\\n", " ")
    [line] = re.findall(r"^\t\$\(BIN\)/sinklab causes (.*) --out build/demo-causes --overwrite$", makefile, re.MULTILINE)
    run(*shlex.split(line), "--out", tmp_path / "out", "--quiet")
    heads = json.loads((tmp_path / "out" / "summary.json").read_text())["heads"]
    assert {f"{head['layer']}.{head['head']}": head["label"] for head in heads} == {"4.0": "switch", "5.0": "switch"}
    assert heads[1]["needs_sink"] == {"python_source": "yes", "bigrams": "yes"}
