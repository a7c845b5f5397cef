"""The whole way, small: a claim from nothing to a verdict, a training of eight steps, and nothing done twice."""

from __future__ import annotations

import pytest
from tests.claims.made_results import numbers_of
from tests.jobs.conftest import read_here, run_here

from sinklab.jobs import driver
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Difference
from sinklab_claims.reproduce import store as work
from sinklab_claims.reproduce.on_trainings import reproduce

STEPS = {
    **{"training.steps": 8, "training.save_every": 8, "training.evaluate_every": 8, "schedule.warmup_steps": 2},
    **{"training.batch_size": 4, "data.max_tokens": 120_000, "watch.every": 8},
}
WITH = Variant("with BOS", STEPS)
WITHOUT = Variant("without BOS", {**STEPS, "data.bos": "none"})


@pytest.fixture
def short(monkeypatch):
    """What a token that begins every row does, cut to a few steps, as a claim found by its name."""

    def first_token_without_bos() -> Claim:
        return Claim(
            statement="Without a token that begins every row the first token has no sink.",
            source="gu2024",
            reference="Gu et al. 2024 (arXiv 2410.10781), section 5",
            published="With a fixed first token a rate of 74.11, without one of 18.18.",
            parts=(Part("the first token has no sink", Difference("sink_rate", "without BOS", "with BOS"), less_than=-5),),
            variants=(WITH, WITHOUT),
            read_outs=("sinks",),
            costs={"tiny": "minutes"},
        )

    monkeypatch.setitem(claims._objects, "first_token_without_bos", first_token_without_bos)
    return "first_token_without_bos"


def test_from_nothing_to_verdicts(short, tmp_path, monkeypatch):
    given = {"out": tmp_path, "cache": tmp_path / "cache", "progress": False}
    monkeypatch.setattr(driver, "run_local", run_here)
    monkeypatch.setattr(work, "run_processes", read_here)
    (laws,) = reproduce(["repeated_token_laws"], **given)
    (left,) = reproduce([short], seeds=range(2), **given)
    assert (laws.summary["errors"], left.summary["errors"]) == ([], [])
    assert laws.summary["verdict"] == "agrees with the proof"
    assert left.summary["verdict"] == "inconclusive"  # of two seeds, after eight steps
    assert len(numbers_of(left.table)) == 2
    # What has been trained is not trained again: the same numbers, and no folder more.
    runs = sorted((tmp_path / "runs" / "tiny").iterdir())
    (again,) = reproduce([short], seeds=range(2), **given)
    assert numbers_of(again.table) == numbers_of(left.table)
    assert sorted((tmp_path / "runs" / "tiny").iterdir()) == runs
