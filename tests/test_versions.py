"""On the oldest transformers that is promised, what may fail there first: pre-training, and a cache that reads rotations."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.every_command import LINES
from tests.versions import ROOT, environment, floors

from sinklab.cli.commands import find_commands


def test_every_command_is_run_on_other_versions():
    assert sorted(LINES) == sorted(find_commands())
    for name, lines in LINES.items():
        assert lines
        assert {line.split()[0] for line in lines} == {name}


def test_the_oldest_transformers():
    oldest = floors()["transformers"]
    try:
        python = environment(oldest)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"transformers {oldest} cannot be installed here: {error.stderr.strip().splitlines()[-1]}")
    done = subprocess.run(
        [python, "-m", "tests.every_command", "pretrain", "stream"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"transformers {oldest}.")
    assert done.stdout.count("\nok ") == len(LINES["pretrain"]) + len(LINES["stream"])
