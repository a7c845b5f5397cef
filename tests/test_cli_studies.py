"""The commands cache, causes, origin and trigger: what is printed where, files, JSON, and mistakes in one line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.command_line import CliRunner
from tests.conftest import TEXT

from sinklab.cli.app import app
from sinklab.errors import ResultError
from sinklab.results.table import read_run, read_table, write_json
from sinklab.studies.audit.page import write_report

CACHE = ["--text", "random_tokens", "--tokens", "80", "--documents", "2", "--window", "16", "--sinks", "0,1"]
NAMES = ["--policies", "full,window,sink_window"]


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


def test_prints_what_to_use_and_then_a_table(checkpoint, tmp_path):
    out = tmp_path / "out"
    result = run("cache", checkpoint, *CACHE, *NAMES, "--out", out)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    summary = read_run(out, "summary.json")
    assert lines[0].split()[:2] == ["cache", "keep"]
    assert "nats (tokens 40–80)" in lines[0]
    assert summary["recommendation"] in lines
    (table,) = (number for number, line in enumerate(lines) if line.startswith("Policy"))
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["full", "window", "sink_window"]
    assert lines[table + 4].startswith("2 texts of 80 tokens of random_tokens with BOS. Loss: of the tokens from 40 on")
    assert lines[-1].split() == ["report", str(out / "report.html")]
    assert result.stderr == ""
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Loss by position" in page
    assert summary["recommendation"] in page


def test_all_policies_by_default_over_a_file(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--text", tmp_path / "text.txt", "--tokens", 48, "--documents", 1, "--window", "12,20", "--sinks", "0,2"]
    summary = json.loads(run("cache", checkpoint, *options, "--json").stdout)
    measured = {entry["policy"] for entry in summary["policies"]}
    assert {"full", "recompute", "window", "sink_window", "blocks"} <= measured
    assert [entry["budget"] for entry in summary["policies"] if entry["policy"] == "blocks"] == [20]
    # One text is cut into blocks, so that there is an interval.
    assert all(entry["loss_low"] < entry["loss"] < entry["loss_high"] for entry in summary["policies"])
    anew = next(entry for entry in summary["policies"] if entry["policy"] == "recompute")
    assert 0 < anew["scored_tokens"] <= summary["policies"][0]["scored_tokens"]


def test_the_audit_has_the_section_unless_it_is_switched_off(checkpoint, tmp_path):
    quick = ["audit", str(checkpoint), "--corpus", "random_tokens", "--samples", "2", "--seq-len", "8"]
    for name, flag in (("with", []), ("without", ["--no-cache"])):
        done = CliRunner().invoke(app, [*quick, *flag, "--out", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        summary = read_run(tmp_path / name, "summary.json")
        page = (tmp_path / name / "report.html").read_text(encoding="utf-8")
        if name == "with":
            assert summary["cache"]["recommendation"] in [line.strip() for line in done.stdout.splitlines()]
            assert summary["cache"]["recommendation"] in page
        else:
            assert summary.get("cache") is None
            assert "Which cache policy" not in page


CAUSES = ["--domains", "random_tokens", "--texts", "10", "--seq-len", "16", "--sink", "0"]


def test_table_and_files(checkpoint, tmp_path):
    out = tmp_path / "out"
    result = run("causes", checkpoint, *CAUSES, "--out", out)
    first, *lines = result.stdout.splitlines()
    assert re.fullmatch(r"4 heads: .* undecided; the sink is position 0\.", first)
    assert [line.split()[0] for line in lines if re.match(r"[01]\.[01] +(undecided|unneeded)", line)][:4] == [
        "0.0", "0.1", "1.0", "1.1",
    ]  # fmt: skip
    assert {path.name for path in out.iterdir()} == {"report.html", "summary.json", "table.parquet", "run.json"}
    card = run("card", out).stdout
    assert first in card
    assert f"sinklab causes {checkpoint} --sink=0 --corpus=random_tokens --texts=10 --seq-len=16\n" in card
    before = (out / "report.html").read_bytes()
    assert run("report", out).stdout.strip() == str(out / "report.html")
    assert (out / "report.html").read_bytes() == before


def test_the_section_of_an_audit(checkpoint, tmp_path):
    out = tmp_path / "out"
    audit = [checkpoint, "--corpus", "random_tokens", "--samples", "4", "--seq-len", "16", "--no-cache", "--out", out]
    result = run("audit", *audit, "--causes")
    summary = json.loads((out / "summary.json").read_text())
    # Random weights have no sink: the section goes by what the audit found, and heads are judged by zeroing.
    assert summary["sinks"]["sinks"] == []
    assert summary["causes"]["sink"]["place"] is None
    assert "read as a model without a sink." in result.stdout
    assert "read as a model without a sink." in (out / "report.html").read_text(encoding="utf-8")
    run("audit", *audit, "--causes", "--threshold", "0.01", "--overwrite")
    section = json.loads((out / "summary.json").read_text())["causes"]
    assert len(section["heads"]) == 4
    assert section["texts"] == 64
    assert "Every head on random_tokens" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_demo_shows_a_head_that_rests_where_nothing_can_be_said(tmp_path):
    makefile = (Path(__file__).parents[1] / "Makefile").read_text().replace("\\\n", " ")
    [line] = re.findall(r"^\t\$\(BIN\)/sinklab causes (.*) --out build/demo-causes --overwrite$", makefile, re.MULTILINE)
    run("causes", *shlex.split(line), "--out", tmp_path / "out", "--quiet")
    heads = json.loads((tmp_path / "out" / "summary.json").read_text())["heads"]
    assert {f"{head['layer']}.{head['head']}": head["label"] for head in heads} == {"4.0": "switch", "5.0": "switch"}
    assert heads[1]["needs_sink"] == {"python_source": "yes", "bigrams": "yes"}


ORIGIN = ("--corpus", "random_tokens", "--samples", "4", "--seq-len", "12", "--controls", "2")


@pytest.fixture(scope="module")
def out(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin") / "out"
    shown = run("origin", checkpoint, *ORIGIN, "--threshold", "0.05", "--out", folder)
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


def test_the_section_of_an_audit_of_origin(checkpoint, tmp_path):
    out = tmp_path / "out"
    audit = ["audit", checkpoint, "--corpus", "random_tokens", "--samples", "4", "--seq-len", "16", "--no-cache", "--out", out]
    run(*audit, "--origin")
    summary = json.loads((out / "summary.json").read_text())
    # Random weights have no sink and no spike, which is said and not passed over.
    assert summary["origin"]["origins"] == []
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Where the sink is born" in page
    assert "There is no sink at a token and no token whose norm stands out" in page


def test_a_summary_that_was_changed_is_refused_by_its_field(out, tmp_path):
    summary = json.loads((out / "summary.json").read_text())
    summary["origins"][0]["spike"] = "high"
    write_json(summary, tmp_path / "summary.json")
    write_json({"run_id": "r", "kind": "origin", "config": {}}, tmp_path / "run.json")
    with pytest.raises(ResultError, match=r"origins\.0\.spike"):
        write_report(tmp_path)


TRIGGER = ["--cap", "5", "--seeds", "0..1"]


def test_table_and_files_of_trigger(tmp_path):
    out = tmp_path / "out"
    result = run("trigger", "--operation", "softmax,relu:uncounted=0,softmax_plus_one", *TRIGGER, "--out", out)
    lines = result.stdout.splitlines()
    assert " ".join(lines[0].split()) == "operation seed steps largest error on BOS, mean least bound null mass trigger on BOS"
    assert [line.split()[:5] for line in lines[1:5]] == [
        [name, seed, "5,", "did", "not"] for name in ("softmax", "softmax_plus_one") for seed in "01"
    ]
    text = " ".join(result.stdout.split())
    assert "relu:uncounted=0 was not trained: every choice of maps is off by 0.0333 or more." in text
    assert "none is divided by i - 1 of i visible keys, so that no mean over i - 1 tokens comes out" in text
    assert result.stderr == ""
    table = read_table(out / "table.parquet")
    assert set(table["operation"]) == {"softmax", "softmax_plus_one"}
    maps = table[(table["metric"] == "weight_mean") & (table["operation"] == "softmax") & (table["seed"] == 1)]
    assert len(maps) == 16 * 17 // 2
    assert maps.groupby("query_position")["value"].sum().tolist() == pytest.approx([1.0] * 16, abs=1e-5)
    # Next to untrained, scores are about 0 and rows uniform: the first key has 1/2, 1/3, …, without the row of the trigger.
    expected = sum(1 / (query + 1) for query in range(1, 16) if query != 7) / 14
    (on_bos,) = table[(table["metric"] == "bos_weight_mean") & (table["operation"] == "softmax") & (table["seed"] == 1)][
        "value"
    ]
    assert on_bos == pytest.approx(expected, abs=1e-3)
    assert read_run(out)["config"]["learning_rate"] == 1e-3


def test_json_is_the_runs():
    result = run("trigger", "--operation", "softmax", "--layers", 2, "--heads", 3, *TRIGGER, "--json")
    record = json.loads(result.stdout)
    assert record["cannot"] == []
    assert [entry["seed"] for entry in record["runs"]] == [0, 1]
    first = record["runs"][0]
    assert {"operation", "layers", "heads", "seed", "steps", "max_error", "bos_weight_mean", "bos_weight_min"} <= set(first)
    assert (first["operation"], first["layers"], first["heads"], first["steps"]) == ("softmax", 2, 3, 5)
    assert first["outcome"] == "cap"
    by_head = first["head_bos_weight_mean"]
    assert [len(row) for row in by_head] == [3, 3]
    layer, head = first["strongest_head"]
    assert first["bos_weight_mean"] == by_head[layer][head] == max(max(row) for row in by_head)
    assert first["bos_weight_min"] == first["head_bos_weight_min"][layer][head]


GIVEN = {"cache": CACHE, "causes": CAUSES}
"""Of a command what is right beside the mistake."""


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("cache", ["--sinks", "0;1"], "--sinks '0;1' must be whole numbers with commas between them, such as 0,1,4"),
        ("cache", ["--window", "100"], "choose a smaller --window or more --tokens than 102"),
        ("cache", ["--window", "10", "--sinks", "20"], "choose a larger --window or fewer --sinks"),
        ("causes", ["--heads", "1"], "--heads '1' must be all, or heads written layer.head with commas between, such as 0.1,3"),
        ("causes", ["--heads", ","], "--heads names no head; leave it out"),
        ("causes", ["--heads", "9.0"], "--heads 9.0: there is no such head; the model has 2 layers of 2 heads"),
        ("causes", ["--sink", "first"], "--sink first must be auto, a position from 0, null or none"),
        ("causes", ["--sink", "auto"], "no sink found: no head gives any place a mean weight of 0.3; tried, with the largest"),
        ("causes", ["--budget", "0"], "--budget 0 must be a time above 0, such as 90s, 10m or 1.5h"),
        ("causes", ["--texts", "3"], "3 texts of domain 'random_tokens' are too few: 32 hypotheses"),
        ("origin", ("--samples", "1"), "--samples 1: an interval over samples needs two or more"),
        ("origin", ("--controls", "0"), "--controls 0 must be 1 to 1,000: draws of random units"),
        ("trigger", ["--operation", ","], "0 operations, 3 seeds and 1,000 samples"),
        ("trigger", ["--operation", "sigmoid"], "operation 'sigmoid' cannot do the task: each weight depends on its own score"),
        ("trigger", ["--no-bos", "--operation", "softmax"], "without BOS there is no token that could carry nothing"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_printed(checkpoint, command, options, message):
    model = {"trigger": [], "origin": ["nowhere"]}.get(command, [checkpoint])
    result = run(command, *model, *GIVEN.get(command, ()), *options, status=2)
    *before, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert message in last
    assert result.stdout == ""
    assert command == "causes" or not before
