"""Adding operations to a kept comparison: trained as it trained its own, on its seeds, beside the softmax that it has."""

from __future__ import annotations

from pathlib import Path

import pytest
from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.more_operations import add_operations, main
from tests.studies.pathways.comparisons import of_first_machine

from sinklab.errors import ConfigurationError, InputError, ResultError
from sinklab.results.table import read_run, read_table, write_json, write_table
from sinklab.studies.pathways import more_operations
from sinklab.studies.reproduce import work
from sinklab_claims.pathways.columns import COLUMNS, READ_OUTS
from sinklab_claims.pathways.runs import FACTORS

RESULTS = Path(__file__).parents[3] / "results"
TAKEN = "clipped_softmax"
"""The operation that a kept comparison is stripped of, so that it can be put back; its settings go by the context."""


@pytest.fixture(params=["tiny-bos", "small"])
def folder(request, tmp_path):
    """A comparison with rates of its own, which lacks an operation, or one at one rate for all, as it is."""
    path = of_first_machine(request.param, tmp_path / "kept")
    record, table = read_run(path), read_table(path / "table.parquet")
    for of in (record["operations"], record["rates"], record["cannot_do_the_trigger_task"], *record["cells"].values()):
        of.pop(TAKEN, None)
    write_json(record, path / "run.json")
    write_table(table[table["model"] != TAKEN].reset_index(drop=True), path / "table.parquet")
    judge_again(path)
    return path


@pytest.fixture
def trained(monkeypatch, folder):
    """Trainings that all end alike, but for the control, which ends as it did; what was trained and read."""
    record, table = read_run(folder), read_table(folder / "table.parquet")
    source, metric = ("chosen", "held_out_loss") if record.get("rate") is not None else ("scale", "scale_rate_loss")
    of_it = (table["metric"] == metric) & (table["model"] == "softmax") & (table["seed"] == 0)
    seen = {"control": float(table.loc[of_it, "value"].iloc[0]), "trained": [], "read": [], "errors": {}, "timed": []}
    control = record["cells"][source]["softmax"]["0"]
    alike = {column.of: 0.5 for column in COLUMNS if column.source in ("chosen", "scale")} | {"held_out_loss": 1.9}

    class Plan:
        folder = Path("store")

        def outcome(self, name):
            return object()

    def train_and_read(cells, read, **options):
        seen["trained"] += list(cells)
        seen["read"] += list(read)
        return Plan(), dict(seen["errors"]) if set(cells) - {control} else {}

    def read_numbers(place, read_outs):
        return {"held_out_loss": seen["control"]} if place.name == control else alike | {"diverged": False}

    def costs(pathways, config, *, widths, progress):
        seen["timed"].append([pathway.label for pathway in pathways])
        spread = {"value": 1.5, "low": 1.25, "high": 2.0}
        return {pathway.label: {"train_time": spread, "parameters": spread} for pathway in pathways}

    monkeypatch.setattr(work, "train_and_read", train_and_read)
    monkeypatch.setattr(work, "read_numbers", read_numbers)
    monkeypatch.setattr(more_operations, "costs", costs)
    monkeypatch.setattr(
        more_operations, "trigger_numbers", lambda asked, *_: ({}, {} if asked.rate is not None else {TAKEN: "it cannot"})
    )
    return seen


