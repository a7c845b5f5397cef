"""The whole way, small: two claims from nothing to a verdict, and one of them turned round, which must not be reproduced."""

from __future__ import annotations

import dataclasses

import pytest
from tests.jobs.conftest import read_here, run_here
from tests.studies.reproduce.made_results import numbers_of

from sinklab.jobs import driver
from sinklab.registry import claims
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Difference
from sinklab_claims.reproduce import store as work
from sinklab_claims.reproduce.on_trainings import reproduce
from sinklab_claims.verdict.rule import judge

STEPS = {
    **{"training.steps": 200, "training.save_every": 200, "training.evaluate_every": 200, "schedule.warmup_steps": 50},
    **{"training.batch_size": 8, "data.max_tokens": 120_000, "watch.every": 200},
}
"""A sixth of the smallest scale and the text for it, after which the sink of a softmax model is there at every seed."""

SEEDS = range(6)
"""Rates after so few steps spread from 20 to 60 %, otherwise on each kind of processor: with three, an interval may reach 0."""

WITH = Variant("with BOS", STEPS)
WITHOUT = Variant("without BOS", {**STEPS, "data.bos": "none"})
PART = Part("the first token has no sink", Difference("sink_rate", "without BOS", "with BOS"), less_than=-5)


@pytest.fixture
def short(monkeypatch):
    """What a token that begins every row does, cut to the fewest steps that show it, as a claim found by its name."""

    def first_token_without_bos() -> Claim:
        return Claim(
            statement="Without a token that begins every row the first token has no sink.",
            source="gu2024",
            reference="Gu et al. 2024 (arXiv 2410.10781), section 5",
            published="With a fixed first token a rate of 74.11, without one of 18.18.",
            parts=(PART,),
            variants=(WITH, WITHOUT),
            read_outs=("sinks",),
            costs={"tiny": "minutes"},
        )

    monkeypatch.setitem(claims._objects, "first_token_without_bos", first_token_without_bos)
    return "first_token_without_bos"


def test_from_nothing_to_verdicts_and_the_wrong_direction_is_refused(short, tmp_path, monkeypatch):
    given = {"out": tmp_path, "cache": tmp_path / "cache", "progress": False}
    # One seed in a process of its own; the rest in this one, which has everything imported.
    (begun,) = reproduce(["repeated_token_laws"], seeds=[0], **given)
    assert (begun.summary["verdict"], begun.summary["errors"]) == ("inconclusive", [])
    monkeypatch.setattr(driver, "run_local", run_here)
    monkeypatch.setattr(work, "run_processes", read_here)
    (laws,) = reproduce(["repeated_token_laws"], **given)
    (left,) = reproduce([short], seeds=SEEDS, **given)
    assert (laws.summary["errors"], left.summary["errors"]) == ([], [])
    assert laws.summary["verdict"] == "agrees with the proof"
    assert left.summary["verdict"] == "reproduced", left.summary["parts"]
    swapped = dataclasses.replace(PART, effect=Difference("sink_rate", "with BOS", "without BOS"))
    assert judge((swapped,), (), numbers_of(left.table)).verdict == "not reproduced"
    # What has been trained is not trained again: the same numbers, and no folder more.
    runs = sorted((tmp_path / "runs" / "tiny").iterdir())
    (again,) = reproduce([short], seeds=SEEDS, **given)
    assert numbers_of(again.table) == numbers_of(left.table)
    assert sorted((tmp_path / "runs" / "tiny").iterdir()) == runs
