"""What is read of runs: findings and numbers of one condition each, and curves that are those of the table."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sinklab.errors import InputError
from sinklab.report.curves import draw_runs, measured_apart, write_plot
from sinklab.report.runs import finding_of, run_of
from sinklab.report.training_runs import RunCurves, read_curves
from sinklab.results.folder import in_use
from sinklab.results.table import append, make_table, write_json, write_table
from sinklab.studies.plot.plot import plot


def write_training(folder: Path, *, steps: int = 300, status: str = "finished", **record: Any) -> Path:
    """A run of pretrain whose training loss at step s is 5 - s / 1000."""
    folder.mkdir(parents=True)
    about = {"run_id": "20261122T100000Z-00000a", "kind": "pretrain", "status": status, "name": "tiny"}
    config = {"training": {"steps": steps, "seed": 0}, "model": {"operation": {"name": "softmax"}}}
    write_json({**about, "config": config, "token_sha256": {"train": "ab"}, **record}, folder / "run.json")
    rows: list[dict[str, object]] = [
        {"probe": "training", "metric": "train_loss", "value": 5 - step / 1000, "step": step, "unit": "nats", "version": 1}
        for step in range(1, steps + 1)
    ]
    write_table(make_table(rows, operation="softmax"), folder / "table.parquet")
    return folder


def test_an_extreme_over_seeds_is_an_extreme(tmp_path):
    """The worst of all runs is not the mean of the worst of each."""
    rows = [
        {"probe": "trigger", "metric": metric, "unit": "weight", "version": 1, "seed": seed, "value": value}
        for metric, values in (("max_error", (0.25, 4.0, 1.0)), ("bos_weight_min", (0.5, 0.125, 0.75)), ("steps", (3.0, 6.0)))
        for seed, value in enumerate(values)
    ]
    (tmp_path / "lab").mkdir()
    extremes = {"max_error": "max", "bos_weight_min": "min"}
    write_json(
        {"run_id": "20261122T100000Z-00000a", "kind": "trigger", "config": {}, "extremes": extremes},
        tmp_path / "lab" / "run.json",
    )
    write_table(make_table(rows, operation="softmax"), tmp_path / "lab" / "table.parquet")
    numbers = {name: value for name, (value, _) in run_of(tmp_path / "lab").numbers.items()}
    assert numbers == {"max_error": 4.0, "bos_weight_min": 0.125, "steps": 4.5}


def test_the_lock_file_of_a_dead_process_holds_nothing(tmp_path):
    line = "import os, sys; from sinklab.results.folder import FolderLock, Path; FolderLock(Path(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", line, tmp_path / "out"], check=False).returncode == 9
    assert (tmp_path / ".out.lock").is_file()
    assert not in_use(tmp_path / "out")


def test_numbers_of_another_condition_say_so(tmp_path):
    folder = write_training(tmp_path / "run", steps=2)
    common = {"probe": "sink_rate", "metric": "gu2024", "unit": "percent", "version": 1}
    rows: list[dict[str, object]] = [
        {**common, "value": 7.0, "corpus": "notes", "bos": 1, "key_position": 0},
        {
            **common,
            "value": 99.0,
            "corpus": "notes",
            "bos": 1,
            "key_position": 1,
        },  # of another position: not of the whole model
        {**common, "value": 98.0, "corpus": "notes", "bos": 1, "key_position": 0, "layer": 2},
        {**common, "value": 3.0, "corpus": "notes", "bos": 0, "key_position": 0},
        {**common, "value": 5.0, "corpus": "random_tokens", "bos": 1, "key_position": 0},
        {**common, "metric": "loss", "unit": "nats", "value": 1.0, "corpus": "notes", "bos": 1, "policy": "window", "seed": 0},
        {**common, "metric": "loss", "unit": "nats", "value": 2.0, "corpus": "notes", "bos": 1, "policy": "window", "seed": 1},
    ]
    write_table(make_table(rows), folder / "table.parquet")
    run = run_of(folder)
    assert run.numbers == {
        "gu2024": (7.0, "percent"),
        "gu2024 · 0 BOS": (3.0, "percent"),
        "gu2024 · random_tokens": (5.0, "percent"),
        "loss · window": (1.5, "nats"),
    }


def test_a_number_has_one_name_with_the_sections_of_an_audit_and_without(tmp_path):
    """Sections have more rows about the whole model than the audit, on other corpora or on none."""
    audit = {"model": "org/model", "operation": "softmax", "corpus": "book", "bos": 1, "probe": "sink_rate", "unit": "%"}
    rows = [{"metric": "gu2024", "value": 25.0}]
    section = make_table([{"metric": f"rho_{number}", "value": 0.5} for number in range(5)], probe="causes_read_outs", unit="1")  # type: ignore[arg-type]
    names = []
    for name, tables in (("plain", []), ("with", [section])):
        (tmp_path / name).mkdir()
        write_json({"kind": "audit", "status": "finished", "config": {}}, tmp_path / name / "run.json")
        write_json({"model": "org/model", "corpus": "book", "bos": 1}, tmp_path / name / "summary.json")
        write_table(append([make_table(rows, **audit), *tables]), tmp_path / name / "table.parquet")  # type: ignore[arg-type]
        names.append([name for name in run_of(tmp_path / name).numbers if name.startswith("gu2024")])
    assert names == [["gu2024"], ["gu2024"]]


@pytest.mark.parametrize(
    ("about", "names"),
    [
        ([{"operation": "softmax"}, {"operation": "relu"}], ["softmax", "relu"]),  # toy problems
        ([{"model": "plain", "operation": "softmax"}, {"model": "other", "operation": "sigmoid"}], ["plain", "other"]),
        ([{"model": "a/b", "operation": "softmax"}, {"model": "c/d", "operation": "softmax"}], ["a/b", "c/d"]),
        ([{"model": "a", "operation": "softmax"}, {"model": "a", "operation": "relu"}, {"model": "b", "operation": "relu"}],
         ["a · softmax", "a · relu", "b · relu"]),
    ],
)  # fmt: skip
def test_numbers_of_several_models_are_not_averaged(tmp_path, about, names):
    folder = write_training(tmp_path / "run", steps=2)
    common = {"probe": "lab", "metric": "held_out_loss", "unit": "nats", "version": 1}
    rows: list[dict[str, object]] = [
        {**common, "seed": seed, "value": 10.0 * at + seed, **one}
        for at, one in enumerate(about) for seed in (0, 1)
    ]  # fmt: skip
    write_table(make_table(rows), folder / "table.parquet")
    run = run_of(folder)
    assert run.numbers == {f"held_out_loss · {name}": (10.0 * at + 0.5, "nats") for at, name in enumerate(names)}


@pytest.mark.parametrize(
    ("record", "summary", "said"),
    [
        ({"kind": "audit"}, {"finding": "No sink.", "text": ["No sink.", "More."]}, "No sink."),
        ({"kind": "quantize"}, {"text": "It costs 0.1."}, "It costs 0.1."),
        ({"kind": "cache"}, {"recommendation": "Keep 1 sink."}, "Keep 1 sink."),
        (
            {"kind": "depend"},
            {"tasks": [{"sentence": "It depends."}, {"sentence": "It does not."}]},
            "It depends. It does not.",
        ),
        ({"kind": "measure"}, {}, ""),
        (
            {"kind": "claim", "verdict": "not reproduced", "statement": "Sinks grow.", "reason": "no sink"},
            {},
            "Not reproduced: Sinks grow. (no sink)",
        ),
        ({"kind": "pretrain", "status": "running"}, {}, "Running."),
        ({"kind": "pretrain", "status": "failed", "error": "no space"}, {}, "Failed: no space"),
        (
            {"kind": "pretrain", "status": "finished", "steps": 9, "result": {"held_out_loss": 2.0, "sink_rate": 1.5}},
            {},
            "Finished after 9 steps: 2.000 nats per held-out token, 1.50 % of heads and samples sink at position 0.",
        ),
        (
            {"kind": "pretrain", "status": "diverged", "steps": 9, "result": {}, "divergence": {"reason": "The loss is nan."}},
            {},
            "Diverged after 9 steps. The loss is nan.",
        ),
    ],
)
def test_findings(record, summary, said):
    assert finding_of(record, summary) == said


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
