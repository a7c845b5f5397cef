"""The command sinklab depend: its table and verdict, JSON, files, and one line for what cannot be."""

from __future__ import annotations

import json

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.results.table import read_run, read_table
from sinklab.studies.depend.display import _length

QUICK = ["--window", "60", "--policies", "full", "--sinks", "4", "--items", "3"]


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, ["depend", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def printed(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("depend") / "out"
    return run(checkpoint, "--task", "question_stream,long_text:scored=8", *QUICK, "--out", out), out


def test_prints_every_policy_and_the_verdict(printed):
    result, out = printed
    lines = result.stdout.splitlines()
    assert lines[0] == "question_stream, 3 items"
    assert lines[1].split() == [
        "policy",
        "share",
        "of",
        "answers",
        "right",
        "interval",
        "less",
        "0+60",
        "interval",
        "answered",
        "up",
        "to",
    ]
    assert [line.split()[0] for line in lines[2:6]] == ["0+60", "4+56", "full", "0+1"]
    assert lines[6].startswith("question_stream depends on the sink tokens: undecided. 4+56 less 0+60: ")
    assert any(line.startswith("long_text depends on the sink tokens: ") for line in lines)
    assert lines[-1] == f"table  {out / 'table.parquet'}"
    assert result.stderr == ""


def test_what_the_shortest_and_the_longest_context_leave_open_is_said():
    curve = [{"at": at} for at in (1, 2, 60, 2_000)]
    outcome = {"axis": "context", "curves": {"0+60": curve, "4+56": curve}}
    lengths = [_length(outcome, {"effective_length": length}) for length in (1, 60, 2_000, None)]
    assert lengths == ["none past 1 token", "60 tokens", "2,000 tokens or more", "at chance"]


def test_the_contexts_that_help_are_explained(printed):
    text = " ".join(printed[0].stdout.split())
    assert "context that helps" in text
    assert "context that helps: scored after " in text
    assert "up to which each raised the score over the one before it, by 0.01 nats per token or more on average" in text


def test_files_say_the_same(printed):
    result, out = printed
    summary = read_run(out, "summary.json")
    for outcome in summary["tasks"]:
        assert outcome["sentence"] in result.stdout
    assert set(read_table(out / "table.parquet")["policy"]) == {"0+60", "4+56", "full", "0+1"}
    assert (out / "long_text.png").is_file()


def test_a_grid_is_announced_and_shown(checkpoint, tmp_path):
    """How many cells (four pairs and the floor) and how long on stderr, a line for every pair on stdout, and a figure."""
    result = run(
        checkpoint, "--task", "question_stream", *QUICK, "--bos", "one,none", "--cache-bits", "8", "--out", tmp_path / "out"
    )
    assert result.stderr.startswith("9 cells: 1 task, 9 conditions, ")
    assert "the first cell took " in result.stderr
    lines = result.stdout.splitlines()
    pairs = [line for line in lines if line.startswith(("one BOS", "no BOS"))]
    assert [line.split()[:4] for line in pairs] == [
        ["one", "BOS", "4+56", "32"],
        ["no", "BOS", "4+56", "32"],
        ["one", "BOS", "full", "32"],
        ["one", "BOS", "4+56", "8"],
    ]
    assert all(line.endswith("at chance") for line in pairs)
    assert "question_stream: at chance: says nothing about sinks." in lines
    assert (tmp_path / "out" / "grid.png").is_file()


def test_json_is_the_summary_and_nothing_else(checkpoint, printed):
    result = run(checkpoint, "--task", "question_stream", "--task", "long_text:scored=8", *QUICK, "--json")
    assert json.loads(result.stdout) == read_run(printed[1], "summary.json")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "nedle"], "error: no task is called 'nedle'. Did you mean 'needle'? Known: "),
        (["--sinks", "a"], "error: --sinks 'a' must be whole numbers with commas between them, such as 0,1,4"),
        (["--window", "-5"], "error: --window must be at least 3 tokens, a sink included, got -5"),
        (["--window", "5", "--sinks", "4"], "error: --sinks 4 must each be 1 or more and leave two tokens of the window of 5"),
        (["--policies", "fll"], "error: no policy is called 'fll'. Did you mean 'full'?"),
        (["--task", "needle", "--window", "20"], "error: task 'needle': fact and question take "),
        (["--cache-bits", "2"], "error: --cache-bits 2 is none of 32, 8, 4: the model computes in 32 bits"),
        (["--bos", "one,three"], "error: --bos 'three' is none of auto, always, none, one, two"),
        (["--visibility", "gone"], "error: --visibility 'gone' is none of visible, hidden"),
        (["--items", "1"], "error: --items 1 must be 2 or more: an interval needs several texts"),
        (["--level", "95"], "error: --level 95 must lie between 0 and 1: 0.95 is that of intervals of 95 %"),
        (["--level", "0"], "error: --level 0 must lie between 0 and 1"),
    ],
)
def test_one_line_for_what_cannot_be(checkpoint, arguments, message):
    result = run(checkpoint, *arguments, status=2)
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_model_without_a_tokenizer(own_checkpoint):
    for file in own_checkpoint.glob("*token*"):
        file.unlink()
    result = run(own_checkpoint, *QUICK, status=2)
    assert result.stderr.startswith("error: task 'long_text' reads text and this model has no tokenizer")


def test_help_teaches():
    text = " ".join(run("--help").stdout.split())
    for part in ("yes:", "no:", "undecided:", "lm_eval:arc_easy", "--window", "Examples"):
        assert part in text
