"""Judging kept results again: committed records are what the rule makes of their tables, and a changed claim changes them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from sinklab.studies.reproduce import again
from sinklab.studies.reproduce.again import judged_again, main

from sinklab.registry import claims
from sinklab.results.table import read_table
from sinklab_claims.verdict.records import read_results

RESULTS = Path(__file__).parents[3] / "results"
KEPT = read_results(RESULTS)


@pytest.mark.parametrize("kept", KEPT, ids=[f"{one.record['scale']}-{one.record['claim']}" for one in KEPT])
def test_a_committed_record_is_what_the_rule_makes_of_its_table(kept):
    """If this fails, run python -m sinklab.studies.reproduce.again results, and make docs."""
    assert json.loads(json.dumps(judged_again(kept.record, read_table(kept.folder / "table.parquet")))) == kept.record


def test_another_bound_is_another_verdict_and_the_numbers_stay(tmp_path, monkeypatch, capsys):
    shutil.copytree(RESULTS / "tiny" / "number_of_sinks", tmp_path / "tiny" / "number_of_sinks")
    assert main(tmp_path) == 0
    claim = claims["number_of_sinks"]()
    first = claim.parts[0]
    least = dataclasses.replace(first, more_than=1e6, less_than=float("inf"))
    monkeypatch.setitem(claims._objects, "number_of_sinks", lambda: dataclasses.replace(claim, parts=(least,)))
    before = (tmp_path / "tiny" / "number_of_sinks" / "table.parquet").read_bytes()
    assert main(tmp_path) == 1
    assert "holds for this model → does not hold for this model" in capsys.readouterr().out
    (kept,) = read_results(tmp_path)
    assert kept.record["verdict"] == "does not hold for this model"
    assert kept.record["parts"][0]["expected"] == "more than 1e+06"
    assert (kept.folder / "table.parquet").read_bytes() == before
    assert again.main(tmp_path) == 0
