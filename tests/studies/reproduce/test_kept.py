"""Kept results: read back newest first, and refused where they are damaged."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from tests.studies.reproduce.made_results import PARTS, write_claim

from sinklab.errors import InputError
from sinklab.registry import claims
from sinklab_claims.reproduce.on_trainings import _requests
from sinklab_claims.verdict.records import clearance, deciding_part, hardware_of, read_results, summary_of

ROOT = Path(__file__).parents[3]


def test_newest_first_and_nothing_but_claims(tmp_path):
    write_claim(tmp_path / "tiny" / "older", created="2026-01-01T00:00:00+00:00")
    write_claim(tmp_path / "small" / "newer", created="2026-01-02T00:00:00+00:00")
    write_claim(tmp_path / "tiny" / "same_day", created="2026-01-01T00:00:00+00:00")
    write_claim(tmp_path / "tiny-bos" / "oldest", created="2025-01-01T00:00:00+00:00", scale="tiny", base="bos")
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "run.json").write_text("{}")
    assert [kept.record["claim"] for kept in read_results(tmp_path)] == ["newer", "older", "same_day", "oldest"]
    assert read_results(tmp_path / "nowhere") == []


def test_the_effect_is_that_of_the_part_that_decides(tmp_path):
    record = write_claim(tmp_path / "tiny" / "one")
    assert record["verdict"] == "inconclusive"
    assert deciding_part(record)["says"] == "what nobody measured"
    record = write_claim(tmp_path / "tiny" / "two", parts=PARTS[:2])
    assert summary_of(record) == {
        "name": "two", "source": "gu2024", "scale": "tiny", "base": None, "verdict": "reproduced", "effect": -30.5,
        "interval": record["parts"][0]["interval"], "unit": "points", "seeds": [0, 1, 2],
        "evidence": "toy", "created": "2026-01-01T00:00:00+00:00", "hardware": "cpu, made up, 2 cores",
    }  # fmt: skip
    assert hardware_of({"environment": {}}) == "unknown hardware"


def test_a_claim_that_holds_shows_its_weakest_part(tmp_path):
    gone, loss = PARTS[:2]
    clear = write_claim(tmp_path / "tiny" / "one", parts=(loss, gone))
    assert deciding_part(clear)["says"] == "the sink is gone"
    narrow = write_claim(tmp_path / "tiny" / "two", parts=(gone, dataclasses.replace(loss, less_than=2.05)))
    assert narrow["verdict"] == "reproduced"
    assert deciding_part(narrow)["says"] == "the loss stays"
    middle, (low, high) = narrow["parts"][1]["mean"], narrow["parts"][1]["interval"]
    assert clearance(narrow["parts"][1]) == pytest.approx((2.05 - middle) / (high - middle))
    assert clearance({**narrow["parts"][1], "interval": [middle, middle]}) == math.inf
    assert clearance({**narrow["parts"][1], "less_than": None}) == pytest.approx((middle - 1) / (middle - low))
    assert clearance({**narrow["parts"][1], "interval": None}) == 0


def test_a_claim_that_fails_shows_the_first_part_that_does(tmp_path):
    gone, loss = PARTS[:2]
    parts = (gone, dataclasses.replace(loss, less_than=1.9), dataclasses.replace(gone, less_than=-40))
    record = write_claim(tmp_path / "tiny" / "one", parts=parts)
    assert record["verdict"] == "not reproduced"
    assert deciding_part(record) == record["parts"][1]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"kind": "audit"}, "its kind is 'audit', expected 'claim'"),
        ({"verdict": "true"}, "its verdict is 'true', expected one of reproduced, not reproduced"),
        ({"seeds": None}, "its field 'seeds' is NoneType, expected list"),
        ({"parts": [{"says": "it is"}]}, "a part of it has no effect, needs"),
    ],
)
def test_a_damaged_record_is_refused_by_name(tmp_path, changed, complaint):
    folder = tmp_path / "tiny" / "one"
    record = write_claim(folder)
    (folder / "run.json").write_text(json.dumps(record | changed))
    with pytest.raises(InputError, match=r"tiny/one/run\.json is no record of a claim: .*run the claim again") as caught:
        read_results(tmp_path)
    assert complaint in str(caught.value)


def test_the_page_of_claims_counts_what_is_run_and_what_is_committed():
    """Its numbers of trainings are those that the command foretells, and its numbers of results those of the folder."""
    page = " ".join((ROOT / "docs" / "claims.md").read_text(encoding="utf-8").split())
    own, with_bos = (
        {cell.name for request in _requests(list(claims), "tiny", range(8)) for cell in request.cells.values()},
        {
            cell.name
            for request in _requests([name for name in claims if "bos" in claims[name]().bases], "tiny", range(8), "bos")
            for cell in request.cells.values()
        },
    )
    measured = sum(claims[name]().measure is not None and "tiny" in claims[name]().costs for name in claims)
    assert f"on the base of its source, are {len(own)} trainings and {8 * measured} measurements" in page
    assert f"`--base bos` takes another {len(with_bos - own)} trainings" in page
    small = [kept.record for kept in read_results(ROOT / "results") if kept.record["scale"] == "small"]
    trained = [record for record in small if record["conditions"]]
    source = [record for record in trained if record["base"] == record["source_base"]]
    without_bos = sum(record["base"] == "no-bos" for record in source)
    as_they_are = [record for record in small if not record["conditions"] and record["claim"] != "masked_objective"]
    assert (
        f"{len(small)} results are committed: {len(source)} of trainings on the base of the source, "
        f"{without_bos} of these without BOS; {len(trained) - len(source)} of trainings "
        f"with BOS where the source has none; 1 of masked models that the claim trains itself; and {len(as_they_are)} about "
    ) in page
