"""Kept results: read back newest first, and refused where they are damaged."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from tests.studies.reproduce.made_results import PARTS, write_claim

from sinklab.errors import InputError
from sinklab.studies.reproduce.kept import clearance, deciding_part, hardware_of, read_results, summary_of


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
