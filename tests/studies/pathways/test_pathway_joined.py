"""Joining two comparisons: each operation is compared with softmax of its own seeds, wherever these were trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from sinklab.studies.pathways.again import judge_again
from sinklab.studies.pathways.joined import join, main
from sinklab.studies.pathways.more_operations import add_operations
from tests.studies.pathways.comparisons import of_first_machine, part

from sinklab.errors import InputError
from sinklab.results.table import read_run, read_table, write_json, write_table
from sinklab.studies.pathways import again

RESULTS = Path(__file__).parents[3] / "results"
FIRST, SECOND = ("softmax", "clipped_softmax", "gated"), ("softmax", "sink_logit")


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr(again, "write_figure", lambda *arguments, **options: None)


def halves(name):
    return (range(4), range(4, 8)) if name.startswith("tiny") else (range(1), range(1, 3))


@pytest.fixture(params=["tiny-bos", "small"])
def whole(request, tmp_path):
    return of_first_machine(request.param, tmp_path / request.param)


def plain(row):
    """What a row says, without times, which stay those of the first comparison."""
    return {**row, "numbers": {key: of for key, of in row["numbers"].items() if "time" not in key}}


def test_seeds_of_two_machines_are_judged_as_those_of_one(whole, tmp_path, capsys):
    labels, (early, late) = list(read_run(whole)["operations"]), halves(whole.name)
    one, other = part(whole, tmp_path / "one", labels, early), part(whole, tmp_path / "other", labels, late)
    untouched = read_run(other)
    main([str(one), str(other)])
    assert capsys.readouterr().out == (
        f"joined: no new operation; {len(labels)} operations and {len(early) + len(late)} seeds in all\n"
    )
    joined, expected = read_run(one), read_run(whole)
    assert list(map(plain, joined["rows"])) == list(map(plain, expected["rows"]))
    assert (joined["paragraph"], joined["seeds"]) == (expected["paragraph"], expected["seeds"])
    assert joined["cells"] == expected["cells"]
    assert joined["added"][-1] | {"created": ""} == {
        "operations": [],
        "seeds": list(late),
        "run_id": expected["run_id"],
        "environment": expected["environment"],
        "created": "",
    }
    assert read_run(other) == untouched
    key = ["model", "metric", "seed", "value"]
    table, kept = read_table(one / "table.parquet")[key], read_table(whole / "table.parquet")[key]
    assert table.sort_values(key, ignore_index=True).equals(kept.sort_values(key, ignore_index=True))


def test_an_operation_of_another_machine_is_compared_with_the_softmax_of_that_machine(tmp_path):
    """All models of the other machine are planted to be worse by a nat, which says nothing of the operation."""
    whole = RESULTS / "tiny-bos" / "pathways"
    one, other = part(whole, tmp_path / "one", FIRST, range(4)), part(whole, tmp_path / "other", SECOND, range(4, 8))
    table = read_table(other / "table.parquet")
    table.loc[table["metric"] == "held_out_loss", "value"] += 1.0
    write_table(table, other / "table.parquet")
    judge_again(other)
    of_other, of_one = ({row["label"]: row for row in read_run(folder)["rows"]} for folder in (other, one))
    assert join(one, other) == ["sink_logit"]
    record = read_run(one)
    rows = {row["label"]: row for row in record["rows"]}
    assert list(rows) == [*FIRST, "sink_logit"]
    assert [row["seeds"] for row in rows.values()] == [list(range(8)), [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    for label in ("beside_softmax", "bounds", "bounds_at_one_rate", "low_distortion", "numbers"):
        assert rows["sink_logit"][label] == of_other["sink_logit"][label]
        assert rows["gated"][label] == of_one["gated"][label]
    # On the plot a mean of its own would lie a nat to the right of gates; the half of softmax's seeds that are there do.
    softmax, point = rows["softmax"]["numbers"]["held_out_loss"]["mean"], rows["sink_logit"]["point"]
    assert point[0] == pytest.approx(softmax + rows["sink_logit"]["beside_softmax"]["mean"])
    assert abs(point[0] - rows["gated"]["point"][0]) < 0.1
    assert point[1] == rows["sink_logit"]["numbers"]["distortion"]["mean"]
    assert "over 8 seeds (each operation on 4 of them, beside softmax):" in record["paragraph"]
    written = (one / "pathways.md").read_text(encoding="utf-8")
    assert "| operation | low-distortion | seeds |" in written
    assert "| `sink_logit` | no: sink, window | 4–7 |" in written
    with pytest.raises(InputError, match="joined from comparisons of different machines"):
        add_operations(one, [{"name": "relu"}], store=tmp_path / "store")


def test_what_text_costs_is_compared_within_the_seeds_of_an_operation(tmp_path):
    whole = RESULTS / "tiny-bos" / "pathways"
    one, other = part(whole, tmp_path / "one", FIRST, range(4)), part(whole, tmp_path / "other", SECOND, range(4, 8))
    before = read_run(other)["statements"]["Out of distribution"]
    assert "sink_logit" not in before.split("replacing a tenth of the tokens")[1].split(";")[0], "less than the margin apart"
    table = read_table(other / "table.parquet")
    table.loc[table["metric"] == "noise_gap", "value"] += 1.0  # of softmax there, too
    write_table(table, other / "table.parquet")
    join(one, other)
    after = read_run(one)["statements"]["Out of distribution"]
    assert "sink_logit" not in after.split("replacing a tenth of the tokens")[1].split(";")[0]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"base": "no-bos"}, "differ in the base"),
        ({"config": {"name": "another"}}, "differ in the training"),
        ({"seeds": [3, 4]}, r"share 1 seed \(3\), with which softmax was trained twice"),
        ({"held_out_sha256": "f00d" * 16}, "are of different texts, held-out sha256 abcdabcdabcd and f00df00df00d"),
    ],
)
def test_what_is_no_one_comparison_is_refused(tmp_path, change, error, capsys):
    whole = RESULTS / "tiny-bos" / "pathways"
    one, other = part(whole, tmp_path / "one", FIRST, range(4)), part(whole, tmp_path / "other", SECOND, range(4, 8))
    write_json({**read_run(one), "held_out_sha256": "abcd" * 16}, one / "run.json")
    write_json({**read_run(other), **change}, other / "run.json")
    before = (one / "run.json").read_bytes(), (one / "table.parquet").read_bytes()
    with pytest.raises(InputError, match=error):
        join(one, other)
    with pytest.raises(SystemExit):
        main([str(one), str(other)])
    assert "error: " in capsys.readouterr().err
    assert ((one / "run.json").read_bytes(), (one / "table.parquet").read_bytes()) == before


def test_operations_that_are_not_the_same_are_refused(tmp_path):
    whole = RESULTS / "tiny-bos" / "pathways"
    one, other = part(whole, tmp_path / "one", FIRST, range(4)), part(whole, tmp_path / "other", FIRST, range(4, 8))
    record = read_run(other)
    operations = {**record["operations"], "gated": {**record["operations"]["gated"], "intermediate_size": 3}}
    write_json({**record, "operations": operations}, other / "run.json")
    with pytest.raises(InputError, match="have gated with different settings"):
        join(one, other)
    rate = record["rates"]["gated"]
    losses = {
        factor: dict.fromkeys(of, 9.0 if float(factor) == rate["factor"] else 1.0) for factor, of in rate["losses"].items()
    }
    write_json({**record, "rates": {**record["rates"], "gated": {**rate, "losses": losses}}}, other / "run.json")
    with pytest.raises(InputError, match="chose different learning rates for gated"):
        join(one, other)
