"""Kept results: read back newest first, and refused where they are damaged."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from tests.claims.made_results import PARTS, write_claim

from sinklab.errors import InputError
from sinklab_claims.verdict.records import clearance, deciding_part, hardware_of, read_results, summary_of

ROOT = Path(__file__).parents[2]


def test_newest_first_and_nothing_but_claims(tmp_path):
    write_claim(tmp_path / "tiny" / "older", created="2026-01-01T00:00:00+00:00")
    write_claim(tmp_path / "small" / "newer", created="2026-01-02T00:00:00+00:00")
    write_claim(tmp_path / "tiny" / "same_day", created="2026-01-01T00:00:00+00:00")
    write_claim(tmp_path / "tiny-bos" / "oldest", created="2025-01-01T00:00:00+00:00", scale="tiny", base="bos")
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "run.json").write_text("{}")
    assert [kept.record.claim for kept in read_results(tmp_path)] == ["newer", "older", "same_day", "oldest"]
    assert read_results(tmp_path / "nowhere") == []


def test_the_effect_is_that_of_the_part_that_decides(tmp_path):
    record = write_claim(tmp_path / "tiny" / "one")
    assert record.verdict == "inconclusive"
    assert deciding_part(record.parts, record.verdict).says == "what nobody measured"
    record = write_claim(tmp_path / "tiny" / "two", parts=PARTS[:2])
    assert summary_of(record) == {
        "name": "two", "source": "gu2024", "scale": "tiny", "base": None, "verdict": "reproduced", "effect": -30.5,
        "interval": list(record.parts[0].interval), "unit": "points", "seeds": [0, 1, 2],
        "evidence": "toy", "created": "2026-01-01T00:00:00+00:00", "hardware": "cpu, made up, 2 cores",
    }  # fmt: skip
    assert hardware_of(dataclasses.replace(record, environment={})) == "unknown hardware"


def test_a_claim_that_holds_shows_its_weakest_part(tmp_path):
    gone, loss = PARTS[:2]
    clear = write_claim(tmp_path / "tiny" / "one", parts=(loss, gone))
    assert deciding_part(clear.parts, clear.verdict).says == "the sink is gone"
    narrow = write_claim(tmp_path / "tiny" / "two", parts=(gone, dataclasses.replace(loss, less_than=2.05)))
    assert narrow.verdict == "reproduced"
    assert deciding_part(narrow.parts, narrow.verdict).says == "the loss stays"
    loss = narrow.parts[1]
    middle, (low, high) = loss.mean, loss.interval
    assert clearance(loss) == pytest.approx((2.05 - middle) / (high - middle))
    assert clearance(dataclasses.replace(loss, interval=(middle, middle))) == math.inf
    assert clearance(dataclasses.replace(loss, less_than=None)) == pytest.approx((middle - 1) / (middle - low))
    assert clearance(dataclasses.replace(loss, interval=None)) == 0


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"kind": "audit"}, "kind: "),
        ({"verdict": "true"}, "verdict: "),
        ({"seeds": None}, "seeds: "),
        ({"parts": [{"says": "it is"}]}, "parts.0.effect: "),
    ],
)
def test_a_damaged_record_is_refused_by_name(tmp_path, changed, complaint):
    folder = tmp_path / "tiny" / "one"
    write_claim(folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | changed))
    with pytest.raises(
        InputError, match=r"tiny/one/run\.json is not what this version writes: .*run the claim again"
    ) as caught:
        read_results(tmp_path)
    assert complaint in str(caught.value)


def test_a_list_of_records_is_read_as_folders_are(tmp_path):
    record = write_claim(tmp_path / "made" / "one", scale="tiny")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tiny.json").write_text(f"[{(tmp_path / 'made' / 'one' / 'run.json').read_text()}]")
    (kept,) = read_results(tmp_path / "kept")
    assert (kept.record, kept.folder) == (record, tmp_path / "kept" / "tiny" / "one")


def test_committed_results_are_whole():
    kept = read_results(ROOT / "results")
    assert len(kept) > 100
    assert all(one.record.seeds and one.record.environment["hardware"] for one in kept)
