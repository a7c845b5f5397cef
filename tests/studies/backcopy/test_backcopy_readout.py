"""The model as released, the numbers against plain loops over its weights, knock-outs, and what training on the way does."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.studies.backcopy.test_backcopy_chain import chain_of
from torch import nn

from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.operations.relu import Relu
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.studies.backcopy.evaluation import HeadNumbers, evaluate, risks
from sinklab.studies.backcopy.model import knocked_out, make_model
from sinklab.studies.backcopy.problem import BackcopyProblem
from sinklab.studies.backcopy.training import SCALES, BackcopySettings, train

PROBLEM = BackcopyProblem(chain_of(), 12)


def model_of(operation=None, **changes):
    fields = {"width": 16, "layers": 2, "heads": 2, **changes}
    return make_model(operation or Softmax(), PROBLEM.chain.vocab_size, PROBLEM.length, **fields)


def test_the_model_starts_like_the_released_one():
    model = make_model(Softmax(), 100, 256, width=256, layers=1).requires_grad_(False)
    # Of 25,600 and more numbers: five standard errors of a standard deviation are below 3 %.
    assert float(model.embed_tokens.weight.std()) == pytest.approx(1, rel=0.03)
    assert float(model.position.table.std()) == pytest.approx(1, rel=0.03)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            assert float(module.weight.abs().max()) == pytest.approx(bound, rel=1e-3), name
            assert float(module.weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03), name
    assert not any(name.endswith("proj.bias") for name, _ in model.named_parameters())
    assert model.lm_head.weight is not model.embed_tokens.weight
    again, other = make_model(Softmax(), 100, 256, width=256), make_model(Softmax(), 100, 256, width=256, seed=1)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


@torch.no_grad()
def test_sublayers_taken_out_add_nothing():
    model = model_of(no_attention=(0,), no_feed_forward=(0, 1))
    tokens = PROBLEM.draw(3)[:, :-1]
    states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(states[0], states[1])
    attention = model.layers[1]
    expected = (
        states[1]
        + attention.self_attn(attention.input_layernorm(states[1]), scheme=model.position, rotation=None, is_causal=True)[0]
    )
    torch.testing.assert_close(states[2], model.norm(expected))


@torch.no_grad()
def test_a_head_that_is_knocked_out_is_one_without_output():
    model, tokens = model_of(), PROBLEM.draw(4)[:, :-1]
    before = model(tokens, use_cache=False).logits
    with knocked_out(model, 1, 0):
        without = model(tokens, use_cache=False).logits
    torch.testing.assert_close(model(tokens, use_cache=False).logits, before, rtol=0, atol=0)
    model.layers[1].self_attn.o_proj.weight[:, :8] = 0
    torch.testing.assert_close(model(tokens, use_cache=False).logits, without)
    assert float((without - before).abs().max()) > 1e-3
    with pytest.raises(ConfigurationError, match="no head 2 to knock out: layer 1 has 2"), knocked_out(model, 1, 2):
        pass


@pytest.mark.parametrize("operation", [Softmax(), Relu()])
@torch.no_grad()
def test_read_outs_are_those_of_plain_loops(operation):
    model = model_of(operation).eval()
    tokens = PROBLEM.draw(5, torch.Generator().manual_seed(3))[:, :-1]
    probe = HeadNumbers(PROBLEM.is_trigger(tokens))
    with attend(model, [probe]):
        states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    layer, head, inner = 1, 1, model.layers[1].self_attn
    normed = model.layers[1].input_layernorm(states[1])
    queries, keys, values = (
        linear(normed).unflatten(-1, (2, 8))[:, :, head] for linear in (inner.q_proj, inner.k_proj, inner.v_proj)
    )
    scores = queries @ keys.mT / math.sqrt(8)
    for row in range(len(tokens)):
        found = {"bos_weight": [], "bos_weight_trigger": [], "previous_weight": [], "previous_weight_trigger": []}
        mass = 0.0
        for query in range(2, PROBLEM.length):
            seen = scores[row, query, : query + 1]
            weights = torch.softmax(seen, -1) if isinstance(operation, Softmax) else torch.relu(seen) / (query + 1)
            trigger = int(tokens[row, query]) < PROBLEM.chain.num_triggers
            found["bos_weight_trigger" if trigger else "bos_weight"].append(float(weights[0]))
            found["previous_weight_trigger" if trigger else "previous_weight"].append(float(weights[query - 1]))
            mass += 0.0 if trigger else float(weights.sum())
        for name, numbers in found.items():
            expected = sum(numbers) / len(numbers) if numbers else math.nan
            # float32 sums of a dozen weights up to 1.
            assert float(probe.heads[layer][name][row, head]) == pytest.approx(expected, abs=1e-5, nan_ok=True)
        share = sum(found["bos_weight"]) / mass if mass else 0.0
        assert float(probe.heads[layer]["bos_share"][row, head]) == pytest.approx(share, abs=1e-5)
    norms = values.norm(dim=-1)
    torch.testing.assert_close(probe.heads[layer]["value_ratio"][:, head], norms[:, 0] / norms[:, 1:].mean(1))
    inside = states[1].norm(dim=-1)
    torch.testing.assert_close(probe.layers[0]["residual_ratio"], inside[:, 0] / inside[:, 1:].mean(1))
    torch.testing.assert_close(probe.layers[0]["residual_bos"], inside[:, 0])
    assert sorted(probe.layers) == [-1, 0, 1]


@torch.no_grad()
def test_two_halves_merge_to_the_whole_and_rows_are_means():
    model, tokens = model_of().eval(), PROBLEM.draw(6, torch.Generator().manual_seed(1))[:, :-1]
    probes = []
    for part in (tokens, tokens[:4], tokens[4:]):
        probes.append(HeadNumbers(PROBLEM.is_trigger(part)))
        with attend(model, [probes[-1]]) as session:
            model(part, use_cache=False)
    whole, first, second = probes
    first.merge(second)
    for layer, numbers in whole.heads.items():
        for name, values in numbers.items():
            torch.testing.assert_close(first.heads[layer][name], values, equal_nan=True)
    assert len(session.table()) == len(list(second.rows()))
    rows = {(row["metric"].name, row["layer"], row.get("head")): row["value"] for row in whole.rows()}
    assert rows["value_ratio", 1, 0] == pytest.approx(float(whole.heads[1]["value_ratio"][:, 0].mean()))
    assert rows["residual_bos", -1, None] == pytest.approx(float(whole.layers[-1]["residual_bos"].mean()))


def test_a_layer_without_attention_keeps_the_numbers_of_the_others_in_place():
    readout = evaluate(model_of(layers=3, no_attention=(0, 2)), PROBLEM, 4, knock_out=True)
    assert list(readout.heads) == [1]
    assert sorted(readout.layers) == [-1, 0, 1, 2]
    assert list(readout.knock_outs) == [(1, 0), (1, 1)]


@pytest.mark.parametrize("name", operations.names())
def test_every_operation_can_be_read(name):
    model = model_of(operations.make({"name": name}), layers=1)
    readout = evaluate(model, PROBLEM, 4)
    numbers = readout.heads[0]
    assert all(bool(values.isfinite().all()) for values in numbers.values())
    if name == "sink_token":
        # A learned token in front of BOS: four queries of about thirteen keys each give it something.
        assert float(numbers["nothing"].min()) > 0.01


@torch.no_grad()
def test_risks_are_by_sequence():
    model, tokens = model_of(), PROBLEM.draw(8, torch.Generator().manual_seed(0))[:, :-1]
    at_triggers, elsewhere = risks(model, PROBLEM, tokens)
    excess, triggers = PROBLEM.excess(tokens, model(tokens, use_cache=False).logits), PROBLEM.is_trigger(tokens)
    for row in range(8):
        if bool(triggers[row].any()):
            assert float(at_triggers[row]) == pytest.approx(float(excess[row][triggers[row]].mean()))
        assert float(elsewhere[row]) == pytest.approx(float(excess[row][~triggers[row]].mean()))


# --- training ---


def test_training_is_that_of_its_seed_and_reads_on_the_way():
    setting = BackcopySettings(steps=12, width=16, length=12, batch=4, evaluations=3)
    assert setting.evaluated_at == [0, 3, 12]
    first, second = (train(Softmax(), setting, PROBLEM, 0, samples=4) for _ in range(2))
    assert first.losses == second.losses
    assert len(first.losses) == 12
    assert list(first.numbers) == [0, 3, 12]
    assert not first.diverged
    assert not first.model.training
    assert train(Softmax(), setting, PROBLEM, 1, samples=4).losses != first.losses


def test_a_run_that_diverges_says_so():
    setting = BackcopySettings(steps=50, width=16, length=12, batch=4, evaluations=2, optimizer="sgd", learning_rate=1e12)
    trained = train(Softmax(), setting, PROBLEM, 0, samples=4)
    assert trained.diverged
    assert len(trained.losses) < 50


def test_rates_are_those_of_the_scale():
    paper = BackcopySettings(**SCALES["paper"])
    assert [paper.rate(operation) for operation in (Softmax(), Relu())] == [3e-4, 3e-3]
    sgd = dataclasses.replace(paper, optimizer="sgd")
    assert [sgd.rate(operation) for operation in (Softmax(), Relu())] == [0.03, 0.03]
    small = BackcopySettings()
    assert small.rate(Softmax()) == small.rate(Relu())
    assert dataclasses.replace(sgd, learning_rate=1.0).rate(Relu()) == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers 0 must be at least 1"),
        ({"evaluations": 1}, "evaluations 1 must be at least 2"),
        ({"optimizer": "lion"}, "optimizer 'lion' must be adamw or sgd"),
        ({"learning_rate": 0.0}, "learning rate 0.0 must be a positive number"),
        ({"sgd_rate": math.inf}, "sgd rate inf must be a positive number"),
        ({"no_attention": (0,)}, "no layer would be left with attention"),
        ({"no_attention": (1,)}, "no layer 1 to take the attention out of: there are 1"),
        ({"no_feed_forward": (2,)}, "no layer 2 to take the feed-forward out of"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        train(Softmax(), BackcopySettings(**{"steps": 1, "width": 16, **fields}), PROBLEM, 0)


@pytest.mark.slow
def test_a_minute_of_training_grows_a_sink_and_drains_its_value():
    """The first finding of the paper in one layer, and that ReLU has neither: a minute a run."""
    from sinklab.studies.backcopy.lab import run_backcopy

    sinks, silent = run_backcopy([Softmax(), Relu()], [0]).summary["runs"]
    assert sinks["bos_weight"] > 0.9
    assert sinks["value_ratio"] < 0.3
    assert sinks["active"]
    assert sinks["dormant"]
    assert silent["bos_weight"] < 0.05
    assert silent["value_ratio"] > 0.5
