"""Times beside softmax's: by a clock that is made up."""

from __future__ import annotations

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab_claims.pathways import cost
from sinklab_claims.pathways.operations import pathways_of


def test_quartiles_by_hand():
    assert cost.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"value": 3.0, "low": 2.0, "high": 4.0}


def test_ratios_are_those_of_the_same_round(monkeypatch):
    """The machine becomes slower by a half each round; softpick takes twice as long as softmax all the same."""
    now = {"time": 0.0}
    taken = {"softmax": 1.0, "softpick": 2.0}
    rounds = {"softmax": 0, "softpick": 0}

    def step(self):
        now["time"] += taken[self.label] * 1.5 ** (rounds[self.label] // 2)
        rounds[self.label] += 1

    monkeypatch.setattr(cost._Timed, "_forward", step)
    monkeypatch.setattr(cost._Timed, "_train", step)
    pathways = pathways_of([{"name": "softpick"}])
    found = cost.costs(pathways, backcopy_tiny(), rounds=4, long=128, clock=lambda: now["time"])
    assert set(found["softpick"]) == {"parameters", "train_time", "forward_time", "train_time_long", "forward_time_long"}
    for column in ("train_time", "forward_time", "train_time_long", "forward_time_long"):
        assert found["softmax"][column] == {"value": 1.0, "low": 1.0, "high": 1.0}
        assert found["softpick"][column] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})
    assert found["softpick"]["parameters"]["value"] == 1.0


def test_real_steps_take_time_and_leave_the_threads_alone():
    threads = torch.get_num_threads()
    found = cost.costs(pathways_of([{"name": "gated"}]), backcopy_tiny(), rounds=2, long=64)
    assert found["gated"]["train_time"]["value"] > 0
    # A gate of 64 inputs on each coordinate of every head: 128 in each of two layers.
    assert found["gated"]["parameters"]["value"] == pytest.approx(1 + 2 * 128 * 64 / _parameters(), rel=1e-12)
    assert torch.get_num_threads() == threads


def test_widths_are_those_of_the_comparison():
    found = cost.costs(pathways_of([{"name": "gated"}]), backcopy_tiny(), widths={"gated": 85}, rounds=2, long=64)
    # 43 units of 3 · 64 numbers in each of two layers less.
    assert found["gated"]["parameters"]["value"] == pytest.approx(1 + (2 * 128 * 64 - 43 * 384) / _parameters(), rel=1e-12)


def _parameters() -> int:
    timed = cost._Timed(pathways_of([])[0], backcopy_tiny(), 64, lambda: 0.0)
    return timed.parameters


def test_too_few_rounds_are_refused():
    with pytest.raises(ConfigurationError, match="pathways: the cost is a median with quartiles; rounds 1 must be at least 2"):
        cost.costs(pathways_of([]), backcopy_tiny(), rounds=1)
