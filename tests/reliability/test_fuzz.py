"""The fuzzer of the command line: its oracle sees what it is to see, its lines stay in their folder, and a few of them run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path, PurePath

import pytest
from tests.reliability import fuzz
from tests.reliability.fuzz import Scene, faults_of
from tests.reliability.lines import QUICK, commands, line
from tests.reliability.sandbox import Ended, Limits

LINES = 25


@pytest.fixture(scope="module")
def drawn():
    return [line(1, index) for index in range(1500)]


def test_a_line_is_given_by_seed_and_index(drawn):
    assert drawn[:50] == [line(1, index) for index in range(50)]
    assert drawn[:50] != [line(2, index) for index in range(50)]


def test_every_command_and_every_option_is_drawn(drawn):
    assert {words[0] for words in drawn if words} >= set(commands())
    for name, options in commands().items():
        given = {word.partition("=")[0] for words in drawn if words and words[0] == name for word in words}
        missing = [option.names for option in options if option.names and not given & set(option.names)]
        assert len(missing) < len(options) / 2, name
    assert set(QUICK) <= set(commands())


def test_no_line_names_a_place_outside_its_folder(drawn):
    for words in drawn:
        for word in words:
            for part in (word, word.partition("=")[2], word.rpartition("=")[2]):
                assert not part.startswith(("/", "~"))
                assert ".." not in PurePath(part).parts


class Planted:
    """Commands that break a rule each."""

    @staticmethod
    def raises():
        raise IndexError("list index out of range")

    @staticmethod
    def two_errors():
        sys.stderr.write("error: one thing is wrong here\nerror: another thing is wrong too\n")
        sys.exit(2)

    @staticmethod
    def python_words():
        sys.stderr.write("error: it failed with a KeyError at 'x'\n")
        sys.exit(2)

    @staticmethod
    def wordless():
        sys.exit(2)

    @staticmethod
    def long():
        sys.stderr.write(f"error: {'this is too long ' * 100}\n")
        sys.exit(2)

    @staticmethod
    def talks():
        print("a result")
        sys.stderr.write("error: there was none of it\n")
        sys.exit(2)

    @staticmethod
    def litters():
        Path("new").mkdir()
        Path("new/.out.partial").mkdir()

    @staticmethod
    def refuses_and_writes():
        Path("half").write_text("a")
        sys.stderr.write("error: there is something wrong\n")
        sys.exit(2)

    @staticmethod
    def other_status():
        sys.exit(5)

    @staticmethod
    def killed():
        os.kill(os.getpid(), signal.SIGUSR1)

    @staticmethod
    def calls_out():
        import socket

        socket.getaddrinfo("localhost", 1)

    @staticmethod
    def takes_all_memory():
        bytearray(1 << 40)

    @staticmethod
    def hangs_with_traceback():
        time.sleep(60)

    @staticmethod
    def good():
        print("a result")
        Path("out").write_text("a")


FAULTS = {
    "raises": "traceback: IndexError: list index out of range",
    "two_errors": "2 errors in 2 lines",
    "python_words": "an error in terms of Python",
    "wordless": "0 errors in 0 lines",
    "long": "an error of 1707 characters",
    "talks": "output besides the error",
    "litters": "left behind: new/.out.partial",
    "refuses_and_writes": "left behind: half",
    "other_status": "status 5",
    "killed": f"status -{int(signal.SIGUSR1)}",
    "calls_out": "network",
    "takes_all_memory": "traceback: MemoryError",
    "hangs_with_traceback": "traceback: KeyboardInterrupt",
    "good": None,
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    made = Scene(tmp_path_factory.mktemp("scene"))
    (made.template / "text.txt").write_text("a")
    made.reset()
    return made


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(scene, name):
    ended, faults = scene.run(getattr(Planted, name), Limits(seconds=0.3 if name.startswith("hangs") else 20))
    wanted = FAULTS[name]
    assert [fault for fault in faults if fault.startswith(wanted or "")] if wanted else not faults, (ended, faults)
    assert sorted(os.listdir(scene.work)) == ["text.txt"]  # the next line finds the folder as this one did


def test_what_is_allowed_is_no_fault():
    def ended(status: int, stdout: str = "", stderr: str = "", late: bool = False) -> Ended:
        return Ended(status, stdout, stderr, 0.1, late, False)

    allowed = [
        ended(0, "a result\n", "training 2 of 3\n"),
        ended(1, "a table\n", "failed: one of three\n"),
        ended(2, "", "error: --seed has 77 bits; expected a whole number of 64 bits at most\n"),
        ended(3, "diverged\n"),
        ended(130, "", "interrupted\n", late=True),
        ended(-9, "", "", late=True),
    ]
    assert [faults_of(one, []) for one in allowed] == [[]] * len(allowed)
    assert faults_of(ended(130, "", "interrupted\n"), [])
    assert faults_of(ended(1, "a table\n"), [])
    assert faults_of(ended(2, "", "error: 3 samples are too many; lower `samples` or `other`\n"), []) == [
        "advice on samples, which is no option of the command"
    ]


def test_a_few_lines_of_the_command_line_keep_to_the_rules(tmp_path, capsys):
    record = tmp_path / "record.json"
    status = fuzz.main([f"--lines={LINES}", "--seed=0", "--seconds=2", "--bare", f"--record={record}"])
    assert status == 0, capsys.readouterr().out
    kept = json.loads(record.read_text())
    assert (kept["lines"], kept["faults"]) == (LINES, [])
    assert kept["outcomes"]["refused"] > 0
