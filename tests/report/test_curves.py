"""Curves of runs: the numbers drawn are those of the table, and folders that are no runs are refused by name."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sinklab.errors import InputError
from sinklab.report.curves import draw_runs, measured_apart, write_plot
from sinklab.report.training_runs import RunCurves, read_curves
from sinklab.results.table import make_table, write_json, write_table
from sinklab.studies.plot.plot import plot

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
    assert (run.name, run.operation, run.sink) == ("a", "softmax", 2)
    steps, values = run.series("sink_rate", "gu2024", 2)
    # The mean of (layer + head) over four heads is 1, times step / 10.
    assert steps.tolist() == [0, 100, 200]
    assert values.tolist() == [0.0, 10.0, 20.0]
    assert run.heads().loc[(1, 1)].tolist() == [0.0, 20.0, 40.0]
    assert run.layers().loc[0].tolist() == [0.0, 5.0, 10.0]
    assert run.profile().loc[2].tolist() == [0.0, 10.0, 20.0]
    assert run.profile().shape == (3, 3)  # of six positions, those that half of the queries see

    figure = draw_runs([run])
    losses, rates, gaps, layers, heads, positions = figure.axes[:6]
    assert rates.lines[0].get_ydata().tolist() == [0.0, 10.0, 20.0]
    assert losses.lines[1].get_ydata().tolist() == [5.0, 4.0, 3.0]
    assert gaps.lines[0].get_ydata().tolist() == [0.0, 0.1, 0.2]
    assert "sink rate at position 2" in layers.get_title()
    assert heads.images[0].get_array().shape == (4, 3)
    assert [label.get_text() for label in heads.get_yticklabels()] == ["0.0", "0.1", "1.0", "1.1"]
    assert positions.images[0].get_array().shape == (3, 3)


def test_runs_that_were_measured_in_different_ways_are_said_to_be(tmp_path):
    """A rate above 0.3 and one above 0.9, or of two definitions, would stand on one axis without a word."""
    folders = [make_run(tmp_path / name) for name in "abc"]
    for folder, threshold in zip(folders, (0.3, 0.9, 0.3), strict=True):
        watch = {"threshold": threshold, "window": 16, "every": threshold}
        write_json({"config": {"watch": watch, "data": {"corpus": "text.txt"}}}, folder / "run.json")
    table = read_curves(folders[2]).table
    table.loc[table["metric"] == "gu2024", "version"] = 2
    write_table(table, folders[2] / "table.parquet")
    said = []
    write_plot(folders[:2], tmp_path / "two.png", note=said.append)
    assert said == ["These runs differ in watch.threshold (0.3, 0.9): what depends on it is not comparable as it stands."]
    runs = [read_curves(folder) for folder in folders]
    both = "watch.threshold (0.3, 0.9) and the definition of gu2024 (version 1, version 2)"
    assert f"These runs differ in {both}:" in draw_runs(runs).get_supxlabel().replace("\n", " ")
    assert measured_apart(runs[:1]) == ""


def test_a_late_key_that_few_queries_see_is_no_sink(tmp_path):
    folder = make_run(tmp_path / "run", sink=1)
    table = read_curves(folder).table
    table.loc[(table["key_position"] == 5) & (table["metric"] == "gu2024"), "value"] = 99.0
    write_table(table, folder / "table.parquet")
    assert read_curves(folder).sink == 1


def test_mass_on_nothing_has_a_curve_of_its_own(tmp_path):
    figure = draw_runs([read_curves(make_run(tmp_path / "run", operation="sink_logit", null=True))])
    names = [line.get_label() for line in figure.axes[1].lines]
    assert names == ["run (sink_logit), position 2", "run (sink_logit), null score"]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_files(tmp_path, suffix):
    page = write_plot([make_run(tmp_path / "a"), make_run(tmp_path / "b", sink=0)], tmp_path / f"plots/curves{suffix}")
    assert page.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")


def test_a_sweep_stands_for_its_runs(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / "sweep" / name)
    write_json({}, tmp_path / "sweep" / "sweep.json")
    write_plot([tmp_path / "sweep"], tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert "<!-- one (softmax), position 2 -->" in text
    assert "<!-- two (softmax), position 2 -->" in text


def make_sweep(folder: Path, rates, seeds) -> list[Path]:
    """A plan of all combinations, and a run of each."""
    cells = [
        {"name": f"learning_rate={rate},seed={seed}-a9", "settings": {"optimizer.learning_rate": rate}, "seed": seed}
        for rate in rates
        for seed in seeds
    ]
    for cell in cells:
        make_run(folder / cell["name"])
    write_json({"cells": cells}, folder / "sweep.json")
    return [folder / cell["name"] for cell in cells]


def test_cells_without_numbers_are_named_and_the_others_drawn(tmp_path, capsys):
    cells = make_sweep(tmp_path / "lr", (0.001, 0.004), (0, 1, 2))
    shutil.rmtree(cells[0])  # has not begun
    (cells[1] / "table.parquet").unlink()
    write_json({"status": "running"}, cells[1] / "run.json")
    write_json({"status": "failed", "error": "ValueError: no room"}, cells[2] / "run.json")
    (cells[2] / "table.parquet").unlink()
    shutil.rmtree(cells[3])  # killed before it wrote anything
    (tmp_path / "lr/cells.csv").write_text(f'cell,seed,status,error\n"{cells[3].name}",0,failed,died of signal 9\n')
    (cells[4] / "table.parquet").write_bytes(b"torn")
    page = plot([tmp_path / "lr"], out=tmp_path / "curves.svg")
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        "Not drawn: learning_rate=0.001,seed=0-a9 (not begun); learning_rate=0.001,seed=1-a9 (running, nothing measured yet); "
        "learning_rate=0.001,seed=2-a9 (failed: ValueError: no room); learning_rate=0.004,seed=0-a9 (failed: died of "
        "signal 9); learning_rate=0.004,seed=1-a9 ("
    )
    assert "is not a parquet table" in said[0]
    text = page.read_text()
    assert "Not drawn: learning" in text
    assert "<!-- learning_rate=0.004, seed=2, position 2 -->" in text
    shutil.rmtree(cells[5])
    with pytest.raises(
        InputError, match=r"^no cell of the sweep in .*lr has numbers to draw: .*seed=0-a9; .*seed=2-a9 \(not beg"
    ):
        plot([tmp_path / "lr"], out=tmp_path / "other.svg")
    with pytest.raises(InputError, match="not there"):  # a run that is named is one that is wanted
        plot([cells[0]], out=tmp_path / "other.svg")


def test_sweeps_of_one_grid_are_told_apart_by_their_folders(tmp_path):
    folders = [tmp_path / "softmax/lr", tmp_path / "sigmoid/lr"]
    cells = [cell for folder in folders for cell in make_sweep(folder, (0.001, 0.004), (0,))]
    figure = draw_runs([read_curves(cell) for cell in cells])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        f"{name}/lr: learning_rate={rate}, position 2" for name in ("softmax", "sigmoid") for rate in ("0.001", "0.004")
    ]
    runs = [make_run(tmp_path / f"{name}/run") for name in "ab"]
    figure = draw_runs([read_curves(run) for run in runs])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"{n}/run (softmax), position 2" for n in "ab"]
    write_plot([runs[0], runs[0]], tmp_path / "once.svg")
    assert (tmp_path / "once.svg").read_text().count("<!-- run (softmax), position 2 -->") == 1


def cells_like(run: RunCurves, rates, seeds) -> list[RunCurves]:
    """Cells of a sweep with the numbers of one."""
    return [
        dataclasses.replace(run, name=f"{rate},{seed}", settings={"optimizer.learning_rate": rate, "seed": seed})
        for rate in rates
        for seed in seeds
    ]


def test_no_two_lines_look_alike(tmp_path):
    """Of thirty runs the seeds of a setting have one look, of thirty settings there are more than looks."""
    (cell,) = make_sweep(tmp_path / "seeds", (0.0,), (1,))
    one = read_curves(cell)
    assert one.settings == cells_like(one, (0.0,), (1,))[0].settings
    runs = cells_like(one, [float(rate) for rate in range(15)], (0, 1))
    figure = draw_runs(runs)
    looks = {}
    for line in figure.axes[1].lines:
        looks.setdefault(line.get_label(), []).append((line.get_color(), str(line.get_linestyle())))
    assert [len(lines) for lines in looks.values()] == [2] * 15
    assert len({look for lines in looks.values() for look in lines}) == 15
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == list(looks) == [f"learning_rate={rate}, 2 seeds, position 2" for rate in range(15)]
    assert "Runs that differ in nothing but their seed have one look." in figure.get_supxlabel()
    assert len({str(line.get_color()) + str(line.get_linestyle()) for line in draw_runs(runs[:28]).axes[1].lines}) == 28
    seeds = cells_like(one, (0.1,), range(29))
    (name,) = [text.get_text() for text in draw_runs(seeds).legends[0].get_texts()]
    assert name == "learning_rate=0.1, 29 seeds, position 2"
    seeds = [dataclasses.replace(run, settings={"seed": run.settings["seed"]}) for run in seeds]
    (name,) = [text.get_text() for text in draw_runs(seeds).legends[0].get_texts()]
    assert name == "seeds (softmax), 29 seeds, position 2"
    many = cells_like(one, range(29), (0,))
    with pytest.raises(InputError, match=r"29 lines would look alike: one picture has 28 looks; give the folders of the runs"):
        draw_runs(many)


def test_errors(tmp_path):
    with pytest.raises(InputError, match=r"run\.json is not there"):
        write_plot([tmp_path], tmp_path / "curves.png")
    run = make_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"cannot write 'curves\.docx': give a name that ends in \.png, \.svg or \.pdf"):
        write_plot([run], tmp_path / "curves.docx")
    write_table(make_table([{"metric": "gu2024", "value": 1.0, "unit": "percent"}], probe="sink_rate"), run / "table.parquet")
    with pytest.raises(InputError, match=r"a run of another command, has no numbers by step; give the output"):
        read_curves(run)
    (run / "report.html").write_text("")
    with pytest.raises(InputError, match=r"of a run in a sweep, or open .*report\.html$"):
        read_curves(run)
