"""A line of sinklab in a process that is to be killed: forked where everything is imported, so that it works at once.

The module is what the server of :mod:`multiprocessing` imports before it forks; nothing here computes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pandas
import torch
import transformers

import sinklab.cli
import sinklab.jobs.driver
import sinklab.streaming.stream
import sinklab.studies.audit.measurement
import sinklab.studies.audit.page
import sinklab.studies.causes.measurement
import sinklab.studies.trigger.lab
import sinklab.training.train
from sinklab.configuration import with_overrides
from sinklab_claims.contract import claim as contract
from sinklab_claims.contract.claim import base_config
from sinklab_claims.reproduce import store

IMPORTED = (pandas, torch, transformers, sinklab)

WRITES = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "os.link", "os.symlink"})
"""Events of ``sys.audit`` that change names on the disk; to these comes ``open`` for writing."""

SMALL = (
    *("training.steps=12", "training.save_every=4", "training.log_every=3", "training.evaluate_every=6", "watch.every=6"),
    *("watch.samples=8", "schedule.warmup_steps=2", "data.max_tokens=20_000", "data.held_out_rows=8"),
)
"""What makes the tiny scale of the claims a matter of a second."""


def small_config(scale: str, base: str | None = None) -> Any:
    """The configuration of every scale and base while lines are killed."""
    return with_overrides(base_config("tiny"), list(SMALL))


def run_line(
    line: Sequence[str], work: Path, environment: dict[str, str], writes: Synchronized[int], die_at: tuple[int, int] | None
) -> None:
    """Run a line in a folder, with its output in files, and count what it writes there.

    Args:
        writes: gets the number of changes of names below ``work``.
        die_at: the number of a change before which the process sends itself a signal, and the signal.
    """
    os.setsid()
    os.environ.update(environment)
    os.chdir(work)
    for descriptor, name in ((0, os.devnull), (1, "../stdout"), (2, "../stderr")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115  of the whole process
    for module in (store, contract):
        module.base_config = small_config
    below = str(work)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if not (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(flags, int) else "r" not in str(mode)):
                return
        elif event in WRITES:
            path = arguments[0]
        else:
            return
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        name = os.fsdecode(path)
        if not os.path.isabs(name):  # shutil.rmtree goes by open folders
            descriptor = arguments[-1] if event in ("os.remove", "os.rmdir") else -1
            name = os.readlink(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else os.path.abspath(name)
        if not name.startswith(below):
            return
        with writes.get_lock():
            writes.value += 1
            number = writes.value
        if die_at is not None and number == die_at[0]:
            os.kill(os.getpid(), die_at[1])

    sys.addaudithook(note)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["sinklab", *line]
    sinklab.cli.main()
