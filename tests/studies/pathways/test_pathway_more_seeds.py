"""Adding seeds to a kept comparison: trained at its own rates, read in every column, if a control comes out as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sinklab.studies.pathways.more_seeds import add_seeds, main

from sinklab.errors import ConfigurationError, InputError, ResultError
from sinklab.results.table import read_run, read_table, write_json, write_table
from sinklab.studies.pathways import more_seeds
from sinklab.studies.reproduce import work
from sinklab_claims.pathways.columns import COLUMNS, READ_OUTS

KEPT = Path(__file__).parents[3] / "results" / "tiny-bos" / "pathways"
NUMBERS = {
    **{column.of: 0.5 for column in COLUMNS if column.source in ("chosen", "scale")},
    "held_out_loss": 1.9,
    "int8_gap": 0.001,
    "window_gap": 0.25,
}


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(KEPT, tmp_path / "kept"))


@pytest.fixture
def trained(monkeypatch, folder):
    """Trainings that all end alike, but for the control, which ends as it did; what was trained and read."""
    table = read_table(folder / "table.parquet")
    of_it = (table["metric"] == "scale_rate_loss") & (table["model"] == "softmax") & (table["seed"] == 0)
    seen = {"control": float(table.loc[of_it, "value"].iloc[0]), "trained": [], "read": [], "errors": {}, "trigger": []}
    control = read_run(folder)["cells"]["scale"]["softmax"]["0"]

    def train_and_read(cells, read, **options):
        seen["trained"] += list(cells)
        seen["read"] += list(read)
        return type("Plan", (), {"folder": Path("store")})(), seen["errors"]

    def read_numbers(place, read_outs):
        return {"held_out_loss": seen["control"]} if place.name == control else dict(NUMBERS)

    def trigger_numbers(asked, problem, folder, progress):
        seen["trigger"].append((list(asked.seeds), problem.length, folder))
        return {seed: {"relu": {"trigger_solved": 1.0}} for seed in asked.seeds}, {}

    monkeypatch.setattr(work, "train_and_read", train_and_read)
    monkeypatch.setattr(work, "read_numbers", read_numbers)
    monkeypatch.setattr(more_seeds, "trigger_numbers", trigger_numbers)
    return seen


def test_seeds_are_trained_read_and_judged_with_the_others(folder, trained, capsys):
    before, record = read_table(folder / "table.parquet"), read_run(folder)
    main([str(folder), "--seeds", "8..9", "--store", str(folder / "store")])
    assert capsys.readouterr().out == f"{folder}: 10 seeds\n"
    # Twelve operations at two rates and two seeds, but sigmoid's own rate is the scale's; and the control.
    assert len(trained["trained"]) == 2 * (12 + 11) + 1
    assert {read_out for _, read_out in trained["read"]} == {*READ_OUTS["chosen"], *READ_OUTS["scale"]}
    assert trained["trigger"] == [([8, 9], 16, (folder / "store").absolute() / "trigger")]
    table, new = read_table(folder / "table.parquet"), read_run(folder)
    assert new["seeds"] == [*range(8), 8, 9]
    assert table.iloc[: len(before)].equals(before)
    added = table.iloc[len(before) :]
    assert set(added["seed"]) == {8, 9}
    assert set(added["metric"]) >= {"held_out_loss", "scale_rate_sink", "distortion", "tuning_gain", "trigger_solved"}
    assert new["rates"] == record["rates"], "no rate is chosen again"
    assert set(new["cells"]["chosen"]["relu"]) == {str(seed) for seed in range(10)}
    assert new["cells"]["rates"] == record["cells"]["rates"]
    assert new["added"][-1]["seeds"] == [8, 9]
    loss = next(row["numbers"]["held_out_loss"] for row in new["rows"] if row["label"] == "relu")
    assert loss["count"] == 10
    assert "over 10 seeds" in new["paragraph"]


def test_seeds_of_a_comparison_at_one_rate(folder, trained):
    """That of the scale, made of the kept one: its trainings at that rate are all there are."""
    table, record = read_table(folder / "table.parquet"), read_run(folder)
    at_scale = {"held_out_loss": "scale_rate_loss", "window_gap": "scale_rate_window"}
    of_others = {column.name for column in COLUMNS if column.source in ("rates", "scale", "longer")}
    values = table.set_index(["metric", "model", "seed"])["value"]
    kept = table[~table["metric"].isin(of_others)].copy()
    kept["value"] = [
        values[at_scale[metric], model, seed] if metric in at_scale else value
        for metric, model, seed, value in kept[["metric", "model", "seed", "value"]].itertuples(index=False)
    ]
    write_table(kept.reset_index(drop=True), folder / "table.parquet")
    write_json({**record, "rate": 1.0, "rates": {}, "cells": {"chosen": record["cells"]["scale"]}}, folder / "run.json")
    add_seeds(folder, [8], store=folder / "store")
    assert len(trained["trained"]) == 12 + 1
    assert {read_out for _, read_out in trained["read"]} == set(READ_OUTS["chosen"])
    new = read_run(folder)
    assert set(new["cells"]) == {"chosen"}
    assert "8" in new["cells"]["chosen"]["relu"]
    assert "as many parameters as softmax's, the rate of the scale) is" in new["definition"]
    trained["control"] += 0.01
    with pytest.raises(ResultError, match=r"softmax with seed 0 ends at a loss of .* this processor rounds otherwise"):
        add_seeds(folder, [9], store=folder / "store")


def test_a_control_that_ends_elsewhere_adds_nothing(folder, trained):
    trained["control"] += 0.01
    before = (folder / "table.parquet").read_bytes()
    with pytest.raises(ResultError, match=r"softmax with seed 0 ends at a loss of .* this processor rounds otherwise"):
        add_seeds(folder, [8], store=folder / "store")
    assert (folder / "table.parquet").read_bytes() == before


def test_on_another_processor_all_operations_of_a_seed_are_of_it(folder, trained):
    """Comparisons are within a seed, so that another control is no reason not to add it, if one says that it is that."""
    kept, trained["control"] = trained["control"], trained["control"] + 0.043
    with pytest.raises(ResultError, match="nothing is added; --other-processor adds them all the same, if it is that"):
        add_seeds(folder, [8], store=folder / "store")
    main([str(folder), "--seeds", "8", "--store", str(folder / "store"), "--other-processor"])
    assert read_run(folder)["added"][-1]["control"] == {"here": kept + 0.043, "kept": kept}
    assert read_run(folder)["seeds"][-1] == 8


def test_a_training_that_failed_adds_nothing(folder, trained):
    trained["errors"]["relu"] = "killed"
    with pytest.raises(ResultError, match="nothing is added, since trainings failed: relu: killed"):
        add_seeds(folder, [8], store=folder / "store")


@pytest.mark.parametrize(
    ("seeds", "kind", "error"),
    [
        ([7, 8], InputError, "has the seeds 7 already; it has 0, 1, 2, 3, 4, 5, 6, 7"),
        ([8, 8], ConfigurationError, "expected one or more, and none twice"),
        ([], ConfigurationError, "expected one or more, and none twice"),
        ([1000], ConfigurationError, "1000"),
    ],
)
def test_seeds_that_cannot_be_added(folder, trained, seeds, kind, error):
    with pytest.raises(kind, match=error):
        add_seeds(folder, seeds, store=folder / "store")
    assert trained["trained"] == []


def test_a_comparison_that_lacks_columns_gets_these_first(folder, trained):
    table = read_table(folder / "table.parquet")
    write_table(table[table["metric"] != "scale_rate_sink"].reset_index(drop=True), folder / "table.parquet")
    with pytest.raises(InputError, match=r"lacks the columns scale_rate_sink; add them first \(python -m sinklab"):
        add_seeds(folder, [8], store=folder / "store")
    with pytest.raises(SystemExit):
        main([str(folder), "--seeds", "8", "--store", str(folder / "store")])
