"""Training on key-query retrieval: exact solutions put in, a sink that grows in softmax and not in ReLU, and its bound."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.relu import Relu
from sinklab.operations.softmax import Softmax
from sinklab.studies.theory.retrieval_task import BOS, least_bos_weight, relu_solution, softmax_solution
from sinklab.studies.trigger.model import TriggerModel
from sinklab.studies.trigger.problem import train
from sinklab.studies.trigger.retrieval import RetrievalProblem, evaluate_retrieval

PROBLEM = RetrievalProblem()
QUICK = dataclasses.replace(PROBLEM, length=6, keys=4, values=2, position=3, learning_rate=3e-3)


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
    batch = dataclasses.replace(PROBLEM, target=target).draw(64, torch.Generator().manual_seed(0))
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


@torch.no_grad()
def sink_bound(model, inputs):
    """What the odds argument says of the weight on BOS at the last token of samples without trigger, and the weight."""
    bos, query, others = inputs[:, :1], inputs[:, -1:], inputs[:, 1:-1]
    pairs = [torch.cat((bos, query), dim=1), *(torch.cat((bos, other[:, None], query), dim=1) for other in others.unbind(1))]
    error = torch.stack([model(pair)[:, -1].abs().amax(-1) for pair in pairs]).amax(0)
    norms = (inputs @ model.attention[0].value_output()[0].mT).abs().amax(-1)
    _, (weights,), _ = model.with_weights(inputs)
    return least_bos_weight(error, norms[:, 0], norms[:, -1], norms[:, 1:-1]), weights[:, 0, -1, BOS]


def test_training_grows_the_sink_that_the_odds_demand():
    problem = QUICK
    trained = train(Softmax(), problem, 0)
    assert trained.outcome == "solved"
    assert trained.error < problem.tolerance
    numbers = evaluate_retrieval(trained.model, problem)
    assert numbers.max_error < 3 * problem.tolerance  # other sequences than those of the last batch
    assert numbers.before_bos_min > 0.99
    assert numbers.trigger_bos < 0.01
    before = problem.draw(100, torch.Generator().manual_seed(1), problem.position).inputs[:, : problem.position]
    bound, weight = sink_bound(trained.model, before)
    # float32: weights and outputs are right to some 1e-6.
    assert bool((weight >= bound - 1e-5).all())
    assert float(bound.mean()) > 0.9


def test_relu_learns_it_without_a_sink():
    trained = train(Relu(power=0.0), QUICK, 0)
    assert trained.outcome == "solved"
    numbers = evaluate_retrieval(trained.model, QUICK)
    assert numbers.before_bos_mean < 1e-3
    assert numbers.behind_bos_mean < 1e-3


def test_a_trigger_at_the_end_has_nothing_behind_it_and_seeds_repeat():
    problem = dataclasses.replace(QUICK, position=5, cap=3)
    first, second = (train(Softmax(), problem, 4) for _ in range(2))
    numbers = evaluate_retrieval(first.model, problem, 10)
    assert numbers.behind_bos_mean is numbers.behind_trigger_mean is None
    assert numbers == evaluate_retrieval(second.model, problem, 10)
    assert first.outcome == "cap"
    assert train(Softmax(), dataclasses.replace(QUICK, learning_rate=1e15, cap=200), 0).outcome == "diverged"


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
        train(Softmax(), dataclasses.replace(QUICK, **fields), 0)
