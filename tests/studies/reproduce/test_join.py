"""Joining kept results: seeds that were run apart give what they give together; what does not belong together is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from sinklab.studies.reproduce.again import judged_again
from sinklab.studies.reproduce.join import add, join, main

from sinklab.errors import InputError
from sinklab.registry import claims
from sinklab.results.table import read_run, read_table, write_json, write_table
from sinklab_claims.verdict.records import read_results

RESULTS = Path(__file__).parents[3] / "results"
EMERGENCE = RESULTS / "small-bos" / "emergence"


def part_of(whole: Path, seeds, folder: Path, **changed) -> Path:
    """The result of a claim as if it had been run with some of its seeds."""
    record = read_run(whole) | changed
    for of_label in record["conditions"].values():
        of_label["cells"] = {seed: cell for seed, cell in of_label["cells"].items() if int(seed) in seeds}
    table = read_table(whole / "table.parquet")
    table = table[table["seed"].isin(seeds)].reset_index(drop=True)
    place = folder / record["scale"] / record["claim"]
    place.mkdir(parents=True)
    write_table(table, place / "table.parquet")
    write_json(judged_again({**record, "seeds": list(seeds), "run_id": f"of {seeds}"}, table), place / "run.json")
    return place


def test_seeds_that_were_run_apart_give_what_they_give_together(tmp_path, capsys):
    ours, others = tmp_path / "ours", tmp_path / "others"
    place = part_of(EMERGENCE, [0, 2, 4], ours)
    part_of(EMERGENCE, [1, 3, 5], others)
    (place / "figure.png").write_bytes(b"of three seeds")
    main([str(ours), str(others)])
    assert re.fullmatch(r"small/emergence: (\w+ → )?reproduced, 3 → 6 seeds\n", capsys.readouterr().out)
    (joined,), whole = read_results(ours), read_run(EMERGENCE)
    for field in ("verdict", "reason", "presupposes", "seeds", "base", "config"):
        assert joined.record.get(field) == whole[field]
    for part, of_whole in zip(joined.record["parts"], whole["parts"], strict=True):
        assert part["by_seed"] == of_whole["by_seed"]
        assert part["mean"] == pytest.approx(of_whole["mean"], rel=1e-12)
        assert part["interval"] == pytest.approx(of_whole["interval"], rel=1e-12)
    assert joined.record["conditions"]["baseline"]["cells"] == whole["conditions"]["baseline"]["cells"]
    assert [(before["run_id"], before["seeds"]) for before in joined.record["joined"]] == [
        ("of [0, 2, 4]", [0, 2, 4]),
        ("of [1, 3, 5]", [1, 3, 5]),
    ]
    pd.testing.assert_frame_equal(_sorted(place), _sorted(EMERGENCE))
    assert (place / "figure.png").read_bytes().startswith(b"\x89PNG")


def _sorted(folder: Path) -> pd.DataFrame:
    table = read_table(folder / "table.parquet")
    return table.sort_values(["seed", "model", "metric"]).reset_index(drop=True)


def test_seeds_in_the_precision_of_two_machines_are_joined(tmp_path):
    """bfloat16 where the CPU has it and float32 elsewhere is one configuration that leaves the choice to the machine."""
    config = read_run(EMERGENCE)["config"]
    auto = {**config, "training": {**config["training"], "dtype": "auto"}}
    assert auto != config
    part_of(EMERGENCE, [0, 2, 4], tmp_path / "ours")
    part_of(EMERGENCE, [1, 3, 5], tmp_path / "others", config=auto)
    add(tmp_path / "ours", tmp_path / "others")
    (joined,) = read_results(tmp_path / "ours")
    assert joined.record["seeds"] == [0, 1, 2, 3, 4, 5]


def test_a_third_folder_keeps_what_the_first_two_were(tmp_path):
    ours = tmp_path / "ours"
    part_of(EMERGENCE, [0, 1], ours)
    for seed in (2, 3):
        part_of(EMERGENCE, [seed], tmp_path / str(seed))
        add(ours, tmp_path / str(seed))
    (joined,) = read_results(ours)
    assert [before["seeds"] for before in joined.record["joined"]] == [[0, 1], [2], [3]]
    assert joined.record["seeds"] == [0, 1, 2, 3]


def test_a_claim_that_is_new_is_taken_as_it_is(tmp_path):
    part_of(EMERGENCE, [0, 1, 2], tmp_path / "others")
    (line,) = add(tmp_path / "ours", tmp_path / "others")
    assert line.endswith("3 seeds, new here")
    assert read_run(tmp_path / "ours/small/emergence") == read_run(tmp_path / "others/small/emergence")


def test_a_joining_that_was_cut_short_is_made_again(tmp_path):
    place = part_of(EMERGENCE, [0, 1, 2], tmp_path / "ours")
    part_of(EMERGENCE, [3, 4, 5], tmp_path / "others")
    shutil.copy(EMERGENCE / "table.parquet", place)  # the table is written, the record is not
    add(tmp_path / "ours", tmp_path / "others")
    pd.testing.assert_frame_equal(_sorted(place), _sorted(EMERGENCE))


@pytest.mark.parametrize(
    ("seeds", "changed", "message"),
    [
        ([2, 3], {}, "both have seed 2; a seed counts once"),
        ([3], {"base": "no-bos"}, "are of different bases"),
        ([3], {"read_outs": ["sinks"]}, "are of different read-outs"),
        ([3], {"config": {}}, "are of different models and trainings that variants start from"),
        ([3], {"conditions": {"baseline": {"changes": {"model.window": 8}, "after": None, "cells": {}}}}, "different variants"),
    ],
)
def test_what_has_no_verdict_together_is_refused_and_nothing_is_written(tmp_path, seeds, changed, message, capsys):
    ours, others = tmp_path / "ours", tmp_path / "others"
    place = part_of(EMERGENCE, [0, 1, 2], ours)
    part_of(EMERGENCE, seeds, others, **changed)
    shutil.copytree(RESULTS / "small" / "bos_removed", others / "small" / "bos_removed")  # which is new, and comes first
    before = (place / "run.json").read_bytes()
    with pytest.raises(SystemExit) as left:
        main([str(ours), str(others)])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert (place / "run.json").read_bytes() == before
    assert not (ours / "small" / "bos_removed").exists()


def test_a_metric_of_two_versions_is_refused(tmp_path):
    part_of(EMERGENCE, [0, 1], tmp_path / "ours")
    place = part_of(EMERGENCE, [2], tmp_path / "others")
    table = read_table(place / "table.parquet")
    table["version"] += 1
    write_table(table, place / "table.parquet")
    with pytest.raises(InputError, match="occurs in two versions"):
        add(tmp_path / "ours", tmp_path / "others")


def test_results_on_checkpoints_are_of_one_run(tmp_path):
    (kept, *_) = (kept for kept in read_results(RESULTS) if kept.record["scale"] == "checkpoint")
    with pytest.raises(InputError, match="results on checkpoints are of one run each"):
        join(kept, kept)


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no results of claims"):
        add(RESULTS, tmp_path)


def test_every_claim_that_trains_says_what_a_join_compares():
    """Fields that :func:`join` compares are in every committed record of a claim that trains."""
    trained = [kept.record for kept in read_results(RESULTS) if kept.record["conditions"]]
    assert trained
    for record in trained:
        assert record["config"], record["claim"]
        assert isinstance(record["read_outs"], list)
        assert json.dumps(record["base"]) in ('"bos"', '"no-bos"')
        assert record["claim"] in claims
