"""The command ``sinklab cache``: its table, its JSON, its files, and what it says of bad input."""

from __future__ import annotations

import json

import pytest
from tests.command_line import CliRunner
from tests.conftest import TEXT

from sinklab.cli.app import app
from sinklab.results.table import read_run

QUICK = ["--text", "random_tokens", "--tokens", "80", "--documents", "2", "--window", "16", "--sinks", "0,1"]
NAMES = ["--policies", "full,window,sink_window"]


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def test_prints_what_to_use_and_then_a_table(checkpoint, tmp_path):
    out = tmp_path / "out"
    result = run(checkpoint, *QUICK, *NAMES, "--out", out)
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


def test_json_is_the_summary_and_nothing_else(checkpoint, tmp_path):
    out = tmp_path / "out"
    result = run(checkpoint, *QUICK, *NAMES, "--json", "--out", out)
    summary = json.loads(result.stdout)
    assert summary == read_run(out, "summary.json")
    wanted = {"policy", "num_sinks", "window", "loss", "tokens_per_second", "bytes_held"}
    assert all(wanted <= entry.keys() for entry in summary["policies"])
    assert isinstance(summary["recommendation"], str)


def test_all_policies_by_default_over_a_file(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--text", tmp_path / "text.txt", "--tokens", 48, "--documents", 1, "--window", "12,20", "--sinks", "0,2"]
    summary = json.loads(run(checkpoint, *options, "--json").stdout)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sinks", "0;1"], "--sinks '0;1' must be whole numbers with commas between them, such as 0,1,4"),
        (["--window", "-3"], "--window '-3' must be whole numbers with commas between them"),
        (["--window", "100"], "a window of 100 tokens covers the 80 tokens of a text, so nothing is ever evicted"),
        (["--window", "100"], "choose a smaller --window or more --tokens than 102"),
        (["--window", "10", "--sinks", "20"], "choose a larger --window or fewer --sinks"),
        (["--policies", "windw"], "no policy is called 'windw'. Did you mean 'window'"),
        (["--text", "nowhere.txt"], "there is no text file 'nowhere.txt'"),
        (["--bos", "perhaps"], 'Invalid value "perhaps" for --bos. Choose from: "auto", "always", "none"'),
    ],
)
def test_bad_input_is_one_line(checkpoint, options, message):
    result = run(checkpoint, *QUICK, *options, status=2)
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
