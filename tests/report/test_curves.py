"""Curves of runs: the numbers drawn are those of the table, and folders that are no runs are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sinklab.errors import InputError
from sinklab.report.curves import draw_runs, read_curves, write_plot
from sinklab.results.table import make_table, write_json, write_table

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
    import pandas as pd

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


def test_a_rate_of_zero_looks_like_zero(tmp_path):
    run = read_curves(make_run(tmp_path / "run"))
    run.table.loc[run.table["metric"] == "gu2024", "value"] = 0.0
    low, high = draw_runs([run]).axes[1].get_ylim()
    assert low == 0.0
    assert high >= 5.0


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
