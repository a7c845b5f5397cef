"""One of a thing is no several, in whatever is printed of it."""

from __future__ import annotations

import pytest

from sinklab.report.runs import finding_of
from sinklab.results.naming import counted, front_names, head_numbering
from sinklab.sinks import Sinks


@pytest.mark.parametrize(("number", "words"), [(0, "0 texts"), (1, "1 text"), (2, "2 texts"), (12_000, "12,000 texts")])
def test_a_count(number, words):
    assert counted(number, "text") == words


def test_learned_tokens_in_front():
    assert front_names(1) == ["the learned token in front"]
    assert front_names(2) == ["learned token 1 of 2 in front", "learned token 2 of 2 in front"]
    assert front_names(0) == []


def test_heads_are_numbered_by_the_layers_that_attend():
    assert head_numbering([1, 3], 4) == (
        "Of 4 layers 2 have attention (1, 3), and heads are numbered by these: 0.0 is the first head of layer 1."
    )
    assert "2, 5, 8, 11, 14, 17, …" in head_numbering(range(2, 30, 3), 30)
    assert (head_numbering([0, 1], 2), head_numbering([], 2), head_numbering([], 0)) == ("", "", "")


def test_one_step_and_one_sample():
    record = {"kind": "pretrain", "status": "finished", "steps": 1, "result": {"held_out_loss": 2.0}}
    assert finding_of(record, {}) == "Finished after 1 step: 2.000 nats per held-out token."
    assert "1 sample of 1 position, threshold" in repr(Sinks(samples=1, seq_len=1))
