"""Training on key-query retrieval: exact solutions put in, a sink that grows in softmax and not in ReLU, and its bound."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.relu import Relu
from sinklab.operations.softmax import Softmax
from sinklab.theory.retrieval_task import relu_solution, softmax_solution
from sinklab.trigger.model import TriggerModel
from sinklab.trigger.retrieval import RetrievalSetting, read_retrieval, train_retrieval

SETTING = RetrievalSetting()
QUICK = dataclasses.replace(SETTING, length=6, keys=4, values=2, position=3, learning_rate=3e-3)


def put_in(operation, solution):
    model = TriggerModel(operation, 1, 1, len(solution.score)).double().eval()
    layer, eye = model.layers[0], torch.eye(len(solution.score))
    with torch.no_grad():
        for linear, weight in (
            (layer.q_proj, solution.score.T),
            (layer.k_proj, eye),
            (layer.v_proj, solution.value),
            (layer.o_proj, eye),
        ):
            linear.weight.copy_(weight)
    return model


@pytest.mark.parametrize("target", ["value", "token"])
@torch.no_grad()
def test_solutions_are_solutions_of_the_model_that_is_trained(target):
    batch = dataclasses.replace(SETTING, target=target).draw(64, torch.Generator().manual_seed(0))
    inputs, targets = batch.inputs.double(), batch.targets.double()
    silent = put_in(Relu(power=0.0), relu_solution(16, 4, target))
    outputs, (weights,), _ = silent.with_weights(inputs)
    # float64 sums of sixteen terms.
    torch.testing.assert_close(outputs, targets, rtol=0, atol=1e-12)
    assert not weights[..., 0].any()
    sinks = put_in(Softmax(), softmax_solution(16, 4, 16, 1e-6, target))
    outputs, (weights,), _ = sinks.with_weights(inputs)
    assert float((outputs - targets).abs().max()) <= 1e-6
    assert float(weights[:, 0, 1:, 0][~batch.is_trigger[:, 1:]].min()) >= 1 - 1e-6


@pytest.mark.parametrize("target", ["value", "token"])
def test_training_grows_the_sink_that_the_odds_demand(target):
    setting = dataclasses.replace(QUICK, target=target)
    trained = train_retrieval(Softmax(), setting, 0)
    assert trained.outcome == "solved"
    assert trained.error < setting.tolerance
    readout = read_retrieval(trained.model, setting)
    assert readout.error < 3 * setting.tolerance  # other sequences than those of the last batch
    assert readout.before_bos_min > 0.99
    assert readout.trigger_bos < 0.01


def test_relu_learns_it_without_a_sink():
    trained = train_retrieval(Relu(power=0.0), QUICK, 0)
    assert trained.outcome == "solved"
    readout = read_retrieval(trained.model, QUICK)
    assert readout.before_bos_mean < 1e-3
    assert readout.behind_bos_mean < 1e-3


def test_divided_relu_stays_above_its_bound():
    """1/7 at least, where places differ; far from the stop rule."""
    trained = train_retrieval(Relu(), dataclasses.replace(QUICK, cap=1500), 0)
    assert trained.outcome == "cap"
    worst = max(read_retrieval(trained.model, dataclasses.replace(QUICK, position=at)).error for at in (2, 3, 5))
    assert worst > 1 / 7


def test_a_trigger_at_the_end_has_nothing_behind_it_and_seeds_repeat():
    setting = dataclasses.replace(QUICK, position=5, cap=3)
    first, second = (train_retrieval(Softmax(), setting, 4) for _ in range(2))
    readout = read_retrieval(first.model, setting, 10)
    assert readout.behind_bos_mean is readout.behind_trigger_mean is None
    assert readout == read_retrieval(second.model, setting, 10)
    assert first.outcome == "cap"
    assert train_retrieval(Softmax(), dataclasses.replace(QUICK, learning_rate=1e15, cap=200), 0).outcome == "diverged"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cap": 0}, "cap 0 must be at least 1"),
        ({"tolerance": 0.0}, "tolerance 0.0 must be a positive number"),
        ({"learning_rate": float("nan")}, "learning rate nan must be a positive number"),
        ({"keys": 3}, "keys 3 must be at least 4"),
        ({"position": 6}, "position 6 must be in 2 … 5"),
        ({"batch": 0}, "batch 0 must be at least 1"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        train_retrieval(Softmax(), dataclasses.replace(QUICK, **fields), 0)
