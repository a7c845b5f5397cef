"""The command line on good input: what is printed where, that results are those of the Python API, and what needs no model."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests.command_line import CliRunner
from tests.conftest import make_sinklm

from sinklab.cli import wait_without_spinning
from sinklab.cli.app import app
from sinklab.cli.catalogue import describe
from sinklab.cli.derive import folder_name
from sinklab.registry import KINDS
from sinklab.results.run import Result
from sinklab.results.table import make_table, read_run, read_table
from sinklab.studies.audit.found import show

QUICK = ["--corpus", "random_tokens", "--samples", "3", "--seq-len", "12"]
AUDIT = ["audit", "--no-cache", *QUICK]


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


def test_idle_threads_sleep_unless_the_environment_says_how_they_wait(monkeypatch):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is written is taken back
        monkeypatch.delenv(name)
    wait_without_spinning()
    assert [os.environ[name] for name in names] == ["passive", "1000"]
    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    wait_without_spinning()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.fixture(scope="module")
def audits(checkpoint, tokenizer, tmp_path_factory):
    """Two audits by the command line: a softmax and a sigmoid model."""
    folder = tmp_path_factory.mktemp("audits")
    make_sinklm({"name": "sigmoid", "bias": -2.5}).save_pretrained(folder / "sigmoid_model")
    tokenizer.save_pretrained(folder / "sigmoid_model")
    results = {
        "softmax": run("audit", checkpoint, *QUICK, "--out", folder / "softmax"),
        "sigmoid": run(*AUDIT, folder / "sigmoid_model", "--out", folder / "sigmoid", "--json"),
    }
    return folder, results


class TestAudit:
    def test_prints_the_answer_and_where_the_page_is(self, audits, checkpoint):
        folder, results = audits
        summary = read_run(folder / "softmax", "summary.json")
        lines = results["softmax"].stdout.splitlines()
        assert lines[0].split()[0] == "sink"
        # Random tokens stand for no text: nothing per byte.
        assert [line.split(maxsplit=1)[1].strip() for line in lines if line.startswith("loss ")] == [
            f"{summary['loss']:.3f} nats per token"
        ]
        assert lines[-1].split() == ["report", str(folder / "softmax" / "report.html")]
        assert (folder / "softmax" / "report.html").is_file()
        assert re.fullmatch(r"(no sink|sink at position \d+.*,) on the first \d+ samples?\n", results["softmax"].stderr)

    def test_json_is_the_summary_and_nothing_else(self, audits):
        folder, results = audits
        assert json.loads(results["sigmoid"].stdout) == read_run(folder / "sigmoid", "summary.json")
        assert results["sigmoid"].stderr.count("\n") == 1  # the sink, as soon as it is known

    def test_options_reach_the_measurement(self, checkpoint, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text("\n".join(f"line {number} of a text" for number in range(50)))
        options = {"--corpus": text, "--samples": 2, "--seq-len": 9, "--threshold": 0.5, "--seed": 3, "--bos": "none"}
        options |= {"--dtype": "float64", "--batch-size": 1, "--device": "cpu"}
        run("audit", checkpoint, "--no-cache", *(part for pair in options.items() for part in pair), "--out", tmp_path / "out")
        record = read_run(tmp_path / "out")
        expected = {"seq_len": 9, "samples": 2, "threshold": 0.5, "seed": 3, "bos": "none", "bos_tokens_per_sample": 0}
        assert record["config"].items() >= expected.items()
        assert record["corpus"]["source"] == "text.txt"
        assert record["dtype"] == "float64"
        table = read_table(tmp_path / "out" / "table.parquet")
        assert set(table["seed"]) == {3}
        assert table.loc[table["corpus"] == "text.txt", "key_position"].max() == 8

    def test_the_same_seed_gives_the_same_numbers(self, checkpoint, tmp_path):
        def numbers(name, *options):
            run("measure", checkpoint, *QUICK, "--probe", "sink_rate", *options, "--out", tmp_path / name)
            return read_table(tmp_path / name / "table.parquet").drop(columns="run_id")

        first = numbers("first")
        assert first.equals(numbers("second"))
        assert not first.equals(numbers("third", "--seed", "1"))

    def test_without_out_the_folder_is_named_after_the_model(self, checkpoint, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result, name = run(*AUDIT, checkpoint), f"{checkpoint.parent.name}-{checkpoint.name}"
        assert result.stdout.splitlines()[-1].split() == ["report", f"sinklab-audit/{name}/report.html"]
        assert os.listdir(tmp_path / "sinklab-audit") == [name]

    def test_checkpoints_of_one_name_have_folders_of_their_own(self, tmp_path, monkeypatch):
        for model in ("a", "b"):
            (tmp_path / model / "hf").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert [folder_name(name) for name in ("a/hf", "b/hf", "./a/hf/", str(tmp_path / "b" / "hf"))] == [
            "a-hf", "b-hf", "a-hf", "b-hf"
        ]  # fmt: skip
        assert folder_name("/") == "model"


class TestMeasure:
    def test_json_lines_are_the_rows_of_the_table(self, checkpoint, tmp_path):
        arguments = ("measure", checkpoint, *QUICK, "--probe", "entropy", "--probe", "sink_rate", "--out", tmp_path / "out")
        rows = [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]
        table = read_table(tmp_path / "out" / "table.parquet")
        assert len(rows) == len(table)
        assert {row["probe"] for row in rows} == {"entropy", "sink_rate"}
        assert [row["value"] for row in rows] == pytest.approx(table["value"].tolist())
        assert [row["metric"] for row in rows] == table["metric"].tolist()

    def test_texts_too_short_or_too_long_are_said(self, checkpoint):
        short = run("measure", checkpoint, "--probe", "sink_rate", *QUICK[:4], "--seq-len", "9")
        assert short.stderr.startswith("In texts of 9 tokens a head that looks at all keys alike gives the first position 0.31")
        assert run("measure", checkpoint, "--probe", "entropy", *QUICK[:4], "--seq-len", "9").stderr == ""
        assert run("measure", checkpoint, "--probe", "sink_rate", *QUICK).stderr == ""
        long = run("measure", checkpoint, "--probe", "entropy", *QUICK[:4], "--seq-len", "140").stderr
        assert long.startswith("The samples have 140 tokens and the model was made for 128: past that length")


class TestCompare:
    def test_side_by_side(self, audits):
        folder, _ = audits
        result = run("compare", folder / "softmax", folder / "sigmoid", "--out", folder / "both.html")
        operation = next(line for line in result.stdout.splitlines() if line.startswith("operation"))
        assert operation.split()[1:] == ["softmax", "sigmoid"]
        assert result.stdout.splitlines()[-1].split() == ["page", str(folder / "both.html")]
        assert "<html" in (folder / "both.html").read_text()[:200].lower()

    def test_needs_two_and_they_must_be_audits(self, audits, tmp_path):
        folder, _ = audits
        assert "needs two or more" in run("compare", folder / "softmax", status=2).stderr
        assert "is not there; is" in run("compare", folder / "softmax", tmp_path, status=2).stderr


def test_report_is_made_again_from_the_table(audits):
    folder, _ = audits
    page = folder / "softmax" / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert run("report", folder / "softmax").stdout == f"{page}\n"
    assert page.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "kind"), [*itertools.product(("report", "compare"), ("trigger", "measure")), ("compare", "causes")]
)
def test_runs_without_a_page_are_refused_and_nothing_is_written(command, kind, tmp_path):
    found = "table.parquet" if kind == "measure" else "summary.json"
    (tmp_path / found).write_text("{}")
    (tmp_path / "run.json").write_text(json.dumps({"kind": kind}))
    before = sorted(tmp_path.iterdir())
    expected = "audit, cache, causes or origin" if command == "report" else "audit"
    folders = [tmp_path] if command == "report" else [tmp_path, tmp_path]
    assert run(command, *folders, status=2).stderr == (
        f"error: {tmp_path} holds a run of kind '{kind}', expected {expected}; what it found is in {tmp_path / found}\n"
    )
    assert sorted(tmp_path.iterdir()) == before


class TestList:
    def test_one_kind_in_singular_or_plural_and_as_json(self):
        assert run("list", "probe").stdout == run("list", "probes").stdout
        record = json.loads(run("list", "probes", "--json").stdout)
        assert list(record) == ["probes"]
        assert list(record["probes"]) == KINDS["probes"].names()


class TestShow:
    def test_a_probe(self):
        printed = run("show", "sink_rate").stdout
        probe = KINDS["probes"]["sink_rate"]
        assert printed.startswith("sink_rate (probe)\n")
        assert "threshold: float = 0.3" in printed
        assert "https://arxiv.org/abs/2410.10781" in printed
        for metric in probe.metrics:
            assert f"  {metric.name} [{metric.unit}] version {metric.version}" in printed
            assert metric.text in printed

    @pytest.mark.parametrize(("plural", "name"), [(plural, name) for plural in KINDS for name in KINDS[plural]])
    def test_every_plugin(self, plural, name):
        record = next(record for record in describe(name) if record["kind"] == KINDS[plural].kind)
        assert record["summary"] == KINDS[plural].summary(name)
        plugin = KINDS[plural][name]
        metrics = getattr(plugin, "metrics", None) or getattr(sys.modules[plugin.__module__], "METRICS", ())
        assert [metric["name"] for metric in record["metrics"]] == [metric.name for metric in metrics]
        assert record["version"] == getattr(plugin, "version", None)

    def test_an_unknown_name(self):
        assert "Did you mean 'entropy'" in run("show", "entropi", status=2).stderr


def test_markup_in_what_users_name_is_shown_as_it_is(audits, capsys):
    folder, _ = audits
    summary = read_run(folder / "softmax", "summary.json") | {"model": "[red]model[/red]", "loss": None}
    Result(summary, make_table([]), {"kind": "audit"}, Path("[r]"), shows=show).show()
    printed = capsys.readouterr().out
    assert "[red]model[/red]" in printed
    assert "not defined for this model" in printed
