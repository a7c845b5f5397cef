"""One cell of a sweep, in whatever process: reads the plan, begins its run or goes on with it, and leaves a run folder."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from sinklab.errors import InputError
from sinklab.jobs.grid import Cell
from sinklab.jobs.processes import serve
from sinklab.results.folder import in_use
from sinklab.results.table import read_run, write_json
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import PreparedData, prepare_data
from sinklab.training.record import Status
from sinklab.training.train import run_training

PLAN = "sweep.json"

SHARED = "claims"
"""``recipe`` of the plan of a store, in which several drivers may train at the same time; a sweep has one."""

ENDED = ("finished", "diverged")
"""Statuses of a run that has come to its end."""

NUMBERS = ("held_out_loss", "sink_rate")
"""Numbers of a run that are summarised over seeds: nats, and percent at position 0 (Gu et al. 2024)."""

PATIENCE = 60.0
"""Seconds to wait for the process that had the cell of a sweep before, which is perhaps still writing its last checkpoint."""


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """What a sweep runs, as ``sweep.json`` has it.

    Args:
        folder: output directory of the sweep.
        sweep_id: identity of the sweep.
        cells: by name, in the order in which they are run.
        texts: name of a cell to the hashes of its text (:func:`text_of`) as the driver found it.
        cache: directory of encoded text.
        shared: whether it is the plan of a store, so that another driver may be training a cell.
    """

    folder: Path
    sweep_id: str
    cells: dict[str, Cell]
    texts: dict[str, dict[str, str]]
    cache: Path
    shared: bool = False

    def log(self, name: str) -> Path:
        """What a cell had to say while it ran, all attempts."""
        return self.folder / "logs" / f"{name}.log"

    def run(self, name: str) -> dict[str, Any]:
        """``run.json`` of a cell; only ``status``, which is ``waiting``, before it has begun."""
        folder = self.folder / name
        return read_run(folder) if (folder / "run.json").is_file() else {"status": "waiting"}

    def outcome(self, name: str) -> str | None:
        """How the run of a cell has ended, in words; ``None`` while it has not."""
        run = self.run(name)
        if run["status"] not in ENDED:
            return None
        loss, rate = (run["result"][number] for number in NUMBERS)
        numbers = [f"held-out loss {loss:.3f}"] if loss is not None else []
        numbers += [f"sink rate {rate:.2f} %"] if rate is not None else []
        return ", ".join([run["status"], *numbers])

    def write(self, **more: object) -> None:
        """Write ``sweep.json``."""
        cells = [
            {
                "name": cell.name,
                "settings": cell.settings,
                "seed": cell.seed,
                "text": self.texts[cell.name],
                "config": cell.config.model_dump(mode="json"),
                "init_from": cell.init_from,
            }
            for cell in self.cells.values()
        ]
        record = {"kind": "sweep", "sweep_id": self.sweep_id, **more, "cache": str(self.cache), "cells": cells}
        write_json(record, self.folder / PLAN)


def read_plan(folder: Path) -> SweepPlan:
    """The plan of a sweep from its output directory."""
    record = read_run(folder, PLAN)
    if record.get("kind") != "sweep":
        raise InputError(f"{folder / PLAN} is not the plan of a sweep (kind {record.get('kind')!r})")
    cells = {
        cell["name"]: Cell(cell["name"], cell["settings"], PretrainingConfig.parse(cell["config"]), cell.get("init_from"))
        for cell in record["cells"]
    }
    texts = {cell["name"]: cell["text"] for cell in record["cells"]}
    return SweepPlan(folder, record["sweep_id"], cells, texts, Path(record["cache"]), record.get("recipe") == SHARED)


def run_cell(folder: Path, name: str) -> Status:
    """Run a cell of the sweep in ``folder`` on the text of the sweep, or go on with it from its newest whole checkpoint.

    A cell of a store that another process trains is waited for, however long that takes; one of a sweep is refused.
    """
    plan = read_plan(folder)
    print(f"--- process {os.getpid()} on {socket.gethostname()}, {datetime.datetime.now():%F %T}", file=sys.stderr, flush=True)
    config = plan.cells[name].config
    if text_of(prepare_data(config, plan.cache)) != plan.texts[name]:
        raise InputError(
            f"data.corpus {config.data.corpus!r} gives another text on {socket.gethostname()} than where the sweep was begun"
        )
    begun = (folder / name / "run.json").is_file()  # a run that has begun knows where from, also in a folder that was moved
    before = plan.cells[name].init_from
    init_from = None if begun or before is None else folder / before
    if plan.shared and in_use(folder / name):
        print("waiting for another process that trains it", file=sys.stderr, flush=True)
    patience = math.inf if plan.shared else PATIENCE
    result = run_training(config, folder / name, resume=True, init_from=init_from, cache=plan.cache, patience=patience)
    return cast(Status, result.summary["status"])


def text_of(data: PreparedData) -> dict[str, str]:
    """Hashes of the training tokens, the held-out tokens and the tokenizer."""
    identity = data.identity
    parts = {"train": identity, "held_out": identity["held_out"], "tokenizer": identity["tokenizer"]}
    return {part: facts["sha256"] for part, facts in parts.items()}


def main(arguments: Sequence[str]) -> None:
    """The process of the local driver, or one that anybody starts, also by torchrun."""
    folder, name = arguments
    serve(lambda: run_cell(Path(folder), name))


if __name__ == "__main__":
    main(sys.argv[1:])
