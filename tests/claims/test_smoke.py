"""The whole way, small: two claims from nothing to a verdict, and one of them turned round, which must not be reproduced."""

from __future__ import annotations

import dataclasses

import pytest

from sinklab.registry import claims
from sinklab.reproduction.claim import Claim, Condition
from sinklab.reproduction.effects import Difference
from sinklab.reproduction.engine import reproduce
from sinklab.reproduction.verdict import Part, judge

STEPS = {"training.steps": 200, "training.save_every": 200, "training.evaluate_every": 200, "schedule.warmup_steps": 50}
"""A quarter of the smallest scale: the sink of a softmax model is there after 100 to 150 of its steps."""

SOFTMAX = Condition("softmax", STEPS)
KEY_BIAS = Condition("key bias", {**STEPS, "model.operation": {"name": "key_bias"}})
PART = Part("the sink leaves the first token", Difference("sink_rate", "key bias", "softmax"), "points", less_than=-5)


@pytest.fixture
def short(monkeypatch):
    """Gu et al.'s key bias, cut to the fewest steps that show it, as a claim that the engine finds by its name."""

    def sink_leaves_for_a_key_bias() -> Claim:
        return Claim(
            statement="With a key bias the sink leaves the first token.",
            source="gu2024",
            reference="Gu et al. 2024 (arXiv 2410.10781), table 4",
            published="18.18 and 0.00.",
            parts=(PART,),
            conditions=(SOFTMAX, KEY_BIAS),
            read_outs=("sinks",),
            costs={"tiny": "minutes"},
        )

    monkeypatch.setitem(claims._objects, "sink_leaves_for_a_key_bias", sink_leaves_for_a_key_bias)
    return "sink_leaves_for_a_key_bias"


def test_from_nothing_to_verdicts_and_the_wrong_direction_is_refused(short, tmp_path):
    laws, left = reproduce(["repeated_token_laws", short], out=tmp_path, cache=tmp_path / "cache", progress=False)
    assert (laws.errors, left.errors) == ([], [])
    assert laws.judgement.verdict == "reproduced"
    assert left.judgement.verdict == "reproduced", left.judgement.findings
    swapped = dataclasses.replace(PART, effect=Difference("sink_rate", "softmax", "key bias"))
    assert judge((swapped,), (), left.numbers).verdict == "not reproduced"
    # What has been trained is not trained again: the same numbers, and no folder more.
    runs = sorted((tmp_path / "runs" / "tiny").iterdir())
    (again,) = reproduce([short], out=tmp_path, cache=tmp_path / "cache", progress=False)
    assert again.numbers == left.numbers
    assert sorted((tmp_path / "runs" / "tiny").iterdir()) == runs
