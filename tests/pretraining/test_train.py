"""Runs: what they write, that they resume to the same numbers, and what they refuse."""

from __future__ import annotations

import json

import pandas as pd
from transformers import AutoModelForCausalLM, AutoTokenizer

from sinklab.pretraining.record import read_result
from sinklab.results.table import read_table


def values(table: pd.DataFrame, metric: str) -> dict[int, float]:
    """Step to value of a metric of the whole model."""
    rows = table[(table["metric"] == metric) & table["layer"].isna() & table["key_position"].isna()]
    return dict(zip(rows["step"].astype(int), rows["value"].astype(float), strict=True))


def test_a_run_leaves_a_table_a_record_checkpoints_and_a_model(finished):
    folder = finished.folder
    assert finished.status == "finished"
    assert finished.steps == 8
    table = read_table(folder / "table.parquet")
    pd.testing.assert_frame_equal(table, finished.table.reset_index(drop=True))
    assert list(values(table, "train_loss")) == [2, 4, 6, 8]
    assert list(values(table, "held_out_loss")) == [4, 8]
    assert list(values(table, "sink_loss_gap")) == [0, 4, 8]
    assert values(table, "held_out_loss")[8] == finished.held_out_loss
    assert set(table["run_id"]) == {finished.run["run_id"]}
    run = json.loads((folder / "run.json").read_text())
    assert run == json.loads(json.dumps(finished.run))
    assert (run["status"], run["kind"], run["steps"]) == ("finished", "pretrain", 8)
    assert run["config"]["training"]["steps"] == 8
    known = {(row["probe"], row["metric"], row["unit"]) for row in run["definitions"]}
    assert set(zip(table["probe"], table["metric"], table["unit"], strict=True)) <= known
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-8"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.num_parameters() == run["resolved"]["parameters"]
    assert AutoTokenizer.from_pretrained(folder / "model").vocab_size == model.config.vocab_size
    again = read_result(folder)
    assert again.run == run
    assert again.tokens_per_second == finished.tokens_per_second
