"""Output paths on the command line: every command that writes a folder refuses one that is in use, and all refuse odd paths."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path

import pytest
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.cli.commands import find_commands
from sinklab.cli.derive import print_result
from sinklab.results.folder import FolderLock
from sinklab.results.run import Result
from sinklab.results.table import make_table

FOLDERS = {
    "audit": ["nowhere"],
    "measure": ["nowhere", "--probe", "entropy"],
    "cache": ["nowhere"],
    "causes": ["nowhere"],
    "origin": ["nowhere"],
    "quantize": ["nowhere"],
    "depend": ["nowhere"],
    "trigger": ["--seeds", "0"],
    "pretrain": ["tiny"],
    "sweep": ["tiny"],
    "pathways": ["--operations", "softpick", "--seeds", "0"],
    "reproduce": ["repeated_token_laws"],
}
"""Commands that write a folder, and what makes them write one; the models are not there, since none gets so far."""

FILES = ("compare", "export", "plot")
"""Commands whose ``out`` is a file, or a folder in which they replace files one by one (tests/results/test_file.py)."""

IN_PLACE = {"reproduce": Path("tiny") / "repeated_token_laws"}
"""What a command has for itself, of a folder that several may use."""


def run(*line: object) -> str:
    """The error of a line that is refused."""
    done = CliRunner().invoke(app, [str(word) for word in line])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    *before, error = done.stderr.splitlines()
    assert error.startswith("error: ")
    # What a command will take is said before it looks at a folder that others may use too.
    assert all(said.startswith("claims: 1, ") for said in before), done.stderr
    assert len(before) == (line[0] == "reproduce" and " is in use by " in error)
    return error


def test_these_are_all_that_write():
    writing = {name for name, place in find_commands().items() if "out" in inspect.signature(place.load()).parameters}
    assert writing == {*FOLDERS, *FILES}


@pytest.mark.parametrize("command", FOLDERS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_another_process_uses(tmp_path, command, overwrite):
    line = [command, *FOLDERS[command], "--out", tmp_path / "out"]
    if overwrite:
        if "overwrite" not in inspect.signature(find_commands()[command].load()).parameters:
            return
        line.append("--overwrite")
    with FolderLock(tmp_path / "out" / IN_PLACE.get(command, "")) as lock:
        assert f" is in use by process {os.getpid()} on " in run(*line)
        assert lock.held
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [lock.path]
    assert list(tmp_path.iterdir()) == []


ENDINGS = [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]


@pytest.mark.parametrize(("number", "status", "word"), ENDINGS)
def test_signals_leave_nothing(tmp_path, monkeypatch, number, status, word):
    """SIGTERM is Ctrl-C by another name: what was begun is put in order, and the handler is as it was."""
    monkeypatch.setattr("sinklab.models.loading.opened", lambda *_, **__: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    done = CliRunner().invoke(app, ["cache", "embedded:softmax", "--out", str(tmp_path / "new" / "out")])
    assert (done.exit_code, done.stdout, done.stderr) == (status, "", f"{word}\n")
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(tmp_path.iterdir()) == []


def test_a_signal_says_what_is_kept(tmp_path, monkeypatch):
    """The trigger task has stored its first model when it is to draw its numbers from it."""
    monkeypatch.setattr("sinklab.studies.trigger.lab.evaluate", lambda *_: signal.raise_signal(signal.SIGTERM))
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["trigger", "--operation", "relu", "--seeds", "0", "--cap", "1", "--out", str(out)])
    assert (done.exit_code, done.stdout) == (143, "")
    assert done.stderr == f"terminated; what was computed is kept in {out / 'store'}: go on with --resume\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_command_that_always_goes_on_names_no_option_that_it_lacks(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("sinklab.studies.depend.measurement.outcome", lambda *_: signal.raise_signal(signal.SIGINT))
    small = ["--task", "passkey:distances=[]", "--window", "70", "--policies", "full", "--sinks", "4", "--items", "2"]
    done = CliRunner().invoke(app, ["depend", str(checkpoint), *small, "--out", str(tmp_path / "out"), "--overwrite"])
    kept = f"what was computed is kept in {tmp_path / '.out.partial' / 'store'}"
    assert done.stderr.endswith(f"interrupted; {kept}: the same command goes on from there\n")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["pretrain", "tiny", "--set", "data.corpus=nowhere.txt"], "there is no text file 'nowhere.txt'"),
        (["quantize", "embedded:softmax", "--corpus", "nowhere.txt"], "there is no text file 'nowhere.txt'"),
    ],
)
def test_what_cannot_begin_leaves_nothing_and_costs_nothing(tmp_path, line, problem):
    out = tmp_path / "new" / "out"
    assert problem in run(*line, "--out", out)
    assert list(tmp_path.iterdir()) == []
    out.mkdir(parents=True)
    (out / "run.json").write_text("{}")
    assert problem in run(*line, "--out", out, "--overwrite")
    assert [path.name for path in out.parent.rglob("*")] == ["out", "run.json"]
    assert (out / "run.json").read_text() == "{}"


@pytest.mark.parametrize(("by", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_training_that_a_signal_has_stopped(by, status, capsys):
    result = Result({"status": "stopped"}, make_table([]), {"kind": "pretrain", "stopped_by": by}, None, lambda _: ["stopped"])
    assert print_result(result) == status
    assert capsys.readouterr().out == "stopped\n"


def test_what_failed_names_options(capsys):
    result = Result({"errors": ["a: go on with `resume`"]}, make_table([]), {"kind": "sweep"}, None, lambda _: [])
    assert print_result(result, names={"resume": "--resume"}) == 1
    assert capsys.readouterr().err == "failed: a: go on with --resume\n"
