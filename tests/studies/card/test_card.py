"""Cards: the numbers are those of the run, and the command makes the run again."""

from __future__ import annotations

import html
import shlex

import pytest
import torch
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.results.blocks import plain
from sinklab.results.table import read_run, write_json
from sinklab.studies.card.card import public_name
from sinklab.studies.origin.origin import find_origin

CACHE = ["--text", "random_tokens", "--tokens", "80", "--documents", "2", "--window", "16", "--sinks", "0,1", "--seed", "3"]
SHORT = ["--samples", "3", "--seq-len", "12", "--no-cache"]
AUDIT = ["--corpus", "random_tokens", *SHORT]


def run(*arguments: object, status: int = 0):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """Folders of a comparison of policies and of an audit."""
    folder = tmp_path_factory.mktemp("runs")
    run("cache", checkpoint, *CACHE, "--policies", "full,window,sink_window", "--out", folder / "cache")
    run("audit", checkpoint, *AUDIT, "--out", folder / "audit")
    return folder


def test_the_card_of_a_comparison(runs, checkpoint):
    printed = run("card", runs / "cache").stdout
    summary = read_run(runs / "cache", "summary.json")
    assert printed.startswith("## Attention sinks\n\n")
    for entry in summary["policies"]:
        assert f"{entry['loss']:.3f}" in printed
    # Where it lay on this machine is nobody's business; the command would make nothing again without it.
    assert str(checkpoint.parent) not in printed.replace(printed.split("```")[1], "")


@pytest.mark.parametrize("kind", ["cache", "audit"])
def test_the_command_makes_the_run_again(runs, checkpoint, tmp_path, monkeypatch, kind):
    block = run("card", runs / kind).stdout.split("```")[1]
    words = shlex.split(block.removeprefix("console\n"))
    assert words[:3] == ["sinklab", kind, str(checkpoint)]
    monkeypatch.chdir(tmp_path)
    run(*words[1:], "--out", tmp_path / "again")
    before, after = (read_run(folder / kind if folder is runs else folder / "again") for folder in (runs, tmp_path))
    assert after["token_sha256"] == before["token_sha256"]
    assert after["config"] == before["config"]
    first, second = (read_run(folder, "summary.json") for folder in (runs / kind, tmp_path / "again"))
    assert first.get("loss") == second.get("loss")
    assert [entry["loss"] for entry in first.get("policies", ())] == [entry["loss"] for entry in second.get("policies", ())]


def test_the_card_of_depend(checkpoint, tmp_path):
    """A row and metrics for each task, on what it was measured, and a line that measures the same."""
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"The house number {number} has a green door." for number in range(400)))
    tasks = f"long_text:contexts=[1.0,2.0],corpus={book},passkey:distances=[]"
    settings = ["--window", "70", "--items", "3"]
    run("depend", checkpoint, "--task", tasks, *settings, "--out", tmp_path / "first")
    text = run("card", tmp_path / "first").stdout
    first = read_run(tmp_path / "first", "summary.json")
    long_text = first["tasks"][0]
    assert plain(long_text["sentence"]) in text
    assert f"{long_text['difference']['mean']:+z.3f} [".replace("-", "\u2212") in text.replace("\\[", "[")
    words = shlex.split(text.split("```")[1].removeprefix("console\n"))
    assert str(tmp_path) not in text.replace(text.split("```")[1], "")
    run(*words[1:], "--out", tmp_path / "again")
    assert read_run(tmp_path / "again", "summary.json") == first


def test_inputs_of_python_have_no_command(checkpoint, tmp_path):
    ids = torch.randint(3, 30, (8, 12), generator=torch.Generator().manual_seed(0))
    find_origin(str(checkpoint), inputs=ids, out=tmp_path / "origin")
    assert read_run(tmp_path / "origin")["command"] is None
    assert "How to reproduce" in run("card", tmp_path / "origin").stdout


def test_the_command_has_the_sections_of_an_audit(checkpoint, tmp_path):
    run("audit", checkpoint, *AUDIT, "--origin", "--certificate", "--out", tmp_path / "audit")
    words = shlex.split(run("card", tmp_path / "audit").stdout.split("```")[1].removeprefix("console\n"))
    assert {"--origin", "--certificate", "--no-cache"} <= set(words)
    assert "--causes" not in words


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "measure"}, "is a run of measure, of which there is no card; there is of audit, cache"),
        ({"kind": "cache"}, "summary.json is not there"),
    ],
)
def test_bad_input(tmp_path, record, message):
    write_json(record, tmp_path / "run.json")
    said = run("card", tmp_path, status=2).stderr
    assert message in said
    assert said.count("\n") == 1
    assert "is not there" in run("card", tmp_path / "none", status=2).stderr


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("/srv/models/mine", "mine"),
        ("./mine/", "mine"),
        ("~/mine", "mine"),
        ("C:\\models\\mine", "mine"),
        ("org/model", "org/model"),
        ("embedded:softmax", "embedded:softmax"),
        ("a/b/c", "c"),
    ],
)
def test_public_names(name, public):
    assert public_name(name) == public


@pytest.mark.parametrize("token", ["__init__", "_x_", "a_b_c", "~~gone~~", "*a*", "**b**", "`c`", "[d](e)", "<s>", "__", "_"])
def test_no_token_is_markup(token):
    """Underscores inside of a word are none, and stay as they are."""
    from markdown_it import MarkdownIt

    shown = MarkdownIt("commonmark").enable("strikethrough").render(plain(f"sink at “{token}”, of x"))
    assert shown == f"<p>sink at “{html.escape(token, quote=False)}”, of x</p>\n"
    assert "\\" not in plain("a_b_c")
