"""Adding columns to a kept comparison: only what is missing, only from the same trainings, and judged again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sinklab.studies.pathways.added import add_columns, main
from sinklab.studies.pathways.kept import design_of_record, missing_columns

from sinklab.errors import InputError, ResultError
from sinklab.results.table import read_run, read_table, write_table
from sinklab.studies.pathways import kept
from sinklab.studies.reproduce import work
from sinklab_claims.pathways.columns import READ_OUTS
from sinklab_claims.pathways.operations import Pathway

KEPT = Path(__file__).parents[3] / "results" / "tiny-bos" / "pathways"
NEW = ["scale_rate_sink", "scale_rate_window"]


@pytest.fixture
def folder(tmp_path):
    """The committed comparison as it was before two of its columns were there."""
    shutil.copytree(KEPT, tmp_path / "kept")
    table = read_table(tmp_path / "kept" / "table.parquet")
    write_table(table[~table["metric"].isin(NEW)].reset_index(drop=True), tmp_path / "kept" / "table.parquet")
    return tmp_path / "kept"


@pytest.fixture
def trained(monkeypatch, folder):
    """Trainings that end as those of the table did, but for what a test changes; what was trained and read."""
    losses = read_table(folder / "table.parquet").query("metric == 'scale_rate_loss'").set_index(["model", "seed"])["value"]
    by_cell = {
        cell: float(losses[label, int(seed)])
        for label, cells in read_run(folder)["cells"]["scale"].items()
        for seed, cell in cells.items()
    }
    seen = {"losses": by_cell, "trained": [], "read": [], "errors": {}}

    def train_and_read(cells, read, **options):
        seen["trained"] += list(cells)
        seen["read"] += list(read)
        return type("Plan", (), {"folder": Path("store")})(), seen["errors"]

    def read_numbers(folder, read_outs):
        assert tuple(read_outs) == READ_OUTS["scale"]
        return {"held_out_loss": by_cell[folder.name], "carried_rate": 12.5, "window_gap": 0.25, "window_0": 2.0}

    monkeypatch.setattr(work, "train_and_read", train_and_read)
    monkeypatch.setattr(work, "read_numbers", read_numbers)
    return seen


def test_what_is_missing_is_trained_read_and_judged(folder, trained, capsys):
    before = read_table(folder / "table.parquet")
    assert [column.name for column in missing_columns(before)["scale"]] == NEW
    main([str(folder), "--store", str(folder / "store")])
    assert capsys.readouterr().out == "added: scale_rate_sink, scale_rate_window\n"
    assert len(trained["trained"]) == 12 * 8
    assert {read_out for _, read_out in trained["read"]} == {"carried", "window"}
    table = read_table(folder / "table.parquet")
    assert len(table) == len(before) + 2 * 12 * 8
    new = table[table["metric"].isin(NEW)]
    assert set(new["unit"]) == {"percent", "nats"}
    assert (new["operation"] == "gated").sum() == 2 * 8
    rows = {row["label"]: row["numbers"] for row in read_run(folder)["rows"]}
    assert rows["relu"]["scale_rate_sink"] == {
        "mean": 12.5, "low": 12.5, "high": 12.5, "count": 8, "method": "exact, of the median",
    }  # fmt: skip
    assert "At one rate for all" in read_run(folder)["paragraph"]
    assert add_columns(folder, store=folder / "store") == []
    assert len(trained["trained"]) == 12 * 8, "a second time nothing is missing"


def test_another_training_adds_nothing(folder, trained):
    cell = read_run(folder)["cells"]["scale"]["relu"]["2"]
    trained["losses"][cell] += 0.01
    before = (folder / "table.parquet").read_bytes()
    with pytest.raises(ResultError, match=r"relu with seed 2 ends at a loss of .* another training, so nothing is added"):
        add_columns(folder, store=folder / "store")
    assert (folder / "table.parquet").read_bytes() == before


def test_a_training_that_failed_adds_nothing(folder, trained):
    trained["errors"]["relu"] = "killed"
    with pytest.raises(ResultError, match="nothing is added, since trainings failed: relu: killed"):
        add_columns(folder, store=folder / "store")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"protocol": 1}, "made by protocol 1, and today's is 2"),
        ({"operations": {"softmax": {"intermediate_size": 128}, "own": {}}}, "own has settings of its own, which the"),
        (
            {"operations": {"softmax": {}, "sigmoid(bias=1)": {"operation": {"name": "sigmoid", "bias": 2}}}},
            r"sigmoid\(bias=1\) is recorded with the settings of sigmoid\(bias=2\)",
        ),
        ({"seeds": [0, 1]}, "its trainings are not those of today's code"),
    ],
)
def test_what_cannot_be_added_to(folder, trained, change, error):
    record = read_run(folder)
    (folder / "run.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(InputError, match=error):
        add_columns(folder, store=folder / "store")
    assert trained["trained"] == []
    with pytest.raises(SystemExit):
        main([str(folder), "--store", str(folder / "store")])


def test_operations_with_settings_are_read_from_the_record(folder):
    record = read_run(folder)
    own = {"operation": {"name": "sigmoid", "length_bias": True}, "intermediate_size": 128}
    for part in ("operations", "rates"):
        entry = own if part == "operations" else record["rates"]["sigmoid"]
        record[part]["sigmoid(length_bias=True)"] = entry
    asked, factors = design_of_record(record, folder)
    assert asked.pathways[-1] == Pathway("sigmoid(length_bias=True)", {"name": "sigmoid", "length_bias": True})
    assert factors["sigmoid(length_bias=True)"] == factors["sigmoid"]
    assert asked.widths["sigmoid(length_bias=True)"] == 128


def test_only_columns_of_trainings_whose_loss_is_known_are_added():
    assert set(kept.LOSS) <= set(READ_OUTS)
    assert all(READ_OUTS[source] for source in kept.LOSS)
