"""Curves of training runs are those of the table."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tools.plot_runs import draw_runs, plot, read_curves

from sinklab.errors import InputError
from sinklab.results.folder import in_use
from sinklab.results.table import make_table, read_table, write_json, write_table


def test_the_lock_file_of_a_dead_process_holds_nothing(tmp_path):
    line = "import os, sys; from sinklab.results.folder import FolderLock, Path; FolderLock(Path(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", line, tmp_path / "out"], check=False).returncode == 9
    assert (tmp_path / ".out.lock").is_file()
    assert not in_use(tmp_path / "out")


STEPS = (0, 100, 200)


def make_run(folder: Path, *, sink: int = 2, operation: str = "softmax", null: bool = False) -> Path:
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
        if null:
            rows.append({"metric": "gu2024_null", "value": 50.0, "unit": "percent", "step": step})
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


def test_mass_on_nothing_has_a_curve_of_its_own(tmp_path):
    figure = draw_runs([read_curves(make_run(tmp_path / "run", operation="sink_logit", null=True))])
    names = [line.get_label() for line in figure.axes[1].lines]
    assert names == ["run (sink_logit), position 2", "run (sink_logit), null score"]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_files(tmp_path, suffix):
    page = plot([make_run(tmp_path / "a"), make_run(tmp_path / "b", sink=0)], out=tmp_path / f"plots/curves{suffix}")
    assert page.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")


def test_a_sweep_stands_for_its_runs(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / "sweep" / name)
    write_json({"cells": [{"name": "one"}, {"name": "two"}]}, tmp_path / "sweep" / "sweep.json")
    plot([tmp_path / "sweep"], out=tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert "<!-- one (softmax), position 2 -->" in text
    assert "<!-- two (softmax), position 2 -->" in text


def test_cells_without_numbers_are_named_and_the_others_drawn(tmp_path, capsys):
    cells = [tmp_path / "lr" / f"learning_rate={rate},seed=0-a9" for rate in (0.001, 0.004)]
    for cell in cells:
        make_run(cell)
    write_json({"cells": [{"name": cell.name} for cell in cells]}, tmp_path / "lr" / "sweep.json")
    (cells[0] / "table.parquet").write_bytes(b"torn")
    page = plot([tmp_path / "lr"], out=tmp_path / "curves.svg")
    assert capsys.readouterr().err == "Not drawn, as they have no numbers: learning_rate=0.001,seed=0-a9.\n"
    assert "<!-- learning_rate=0.004,seed=0 (softmax), position 2 -->" in page.read_text()
    shutil.rmtree(cells[1])
    with pytest.raises(InputError, match=r"^no run of .*lr has numbers to draw yet"):
        plot([tmp_path / "lr"], out=tmp_path / "other.svg")
    with pytest.raises(InputError, match="not there"):  # a run that is named is one that is wanted
        plot([cells[1]], out=tmp_path / "other.svg")


def test_errors(tmp_path):
    with pytest.raises(InputError, match=r"run\.json is not there"):
        plot([tmp_path], out=tmp_path / "curves.png")
    run = make_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"cannot write 'curves\.docx': give a name that ends in \.png, \.svg or \.pdf"):
        plot([run], out=tmp_path / "curves.docx")
    write_table(make_table([{"metric": "gu2024", "value": 1.0, "unit": "percent"}], probe="sink_rate"), run / "table.parquet")
    with pytest.raises(InputError, match=r"a run of another command, has no numbers by step; give the output"):
        read_curves(run)
