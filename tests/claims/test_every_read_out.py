"""What holds for every read-out: numbers that it declares, finite and the same twice, and a model left alone."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.registry import read_outs
from sinklab.results.metric import metrics_of


@pytest.mark.parametrize("name", read_outs.names())
def test_contract(trained, name):
    model = trained.loaded.model
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    found = read_outs[name](trained)
    assert set(found) <= {metric.name for metric in metrics_of("read_outs", name)}
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert read_outs[name](trained) == found
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not model.training


def test_no_two_read_outs_share_a_metric():
    names = [metric.name for name in read_outs.names() for metric in metrics_of("read_outs", name)]
    assert len(set(names)) == len(names)
