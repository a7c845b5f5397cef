"""Curves of training runs are those of the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from tools.plot_runs import draw_runs, plot, read_curves

from sinklab.results.folder import in_use
from sinklab.results.table import make_table, read_table, write_json, write_table


def test_the_lock_file_of_a_dead_process_holds_nothing(tmp_path):
    line = "import os, sys; from sinklab.results.folder import FolderLock, Path; FolderLock(Path(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", line, tmp_path / "out"], check=False).returncode == 9
    assert (tmp_path / ".out.lock").is_file()
    assert not in_use(tmp_path / "out")


STEPS = (0, 100, 200)


def make_run(folder: Path, *, sink: int = 2, operation: str = "softmax") -> Path:
    """Two layers of two heads over six positions; the rate at ``sink`` grows with the step, by head."""
    rows = []
    for step in STEPS:
        rates = {}
        for layer in range(2):
            for head in range(2):
                for position in range(6):
                    rate = (layer + head) * step / 10 if position == sink else 0.0
                    rates.setdefault(position, []).append(rate)
                    place = {"layer": layer, "head": head, "key_position": position}
                    rows.append({"metric": "gu2024", "value": rate, "unit": "percent", "step": step, **place})
        for position, values in rates.items():
            value = float(np.mean(values))
            rows.append({"metric": "gu2024", "value": value, "unit": "percent", "step": step, "key_position": position})
    frames = [make_table(rows, probe="sink_rate", version=1, operation=operation)]
    losses = [
        {"metric": metric, "value": 5.0 - step / 100, "unit": "nats", "step": step}
        for step in STEPS
        for metric in ("held_out_loss", "train_loss")
    ]
    frames.append(make_table(losses, probe="training", version=1, operation=operation))
    gaps = [{"metric": "sink_loss_gap", "value": step / 1000, "unit": "nats", "step": step} for step in STEPS]
    frames.append(make_table(gaps, probe="sink_readout", version=1, operation=operation))
    folder.mkdir(parents=True)
    write_table(pd.concat(frames, ignore_index=True), folder / "table.parquet")
    write_json({"config": {"name": "test"}}, folder / "run.json")
    return folder


def test_what_is_drawn_is_what_the_table_says(tmp_path):
    run = read_curves(make_run(tmp_path / "a"))
    assert (run.label, run.sink) == ("a (softmax)", 2)
    # The mean of (layer + head) over four heads is 1, times step / 10.
    assert run.series("sink_rate", "gu2024", 2).to_dict() == {0: 0.0, 100: 10.0, 200: 20.0}
    losses, rates, gaps = draw_runs([run]).axes
    assert rates.lines[0].get_ydata().tolist() == [0.0, 10.0, 20.0]
    assert losses.lines[1].get_ydata().tolist() == [5.0, 4.0, 3.0]
    assert gaps.lines[0].get_ydata().tolist() == [0.0, 0.1, 0.2]


def test_a_late_key_that_few_queries_see_is_no_sink(tmp_path):
    folder = make_run(tmp_path / "run", sink=1)
    table = read_table(folder / "table.parquet")
    table.loc[(table["key_position"] == 5) & (table["metric"] == "gu2024"), "value"] = 99.0
    write_table(table, folder / "table.parquet")
    assert read_curves(folder).sink == 1


def test_a_sweep_stands_for_its_runs(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / "sweep" / name)
    write_json({"cells": [{"name": "one"}, {"name": "two"}]}, tmp_path / "sweep" / "sweep.json")
    plot([tmp_path / "sweep"], out=tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert "<!-- one (softmax), position 2 -->" in text
    assert "<!-- two (softmax), position 2 -->" in text