def test_an_operation_is_trained_read_timed_and_judged_with_the_others(request, folder, trained, capsys):
    before, record = read_table(folder / "table.parquet"), read_run(folder)
    whole = read_run(RESULTS / request.node.callspec.params["folder"] / "pathways")
    seeds = record["seeds"]
    main([str(folder), "--operations", TAKEN, "--store", str(folder / "store")])
    assert capsys.readouterr().out == f"added: {TAKEN}; {len(record['operations']) + 1} in all\n"
    one_rate = record.get("rate") is not None
    # At one rate its seeds and the control. Otherwise two selection seeds at five rates and three ALiBi models besides; all
    # rates end alike, so that the lowest is its own, and the scale's comes on top.
    expected = len(seeds) if one_rate else 2 * len(FACTORS) + 2 * len(seeds) + 3
    assert len(set(trained["trained"])) == expected + 1
    assert set(READ_OUTS["chosen"]) <= {read_out for _, read_out in trained["read"]}
    assert trained["timed"] == [["softmax", TAKEN]]
    table, new = read_table(folder / "table.parquet"), read_run(folder)
    assert table.iloc[: len(before)].equals(before)
    added = table.iloc[len(before) :]
    assert set(added["model"]) == {TAKEN}
    assert set(added["seed"].dropna()) == set(seeds)
    assert set(added[added["seed"].isna()]["metric"]) == {
        f"{name}{end}" for name in ("train_time", "parameters") for end in ("", "_low", "_high")
    }
    assert list(new["operations"]) == [*record["operations"], TAKEN]
    assert new["operations"][TAKEN] == whole["operations"][TAKEN]
    # The names say all that a training is made of: what is put back is what was taken out.
    same = "chosen" if one_rate else "scale"
    assert new["cells"][same][TAKEN] == whole["cells"][same][TAKEN]
    assert set(new["cells"]["chosen"][TAKEN]) == set(map(str, seeds))
    assert {label: of for label, of in new["cells"]["chosen"].items() if label != TAKEN} == record["cells"]["chosen"]
    assert new["added"][-1]["operations"] == [TAKEN]
    row = next(row for row in new["rows"] if row["label"] == TAKEN)
    loss = row["numbers"]["held_out_loss"]
    assert (loss["mean"], loss["count"]) == (pytest.approx(1.9), len(seeds))
    # Three that are alike have no interval, and eight that of their median.
    assert (loss["low"], loss["high"]) == ((None, None) if len(seeds) == 3 else pytest.approx((1.9, 1.9)))
    if one_rate:
        assert (new["rates"], new["cannot_do_the_trigger_task"]) == ({}, {})
    else:
        assert new["rates"][TAKEN]["factor"] == FACTORS[0]
        assert new["cannot_do_the_trigger_task"] == record["cannot_do_the_trigger_task"] | {TAKEN: "it cannot"}
    there = [{"name": TAKEN}, {"name": "softmax"}, {"name": "sink_logit", "initial": 0.0}]
    assert add_operations(folder, there, store=folder / "store") == []
    assert trained["timed"] == [["softmax", TAKEN]], "a second time nothing is missing"


@pytest.mark.parametrize(
    ("change", "kind", "error"),
    [
        (
            {"control": 1.0},
            ResultError,
            "softmax with seed 0 ends at a loss of 1.000000 nats here, .* with softmax on other seeds",
        ),
        ({"errors": {TAKEN: "killed"}}, ResultError, "nothing is added, since trainings failed: clipped_softmax: killed"),
    ],
)
def test_what_was_not_trained_as_it_should_adds_nothing(folder, trained, change, kind, error):
    trained.update(change)
    before = {name: (folder / name).read_bytes() for name in ("table.parquet", "run.json", "pathways.md")}
    with pytest.raises(kind, match=error):
        add_operations(folder, [{"name": TAKEN}], store=folder / "store")
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_what_cannot_be_added(folder, trained, capsys):
    with pytest.raises(ConfigurationError, match="has relu twice"):
        add_operations(folder, [{"name": "relu"}, {"name": "relu"}], store=folder / "store")
    with pytest.raises(SystemExit):
        main([str(folder), "--operations", "rellu", "--store", str(folder / "store")])
    assert "relu" in capsys.readouterr().err
    table = read_table(folder / "table.parquet")
    write_table(table[table["metric"] != "int8_gap"].reset_index(drop=True), folder / "table.parquet")
    with pytest.raises(InputError, match="lacks the columns int8_gap; add them first"):
        add_operations(folder, [{"name": TAKEN}], store=folder / "store")
    assert trained["trained"] == []
