"""The trigger task trained: models that are those of the paper, runs, and what no choice of maps can do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.gated import Gated
from sinklab.operations.relu import Relu
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.sink_token import SinkToken
from sinklab.operations.softmax import Softmax
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.registry import operations
from sinklab.studies.theory.trigger_bounds import TriggerHeads, least_bos_weight_by_error, trigger_batch
from sinklab.studies.trigger import lab
from sinklab.studies.trigger.lab import as_released, evaluate, label_of
from sinklab.studies.trigger.problem import TriggerModel, TriggerProblem, divisor_quotient, full_rows, obstacle, train
from sinklab.studies.trigger.trigger import trigger

SHORT = TriggerProblem(cap=3)


def targets_of(inputs, drawn):
    """The mean of what stands behind BOS up to the trigger, there, and 0 elsewhere."""
    places = torch.arange(inputs.shape[1])
    means = inputs.where(places[:, None] > 0, 0.0).cumsum(1) / places.clamp(min=1)[:, None]
    return means * drawn.is_trigger[..., None]


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


def test_bounds_by_counting_and_by_the_error_alone_hold(softmax):
    trained, numbers = softmax
    drawn = trigger_batch(2000, 16, 16, torch.Generator().manual_seed(0))
    corners = drawn.inputs.clone()
    corners[..., 2:-1] = corners[..., 2:-1].sign()  # the largest that content can be
    with torch.no_grad():
        errors = [(trained.model(of) - targets_of(of, drawn)).abs().max().item() for of in (drawn.inputs, corners)]
    assert 0.8 < least_bos_weight_by_error(max(errors), 16) <= float(numbers.bos_min)
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


@pytest.mark.parametrize("name", operations.names())
def test_bound_holds_at_any_stage_of_any_operation(name):
    """Where the assumptions hold the bound holds, whether the model is any good or not."""
    problem = dataclasses.replace(SHORT, cap=8, learning_rate=5e-3)
    numbers = evaluate(train(as_released(name), problem, 1).model, problem, 64)
    if numbers.bound is not None:
        assert numbers.bound <= float(numbers.bos_min) + 1e-5
    assert (numbers.bound is None) == (name not in COUNTED)


COUNTED = {"elu_kernel", "qk_norm", "sigma_reparam", "softmax"}
"""Operations whose rows sum to one, with no null, bias or gate."""


def test_same_seed_same_model_and_another_seed_another():
    one, two, other = (train(as_released("gated"), SHORT, seed) for seed in (4, 4, 5))
    states = [run.model.state_dict() for run in (one, two, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["layers.0.q_proj.weight"], states[2]["layers.0.q_proj.weight"])


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
    assert without.positions.tolist() == [6] * 8
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
        ({"target": "all"}, "target 'all' must be one of including, preceding"),
    ],
)
def test_bad_problems_are_refused_before_training(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        train(as_released("softmax"), TriggerProblem(**fields), 0)


def test_names_are_those_of_the_paper():
    assert as_released("relu") == Relu(uncounted=1)
    assert as_released({"name": "relu", "uncounted": 0}) == Relu()
    assert as_released({"name": "relu", "power": 0.5}) == Relu(power=0.5)
    assert label_of(Relu(uncounted=1)) == "relu"
    assert label_of(Relu()) == "relu:uncounted=0"
    assert label_of(SinkToken(count=3)) == "sink_token:count=3"
    for text in ("relu", "sink_token"):
        assert label_of(as_released(text)) == text


def test_models_that_diverged_have_no_heads_that_sink():
    """Weights that are left may be finite, infinite or nothing, with a value map that is none."""
    result = trigger(operation="relu,qk_norm,sink_logit", seeds=[0], cap=3, learning_rate=1e19, samples=8)
    wide = trigger(operation="relu,softmax", layers=2, heads=2, seeds=[0], cap=3, learning_rate=1e5, samples=8)
    for run in result.summary["runs"] + wide.summary["runs"]:
        assert run["outcome"] == "diverged"
        assert run["bos_weight_mean"] is run["bos_weight_bound"] is run["sinking_heads"] is run["nothing_mean"] is None


def test_a_lab_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch):
    def call(chosen="softmax,sigma_reparam", seeds=(0, 1), **fields):
        return trigger(operation=chosen, seeds=seeds, **{"cap": 4, "samples": 8, **fields})

    whole = call()
    trained = []

    def killed_at_the_third(operation, problem, seed, progress):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append((operation, seed))
        return train(operation, problem, seed, progress)

    monkeypatch.setattr(lab, "train", killed_at_the_third)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        call(out=out)
    assert not out.exists()
    monkeypatch.setattr(lab, "train", lambda operation, *others: trained.append(operation) or train(operation, *others))
    with pytest.raises(KeyboardInterrupt):
        call(out=out, cap=5, progress=lambda stage, done, total: (_ for _ in ()).throw(KeyboardInterrupt) if done else None)
    assert len(trained) == 3  # a model of another limit is another one
    result = call(out=out)
    assert len(trained) == 5  # two before, and two now
    timeless = [[{**run, "cpu_seconds": 0} for run in result.summary["runs"]] for result in (whole, result)]
    assert timeless[0] == timeless[1]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize(
    ("operations", "seeds", "error"),
    [
        ("softmax,softmax", "0", "`operation` has softmax twice; name it once"),
        ("relu:uncounted=0,relu:uncounted=0", "0", "`operation` has relu:uncounted=0 twice"),
        ([Relu(uncounted=1), "relu"], [0], "`operation` has relu twice"),
        ("softmax", "0..2,1", "`seeds` has 1 twice"),
    ],
)
def test_nothing_counts_twice(operations, seeds, error, tmp_path):
    with pytest.raises(ConfigurationError, match=error):
        trigger(operation=operations, seeds=seeds, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_operation_without_a_solution_stands_beside_the_others():
    summary = trigger(operation=[Relu(), Relu(uncounted=1)], seeds=[0], cap=1, samples=8).summary
    assert [run["operation"] for run in summary["runs"]] == ["relu"]
    (entry,) = summary["cannot"]
    assert entry["operation"] == "relu:uncounted=0"
    assert entry["least_error"] == pytest.approx(1 / 30)


WIDTH = LENGTH = 16


def batch_of(size=32, seed=0):
    return trigger_batch(size, LENGTH, WIDTH, torch.Generator().manual_seed(seed), dtype=torch.float64)


def model_of(operation, layers=1, heads=1, *, size=1.0):
    torch.manual_seed(0)
    model = TriggerModel(operation, layers, heads, WIDTH).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(size * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("operation", "attention"), [(Softmax(), "softmax"), (Relu(uncounted=1), "relu")])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_layer_is_that_of_the_paper(operation, attention, heads):
    model, inputs = model_of(operation, heads=heads, size=0.2), batch_of().inputs
    layer = model.layers[0]
    split = [linear.weight.detach().unflatten(0, (heads, WIDTH)) for linear in (layer.q_proj, layer.k_proj, layer.v_proj)]
    output = torch.stack(layer.o_proj.weight.detach().split(WIDTH, dim=1))
    expected, weights = TriggerHeads(*split, output, attention)(inputs)
    got, (seen,), _ = model.with_weights(inputs)
    torch.testing.assert_close(got, expected + (inputs if heads > 1 else 0), rtol=0, atol=1e-11)
    torch.testing.assert_close(seen, weights, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["softmax", "sigma_reparam"])
def test_value_output_is_what_outputs_are_made_with(name):
    model, inputs = model_of(as_released(name), heads=2).eval(), batch_of().inputs
    outputs, (weights,), _ = model.with_weights(inputs)
    maps = model.layers[0].value_output()
    assert maps.shape == (2, WIDTH, WIDTH)
    by_hand = torch.einsum("bhqk,hij,bkj->bqi", weights, maps, inputs)
    torch.testing.assert_close(outputs - inputs, by_hand, rtol=1e-9, atol=1e-9)


def test_tokens_in_front_are_seen_and_not_answered():
    model, inputs = model_of(SinkToken(count=2)), batch_of().inputs
    outputs, (weights,), _ = model.with_weights(inputs)
    assert outputs.shape == inputs.shape
    assert weights.shape[-1] == LENGTH + 2
    outputs.sum().backward()
    assert float(model.front.grad.abs().min()) > 0


def test_null_mass_is_what_rows_lack():
    model, inputs = model_of(SoftmaxPlusOne()), batch_of().inputs
    _, (weights,), (mass,) = model.with_weights(inputs)
    torch.testing.assert_close(mass, 1 - weights.sum(-1), rtol=0, atol=1e-12)
    assert model_of(Softmax()).with_weights(inputs)[2] == [None]


@pytest.mark.parametrize("name", operations.names())
def test_every_operation_can_be_put_in(name):
    torch.manual_seed(0)
    model = TriggerModel(operations.make({"name": name}), 2, 2, WIDTH)
    inputs = batch_of(4).inputs.float()
    outputs = model(inputs)
    slow, weights, _ = model.with_weights(inputs)
    # float32 sums of up to 16 terms in another order, of values of order 1.
    torch.testing.assert_close(outputs, slow, rtol=0, atol=1e-5)
    outputs.square().mean().backward()
    assert outputs.isfinite().all()
    assert len(weights) == 2
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.numel()
    )


def errors(setting: TriggerProblem) -> dict[str, float]:
    found = {name: obstacle(as_released(name), setting) for name in operations}
    return {name: what[1] for name, what in found.items() if what is not None}


def test_with_bos():
    expected = dict.fromkeys(("elu", "identity", "mlp_kernel", "sigmoid"), 1 / 9)
    assert errors(TriggerProblem()) == pytest.approx(expected)
    assert errors(TriggerProblem(heads=3)) == pytest.approx(expected)
    assert errors(TriggerProblem(layers=2)) == {}


def test_without_bos_rows_that_sum_to_one_have_no_way_out():
    found = errors(TriggerProblem(bos=False))
    assert {name for name, error in found.items() if error == 0.25} == {"qk_norm", "sigma_reparam", "softmax", "value_bias"}
    assert obstacle(Softmax(), TriggerProblem(bos=False, target="preceding"))[1] == 0.5
    # A tolerance that the least error meets leaves the task to be done, as with divisors.
    assert obstacle(Softmax(), TriggerProblem(bos=False, tolerance=0.24)) is not None
    assert obstacle(Softmax(), TriggerProblem(bos=False, tolerance=0.26)) is None
    assert obstacle(Sigmoid(), TriggerProblem(tolerance=0.12)) is None
    assert obstacle(Gated(), TriggerProblem(bos=False)) is None  # the gate can be closed
    assert obstacle(SinkToken(), TriggerProblem(bos=False)) is None
    assert obstacle(Softmax(), TriggerProblem(bos=False, heads=2)) is None  # two heads can cancel


def test_divisors_by_hand():
    # d = 1, i and i - 1 at three and four keys; powers in between.
    assert divisor_quotient(Sigmoid(), 3) == pytest.approx(1)
    assert divisor_quotient(Relu(), 3) == pytest.approx(4 / 3)
    assert divisor_quotient(Relu(uncounted=1), 3) == pytest.approx(3 / 2)
    assert divisor_quotient(Relu(power=0.5), 3) == pytest.approx((4 / 3) ** 0.5)
    assert divisor_quotient(Softmax(), 3) is None
    assert divisor_quotient(Relu(normalize=True), 3) is None
    assert divisor_quotient(Sigmoid(length_bias=True), 3) is None
    assert full_rows(Softmax())
    assert not full_rows(Relu(normalize=True))  # rows of 0


@pytest.mark.parametrize(
    ("operation", "target", "bos", "error"),
    [
        (Relu(), "including", True, 1 / 30),
        (Relu(uncounted=1), "including", True, None),
        (Relu(uncounted=1), "preceding", True, 1 / 7),
        (Relu(uncounted=2), "preceding", True, None),
        # Without BOS a query sees one key less, and dividing by all of them is right.
        (Relu(), "including", False, None),
    ],
)
def test_the_divisor_must_be_the_number_of_tokens_in_the_mean(operation, target, bos, error):
    found = obstacle(operation, TriggerProblem(target=target, bos=bos))
    assert found is None if error is None else found[1] == pytest.approx(error)


def test_independent_weights_obey_the_identity_behind_the_proof():
    """d(4) times the difference of outputs behind two equal tokens is twice d(3) times that behind one, for any maps."""
    torch.manual_seed(0)
    setting = TriggerProblem(heads=2)
    for operation, third, fourth in ((Relu(), 3, 4), (Sigmoid(), 1, 1), (Relu(uncounted=1), 2, 3)):
        model = train(operation, dataclasses.replace(setting, cap=1), 0).model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
            bos, trigger, one, two = torch.randn(4, 16, dtype=torch.float64)
            at = {
                (name, count): model(torch.stack((bos, *[token] * count, trigger))[None])[0, -1] - trigger
                for name, token in (("one", one), ("two", two))
                for count in (1, 2)
            }
        behind_one = third * (at["one", 1] - at["two", 1])
        torch.testing.assert_close(fourth * (at["one", 2] - at["two", 2]), 2 * behind_one, rtol=1e-9, atol=1e-9)
