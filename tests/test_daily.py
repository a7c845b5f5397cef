"""What a daily user meets: versions, quiet, estimates, colours, narrow terminals, one folder, completion."""

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.command_line import CliRunner

from sinklab.cli import app as application
from sinklab.cli.app import app, versions
from sinklab.cli.commands import find_commands
from sinklab.results import progress as bars
from sinklab.results.environment import installed
from sinklab.results.folder import default_out
from sinklab.results.progress import SETTLED, Pace, is_quiet, quietly, say
from sinklab.results.version import __version__

QUICK = ["--corpus", "random_tokens", "--samples", "3", "--seq-len", "12", "--probe", "sink_rate"]


def run(*arguments: object, status: int = 0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == status, done.output
    return done


@pytest.fixture
def watched(monkeypatch):
    """Streams that say that they are terminals."""
    monkeypatch.setattr(bars, "is_watched", lambda: not is_quiet())


# --- versions ---


def test_versions_are_named_without_importing_torch():
    lines = run("--version").stdout.splitlines()
    assert lines == versions().splitlines()
    assert [line.split()[0] for line in lines] == ["sinklab", "python", "torch", "transformers", "platform"]
    assert lines[0] == f"sinklab {__version__}"
    found = installed(("torch",))
    assert lines[2] == f"torch {found['torch']}"
    assert installed(("no-such-package",))["no-such-package"] == "not installed"
    line = "import sys; sys.modules['torch'] = None; from sinklab.cli.app import versions; print(versions())"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == versions() + "\n"


# --- quiet ---


def test_quiet_silences_progress_and_sentences_but_no_result(checkpoint, tmp_path, watched, monkeypatch):
    shown = []
    monkeypatch.setattr("sinklab.cli.derive.say", lambda text: shown.append(is_quiet()))
    loud = run("measure", checkpoint, *QUICK, "--out", tmp_path / "loud")
    lines = (["measure", checkpoint, "-q"], ["-q", "measure", checkpoint], ["measure", "--quiet", checkpoint])
    for number, line in enumerate(lines):
        done = run(*line, *QUICK, "--out", tmp_path / str(number))
        assert done.stderr == ""
        assert done.stdout.splitlines()[:-1] == loud.stdout.splitlines()[:-1]  # the last one names the folder
    assert run("measure", tmp_path / "nothing", "-q", *QUICK, status=2).stderr.startswith("error: ")
    assert not is_quiet()


def test_quiet_is_of_a_block(capsys):
    with quietly(False):
        say("one")
    with quietly(), quietly():
        say("two")
    say("three")
    assert capsys.readouterr() == ("", "one\nthree\n")
    with pytest.raises(ZeroDivisionError), quietly():
        raise ZeroDivisionError
    assert not is_quiet()


# --- estimates ---


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_is_known_once_the_pace_is_and_grows_while_a_part_drags():
    clock = Clock()
    pace = Pace(clock)
    assert pace.left("measuring") is None
    pace.update("measuring", 0, 100)
    clock.now += SETTLED / 2
    pace.update("measuring", 1, 100)
    assert pace.words("measuring") == ""  # what comes first is often slow
    clock.now += 4 - SETTLED / 2
    pace.update("measuring", 2, 100)
    assert pace.left("measuring") == 2 * 98
    clock.now += 1
    assert pace.left("measuring") == 2 * 98 - 1
    clock.now += 99
    assert pace.left("measuring") > 98 * 104 / 3 - 101  # the third part took 100 s so far
    pace.update("measuring", 100, 100)
    assert (pace.left("measuring"), pace.words("measuring"), pace.count("measuring")) == (0, "", "100 of 100")


def test_what_was_there_before_took_no_time_and_a_stage_may_begin_again():
    clock = Clock()
    pace = Pace(clock)
    pace.update("resumed", 90, 100)
    clock.now += 10
    pace.update("resumed", 92, 100)
    assert pace.words("resumed") == "about 40 seconds left"  # 5 s a part, 8 parts
    clock.now += 10
    pace.update("first word at one", 1, 9)
    assert pace.words("first word at one") == "about 80 seconds left"  # 10 s a part
    pace.update("resumed", 0, 10)
    clock.now += 20
    pace.update("resumed", 1, 10)
    assert pace.left("resumed") == 9 * 20


def test_a_plan_covers_the_stages_that_have_not_begun():
    clock = Clock()
    pace = Pace(clock)
    assert (pace.share(), pace.left_in_all()) == (None, None)
    pace.plan({"first": 1.0, "second": 9.0})
    pace.update("first", 0, 4)
    clock.now += 10
    pace.update("first", 2, 4)
    assert (pace.share(), pace.left_in_all()) == (0.05, 10 * 9.5 / 0.5)
    assert pace.words_in_all() == "about 3 minutes left in all"
    pace.update("second", 0, 9)
    pace.update("second", 9, 9)
    assert pace.left_in_all() == pace.left("first") == 10.0  # never less than a stage of it


def test_a_plan_ends_when_no_further_part_is_begun():
    clock = Clock()
    pace = Pace(clock)
    pace.plan({"first": 1.0, "second": 9.0}, within=60)
    pace.update("first", 0, 4)
    clock.now += 10
    pace.update("first", 2, 4)
    assert pace.left_in_all() == 50
    clock.now += 45
    pace.update("first", 3, 4)  # it takes longer than there is, which the whole does not hide
    assert pace.left_in_all() == pace.left("first") > 5


@pytest.mark.parametrize("slow", [False, True])
def test_a_line_tells_of_slow_stages_where_there_is_no_terminal(slow, monkeypatch, capsys):
    monkeypatch.setattr(bars, "FIRST_LINE", 0.01 if slow else 60.0)
    with bars.bars("loading") as progress:
        time.sleep(0.05)
        bars.plan(progress, {"measuring": 1.0})
        progress("measuring", 1, 3)
        time.sleep(0.05)
    shown = capsys.readouterr().err.splitlines()
    assert shown == (["loading: at work", "measuring: 1 of 3"] if slow else [])


def test_a_part_of_a_work_is_one_stage_of_its_plan():
    shown = []
    part = bars.PartOf(lambda *words: shown.append(words), "cache")
    part("before the plan", 1, 2)
    bars.plan(part, {"window": 1.0, "recompute": 3.0})
    part("window", 5, 5)
    part("recompute", 1, 2)
    assert shown == [("before the plan", 1, 2), ("cache", 25, 100), ("window", 5, 5), ("cache", 62, 100), ("recompute", 1, 2)]


def test_bars_say_what_is_left_on_a_terminal(watched, monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(bars, "Pace", lambda: Pace(clock))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with bars.bars("loading") as progress:
        bars.plan(progress, {"measuring": 1.0, "sections": 3.0})
        progress("measuring", 0, 100)
        clock.now += 8
        progress("measuring", 1, 100)
    shown = capsys.readouterr().err
    assert "1 of 100, about 13 minutes left" in shown
    assert "about 53 minutes left in all" in shown


# --- colours and widths ---


def colours(**environment: str) -> str:
    cleared = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    line = [sys.executable, "-m", "sinklab", "list", "recipes"]
    done = subprocess.run(line, env={**cleared, "TERM": "xterm", **environment}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_colours_can_be_forced_and_refused():
    assert "\x1b[" not in colours()
    forced = colours(FORCE_COLOR="1")
    assert forced.startswith("\x1b[1mrecipes")
    bare = colours(FORCE_COLOR="1", NO_COLOR="1")
    assert not {f"\x1b[{code}m" for code in range(30, 38)} & set(bare.replace("m", "m ").split())


# --- one folder for all outputs ---


def test_outputs_go_below_one_folder(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_out("sinklab-runs", "tiny") == Path("sinklab-runs/tiny")
    monkeypatch.setenv("SINKLAB_OUT", str(tmp_path / "all"))
    assert default_out("sinklab-runs", "tiny") == tmp_path / "all" / "sinklab-runs" / "tiny"
    line = ["audit", checkpoint, "--no-cache", "--corpus", "random_tokens", "--samples", "2", "--seq-len", "8"]
    word, place = run(*line).stdout.splitlines()[-1].split()
    assert (word, place.startswith(f"{tmp_path}/all/sinklab-audit/")) == ("report", True)
    run(*line, "--out", "here")
    assert sorted(os.listdir(tmp_path)) == ["all", "here"]
    monkeypatch.setenv("SINKLAB_OUT", "~/x")
    assert default_out("y") == Path.home() / "x" / "y"


def test_no_command_writes_by_default_to_anywhere_else():
    """A path that a signature gives outright would not be below SINKLAB_OUT."""
    for place in find_commands().values():
        for name, parameter in inspect.signature(place.load()).parameters.items():
            assert not isinstance(parameter.default, Path), f"{place.place}: {name}; use WrittenTo or default_out"


# --- completion ---


def test_completion_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "script"
    run(application.INSTALL, "--shell", "bash", "--output", script)
    text = script.read_text(encoding="utf-8")
    for name in find_commands():
        assert name in text
    assert "seq-len" in text
    assert "quiet" in text
