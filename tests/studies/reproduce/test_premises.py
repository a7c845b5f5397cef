"""Premises: numbers of one variant are lent among claims that train it, to what is presupposed and to nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sinklab.report.claim_figure import draw_claim
from sinklab.studies.reproduce.again import judged_again
from sinklab.studies.reproduce.entries import entries_of
from sinklab.studies.reproduce.join import add
from sinklab.studies.reproduce.premises import lend, main, with_lent

from sinklab.results.table import read_run, read_table, write_json, write_table
from sinklab_claims.contract.claim import BASELINE, Part
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.verdict.records import read_results
from sinklab_claims.verdict.rule import judge

RESULTS = Path(__file__).parents[3] / "results"
KEPT = [kept for kept in read_results(RESULTS) if kept.record["conditions"]]
LENDER, BORROWER = RESULTS / "small" / "sink_moves_to_bias", RESULTS / "small" / "weight_decay"
PREMISE = "there is a sink on the first token with baseline"


def few(folder: Path, seeds=(0, 1, 2), **changed) -> Path:
    """The borrower with a few of its seeds beside the whole lender, in a folder of their own."""
    shutil.copytree(LENDER, folder / "small" / LENDER.name)
    record, table = read_run(BORROWER) | changed, read_table(BORROWER / "table.parquet")
    record = {name: field for name, field in record.items() if name != "lent"} | {"seeds": list(seeds)}
    table = table[table["seed"].isin(seeds)].reset_index(drop=True)
    place = folder / "small" / BORROWER.name
    place.mkdir()
    write_table(table, place / "table.parquet")
    write_json(judged_again(record, table), place / "run.json")
    return place


def test_a_premise_counts_seeds_that_parts_do_not_have():
    """Nine baselines with a sink and three pairs: the premise is shown by all of them, the part by its pairs."""
    premise = Part("a sink", Value("sink_rate", BASELINE), more_than=5)
    part = Part("gone", Difference("sink_rate", "other", BASELINE), less_than=-5)
    pairs = {seed: {BASELINE: {"sink_rate": rate}, "other": {"sink_rate": 0.0}} for seed, rate in enumerate((14.0, 3.0, 16.0))}
    lent = {seed: {BASELINE: {"sink_rate": 11.0 + seed / 10}} for seed in range(3, 9)}
    assert judge([part], [premise], pairs).presupposed[0].verdict == "inconclusive"
    found = judge([part], [premise], pairs, lent=lent | {9: {"other": {"sink_rate": 1.0}}})
    assert found.presupposed[0].verdict == "reproduced"
    assert list(found.presupposed[0].by_seed) == [*range(9)]  # the tenth has no baseline
    assert list(found.findings[0].by_seed) == [0, 1, 2]


def test_the_baseline_of_another_claim_is_lent_and_its_owner_is_named(tmp_path, capsys):
    place = few(tmp_path)
    own = read_table(place / "table.parquet")
    before = read_run(place)
    main([str(tmp_path)])
    assert capsys.readouterr().out.startswith("small/weight_decay: baseline of 5 more seeds")
    record, table = read_run(place), read_table(place / "table.parquet")
    assert record["lent"] == {"baseline": {str(seed): "sink_moves_to_bias" for seed in range(3, 8)}}
    (premise,) = (part for part in record["presupposes"] if part["says"] == PREMISE)
    theirs = read_table(LENDER / "table.parquet")
    theirs = theirs[(theirs["model"] == "baseline") & (theirs["metric"] == "sink_rate")].set_index("seed")["value"]
    assert premise["by_seed"] == {str(seed): theirs[seed] for seed in range(8)}
    assert [part["by_seed"] for part in record["parts"]] == [part["by_seed"] for part in before["parts"]]
    assert table[table["seed"] < 3].reset_index(drop=True).equals(own)
    lent = table[table["seed"] >= 3]
    assert set(lent["model"]) == {"baseline"}
    assert set(lent["run_id"]) <= set(read_table(LENDER / "table.parquet")["run_id"])
    assert lend(tmp_path) == []
    shown = draw_claim(record, table).axes[0]  # numbers of a part, a line of points for each variant
    assert {len(line.get_xdata()) for line in shown.lines if line.get_marker() == "o"} == {3}


def test_a_premise_gets_seeds_that_another_premise_of_the_same_variant_cannot_have(tmp_path):
    """Of windows one premise is a rate, which every baseline has, and one the weight far away, which no other claim reads."""
    borrower = RESULTS / "small" / "window_attention"
    for of in (LENDER, borrower):
        shutil.copytree(of, tmp_path / "small" / of.name)
    lend(tmp_path)
    record = read_run(tmp_path / "small" / borrower.name)
    rate, far = record["presupposes"]
    assert set(rate["by_seed"]) == {*map(str, record["seeds"]), *record["lent"]["baseline"]} > set(far["by_seed"])
    assert set(far["by_seed"]) == {*map(str, record["seeds"])}


@pytest.mark.parametrize("changed", [{"config": {}}, {"conditions": None}])
def test_nothing_is_lent_of_another_configuration_or_variant(tmp_path, changed):
    if "conditions" in changed:
        conditions = read_run(BORROWER)["conditions"]
        changed = {"conditions": conditions | {"baseline": conditions["baseline"] | {"changes": {"model.window": 8}}}}
    place = few(tmp_path, **changed)
    assert lend(tmp_path) == []
    assert "lent" not in read_run(place)


def test_nothing_is_lent_between_bases_or_scales(tmp_path):
    few(tmp_path)
    (tmp_path / "small-bos").mkdir()
    shutil.move(tmp_path / "small" / LENDER.name, tmp_path / "small-bos")
    assert lend(tmp_path) == []


def test_a_seed_that_is_joined_is_lent_no_more(tmp_path):
    place = few(tmp_path)
    lend(tmp_path)
    others = few(tmp_path / "others", [3, 4, 5]).parent.parent
    shutil.rmtree(others / "small" / LENDER.name)
    add(tmp_path, others)
    assert read_run(place)["seeds"] == [0, 1, 2, 3, 4, 5]
    assert "lent" not in read_run(place)
    lend(tmp_path)
    assert list(read_run(place)["lent"]["baseline"]) == ["6", "7"]
    table = read_table(place / "table.parquet")
    assert not table.duplicated(["model", "metric", "seed"]).any()


def test_an_open_premise_is_shown_with_the_seeds_that_it_has(tmp_path):
    kept = next(kept for kept in KEPT if kept.folder == RESULTS / "small" / "shared_biases")
    (entry,) = entries_of([kept])
    assert entry.premise
    assert entry.seeds == sum(value is not None for value in entry.part["by_seed"].values()) > len(kept.record["seeds"])


@pytest.mark.parametrize("kept", KEPT, ids=[f"{one.folder.parent.name}-{one.record['claim']}" for one in KEPT])
def test_committed_premises_have_all_that_can_be_lent(kept):
    """If this fails, run python -m sinklab.studies.reproduce.premises results, and make docs."""
    record, table = with_lent(kept, KEPT)
    assert json.loads(json.dumps(record)) == kept.record
    assert len(table) == len(read_table(kept.folder / "table.parquet"))
