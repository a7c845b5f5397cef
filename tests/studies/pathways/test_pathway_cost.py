"""Times beside softmax's: by a clock that is made up."""

from __future__ import annotations

import pytest
import torch

from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab_claims.pathways import cost
from sinklab_claims.pathways.operations import parameters_of, pathways_of


def test_ratios_are_those_of_the_same_round(monkeypatch):
    """The machine becomes slower by a half each round; softpick takes twice as long as softmax all the same."""
    now, taken, rounds = {"time": 0.0}, {"softmax": 1.0, "softpick": 2.0}, {"softmax": 0, "softpick": 0}

    def step(self):
        now["time"] += taken[self.label] * 1.5 ** (rounds[self.label] // 2)
        rounds[self.label] += 1

    monkeypatch.setattr(cost._Timed, "_forward", step)
    monkeypatch.setattr(cost._Timed, "_train", step)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now["time"])
    pathways = pathways_of([{"name": "softpick"}])
    found = cost.costs(pathways, backcopy_tiny(), dict.fromkeys(taken, 128), rounds=4, long=128)
    columns = ("train_time", "forward_time", "train_time_long", "forward_time_long")
    assert set(found["softpick"]) == {"parameters", *columns}
    for column in columns:
        assert found["softmax"][column] == {"value": 1.0, "low": 1.0, "high": 1.0}
        assert found["softpick"][column] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})
    assert found["softpick"]["parameters"]["value"] == 1.0
    assert cost.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"value": 3.0, "low": 2.0, "high": 4.0}


def test_real_steps_take_time_and_leave_the_threads_alone():
    threads, pathways = torch.get_num_threads(), pathways_of([{"name": "gated"}])
    found = cost.costs(pathways, backcopy_tiny(), {"softmax": 128, "gated": 85}, rounds=2, long=64)["gated"]
    assert found["train_time"]["value"] > 0
    # A gate of 64 inputs on each coordinate of every head, 128 in each of two layers; 43 units of 3 * 64 in each less.
    softmax = parameters_of(pathways[0], backcopy_tiny(), 128)
    assert found["parameters"]["value"] == pytest.approx(1 + (2 * 128 * 64 - 43 * 384) / softmax, rel=1e-12)
    assert torch.get_num_threads() == threads
