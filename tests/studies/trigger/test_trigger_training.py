"""Training on the trigger task: the published numbers with one seed each, the counting bound on every model, the rules."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.registry import operations
from sinklab.studies.trigger.evaluation import evaluate
from sinklab.studies.trigger.lab import as_released
from sinklab.studies.trigger.problem import TriggerProblem, train

SHORT = TriggerProblem(cap=3)


@pytest.fixture(scope="module")
def softmax():
    trained = train(as_released("softmax"), TriggerProblem(), 0)
    return trained, evaluate(trained.model, TriggerProblem())


def test_softmax_sinks_off_the_trigger(softmax):
    """Ran-Milo 2026, figure 3; a replication of ours found at least 0.9986 in every seed."""
    trained, numbers = softmax
    assert trained.outcome == "solved"
    assert trained.error < 5e-3
    # The rule looks at 128 sequences, the evaluation at 1,000.
    assert numbers.error < 1e-2
    assert float(numbers.bos_mean) >= 0.998
    assert float(numbers.bos_min) >= 0.998
    # The trigger is at 7 and averages itself and the six before it: 1/7 on keys 1 … 7, next to nothing on BOS.
    torch.testing.assert_close(numbers.mean[0, 0, 7, 1:8], torch.full((7,), 1 / 7), rtol=0, atol=2e-3)
    assert float(numbers.trigger_bos) < 5e-3
    assert float(numbers.std[0, 0, :, 0].max()) < 1e-2
    assert numbers.sinking == [[0, 0]]


def test_counting_bound_holds_and_is_near(softmax):
    _, numbers = softmax
    # 1e-5: float32 weights and outputs, of 16 terms, times the norm of the functional.
    assert numbers.bound <= float(numbers.bos_min) + 1e-5
    assert numbers.bound > 0.99


def test_relu_is_silent():
    """Figure 3: nothing but the row of the trigger, with some weight on BOS, whose value is 0."""
    trained = train(as_released("relu"), TriggerProblem(), 0)
    numbers = evaluate(trained.model, TriggerProblem())
    assert trained.outcome == "solved"
    assert float(numbers.bos_mean) == 0.0
    assert float(numbers.bos_min) == 0.0
    assert 0.3 < float(numbers.trigger_averaged) < 0.6
    off = [query for query in range(1, 16) if query != 7]
    assert float(numbers.mean[0, 0, off].max()) < 1e-2
    assert numbers.bound is None


def test_an_even_head_does_not_sink_however_large_its_weights_are():
    """Untrained maps give every key the same weight, which of elu is 1."""
    problem = TriggerProblem(layers=2, heads=2)
    numbers = evaluate(problem.build(as_released("elu"), 0), problem, 64)
    assert bool((numbers.bos_mean > 0.9).all())
    assert float((numbers.bos_share - 0.161).abs().max()) < 0.005  # the mean of 1/i, i = 2 … 16 but 8
    assert numbers.sinking == []


@pytest.mark.parametrize("name", ["softmax", "sink_logit", "sink_token", "key_value_bias"])
def test_of_a_full_row_the_share_is_the_weight(name):
    numbers = evaluate(TriggerProblem().build(as_released(name), 0), TriggerProblem(), 64)
    torch.testing.assert_close(numbers.bos_share, numbers.bos_mean)


@pytest.mark.parametrize("name", operations.names())
def test_bound_holds_at_any_stage_of_any_operation(name):
    """Where the assumptions hold the bound holds, whether the model is any good or not."""
    problem = dataclasses.replace(SHORT, cap=8, learning_rate=5e-3)
    numbers = evaluate(train(as_released(name), problem, 1).model, problem, 64)
    if numbers.bound is not None:
        assert numbers.bound <= float(numbers.bos_min) + 1e-5
    assert (numbers.bound is None) == (name not in COUNTED)


COUNTED = {"elu_kernel", "qk_norm", "sigma_reparam", "softcap", "softmax", "tempered_softmax"}
"""Operations whose rows sum to one, with no null, bias or gate."""


@pytest.mark.parametrize("name", ["alibi", "relative", "rotary", "learned", "sinusoid"])
def test_bound_with_positions_holds_unless_they_are_added_to_the_tokens(name):
    problem = dataclasses.replace(SHORT, cap=8, learning_rate=5e-3, positions=name, triggers=3)
    numbers = evaluate(train(as_released("softmax"), problem, 1).model, problem, 64)
    assert (numbers.bound is None) == (name in ("learned", "sinusoid"))
    assert numbers.bound is None or numbers.bound <= float(numbers.bos_min) + 1e-5


def test_with_several_triggers_off_means_off_all_of_them():
    """By hand, on untrained maps: scores are about 0, and BOS has 1/i at every query that is no trigger."""
    problem = dataclasses.replace(SHORT, cap=1, triggers=5)
    numbers = evaluate(train(as_released("softmax"), problem, 0).model, problem, 200)
    drawn = problem.draw(200, torch.Generator().manual_seed(1_000_003), 7)
    off = ~drawn.is_trigger[:, 1:]
    expected = (1 / torch.arange(2, 17)).expand(200, -1)[off].mean()
    # Scores of maps of size 0.02 are within 0.01 of 0.
    torch.testing.assert_close(numbers.bos_mean[0, 0], expected, rtol=2e-2, atol=0)
    assert drawn.is_trigger[:, 7].all()


def test_an_exact_start_has_nothing_to_learn():
    for name in ("softmax", "relu"):
        problem = TriggerProblem(start="construction", noise=0.0, target="including")
        trained = train(as_released(name), problem, 0)
        assert (trained.outcome, trained.steps) == ("solved", 0)
        assert trained.error <= problem.tolerance / 2 * (1 + 1e-3) if name == "softmax" else trained.error < 1e-6
        numbers = evaluate(trained.model, problem, 64)
        assert float(numbers.bos_min) > 0.995 if name == "softmax" else float(numbers.bos_mean) == 0.0


def test_noise_on_a_construction_is_the_start_of_the_seed_scaled():
    problem = TriggerProblem(start="construction", noise=0.1)
    plain, clean, noisy = (
        given.build(as_released("relu"), 3).layers[0].k_proj.weight
        for given in (TriggerProblem(), dataclasses.replace(problem, noise=0.0), problem)
    )
    torch.testing.assert_close(noisy, clean + 5 * plain)


def test_same_seed_same_model_and_another_seed_another():
    one, two, other = (train(as_released("gated"), SHORT, seed) for seed in (4, 4, 5))
    states = [run.model.state_dict() for run in (one, two, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["layers.0.q_proj.weight"], states[2]["layers.0.q_proj.weight"])


def test_training_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train(as_released("softmax"), SHORT, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_cap_and_divergence_are_outcomes():
    capped = train(as_released("softmax"), SHORT, 0)
    assert (capped.steps, capped.outcome) == (3, "cap")
    wild = train(as_released("identity"), dataclasses.replace(SHORT, cap=200, learning_rate=1e8), 0)
    assert wild.outcome == "diverged"
    assert wild.steps < 200
    assert evaluate(wild.model, SHORT, 8).to_dict()["max_error"] is None


def test_residual_and_bos_change_the_answers():
    batch = TriggerProblem().draw(8, torch.Generator().manual_seed(0), 7)
    without = dataclasses.replace(SHORT, bos=False).draw(8, torch.Generator().manual_seed(0), 7)
    assert torch.equal(without.inputs, batch.inputs[:, 1:])
    assert torch.equal(without.targets, batch.targets[:, 1:])
    assert without.positions.tolist() == [[6]] * 8
    assert torch.equal(TriggerProblem().answers(batch), batch.targets)
    assert torch.equal(TriggerProblem(heads=2).answers(batch), batch.inputs + batch.targets)
    assert (TriggerProblem().rate, TriggerProblem(layers=2).rate, TriggerProblem(learning_rate=0.5).rate) == (1e-3, 1e-4, 0.5)


def test_without_bos_there_is_no_bos_weight():
    problem = dataclasses.replace(SHORT, bos=False)
    numbers = evaluate(train(as_released("sink_logit"), problem, 0).model, problem, 16).to_dict()
    assert numbers["bos_weight_mean"] is numbers["bos_weight_min"] is numbers["strongest_head"] is None
    assert 0 < numbers["nothing_mean"] < 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 3}, "length 3 must be at least 4"),
        ({"width": 3}, "width 3 must be at least 4"),
        ({"position": 1}, r"position 1 must be in 2 … 15, counted from 0"),
        ({"position": 16}, r"position 16 must be in 2 … 15"),
        ({"layers": 0}, "layers 0 must be at least 1"),
        ({"cap": 0}, "cap 0 must be at least 1"),
        ({"learning_rate": float("nan")}, "learning rate nan must be a positive number"),
        ({"tolerance": 0.0}, "tolerance 0.0 must be a positive number"),
        ({"triggers": 14}, "14 triggers in 16 tokens; expected 1 … 13"),
        ({"start": "zero"}, "start 'zero' must be one of random, construction"),
        ({"noise": 0.1}, "noise 0.1 is put on a construction, and the start is random"),
        ({"noise": -0.1}, "noise -0.1 must be a number from 0; it is a standard deviation"),
        ({"positions": "rotary", "width": 5}, "head_dim 5 must be even"),
        ({"target": "all"}, "target 'all' must be one of including, preceding"),
    ],
)
def test_bad_problems_are_refused_before_training(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        train(as_released("softmax"), TriggerProblem(**fields), 0)
