"""The effective weight of the first token against whole matrices with gates, and documents that training kept apart."""

from __future__ import annotations

import pytest
import torch
from tests.claims.by_hand import seen

from sinklab.errors import ConfigurationError
from sinklab.training.rows import TextRows
from sinklab_claims.numbers import attention
from sinklab_claims.numbers.attention import carried, effective, first_rows, sinks
from sinklab_claims.numbers.losses import window
from sinklab_claims.numbers.norms import norms, outliers

SHAPES = [
    {},
    {"operation": {"name": "sink_token"}},
    {"operation": {"name": "key_bias"}},
    {"operation": {"name": "sigmoid"}},
    {"operation": {"name": "relu", "uncounted": 1}},
    {"operation": {"name": "gated"}},
    {"operation": {"name": "gated_heads", "opening": 0.25}},
]


def gates_by_hand(attention, hidden):
    """``(rows, heads, queries)``: the mean magnitude of the gate, 1 where there is none."""
    name, state = attention.operation.name, getattr(attention, "operation_state", None)
    heads = attention.config.num_attention_heads
    if name == "gated":
        gates = [torch.sigmoid(hidden @ state.weight[head].T).mean(-1) for head in range(heads)]
    elif name == "gated_heads":
        slices = hidden.chunk(heads, dim=-1)
        gates = [torch.sigmoid(slices[head] @ state.weight[head] + state.bias[head]) for head in range(heads)]
    else:
        gates = [torch.ones(hidden.shape[:2])] * heads
    return torch.stack(gates, dim=1)


@torch.no_grad()
def by_hand(trained):
    """From whole matrices: the gate times the weight, and nothing divided by row sums."""
    model, rows, front = trained.loaded.model, first_rows(trained), trained.config.model.tokens_in_front
    inputs = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda _, args, output: inputs.append(output)) for layer in model.layers
    ]
    layers = seen(model, rows)
    for hook in hooks:
        hook.remove()
    alphas = []
    for layer, hidden, matrices in zip(model.layers, inputs, layers, strict=True):
        products = gates_by_hand(layer.self_attn, hidden).double() * matrices["weights"][..., front].double()
        alphas.append(products[..., front:].sum(-1) / (rows.shape[1]))
    return {"effective_first": torch.stack(alphas).mean().item()}


@pytest.mark.parametrize("length", [24, 40, 52, 64])
def test_rates_agree_that_a_mean_as_large_as_the_threshold_is_not_above_it(random_model, monkeypatch, length):
    trained = random_model(sharpness=0.0)  # even rows: the first token has 1 of the first one, 1/2 of the second and so on
    monkeypatch.setattr(attention, "SEQ_LEN", length)
    monkeypatch.setattr(attention, "THRESHOLD", sum(1 / seen for seen in range(1, length + 1)) / length)
    monkeypatch.setattr(attention, "CARRYING", 1)
    assert (sinks(trained)["sink_rate"], carried(trained)["carried_rate"]) == (0.0, 0.0)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.get("operation", {"name": "softmax"})["name"])
def test_effective_weights_are_those_of_the_whole_matrix(random_model, shape):
    trained = random_model(**shape)
    if shape.get("operation", {}).get("name", "").startswith("gated"):  # gates that differ, and are no halves
        with torch.no_grad():
            for layer in trained.loaded.model.layers:
                layer.self_attn.operation_state.weight.copy_(torch.randn_like(layer.self_attn.operation_state.weight))
    found = effective(trained)
    # Float32 weights of at most about 10 (relu), means of 64: 1e-5 relative.
    assert found == pytest.approx(by_hand(trained), rel=1e-4, abs=1e-5)
    assert found["effective_first"] > 0


def test_without_a_gate_it_is_the_weight_and_a_shut_gate_takes_the_sink(random_model):
    plain, softmax = random_model(), effective(random_model())
    usual = sinks(plain)
    assert softmax["effective_first"] == pytest.approx(usual["first_attention"], abs=1e-6)
    shut = random_model(operation={"name": "gated_heads", "opening": 0.01})
    assert sinks(shut)["sink_rate"] > 10  # the map points at the first token all the same
    assert carried(shut)["carried_rate"] == 0
    # Opened by a hundredth at every query: a hundredth of the weight.
    assert effective(shut)["effective_first"] == pytest.approx(0.01 * sinks(shut)["first_attention"], rel=1e-5)


def test_under_a_window_the_mean_is_over_the_queries_that_see_the_token(random_model, monkeypatch):
    """With a softmax the weight is the share, and nothing gates it: one rate under two names, where one token is asked for."""
    windowed = random_model(window=8)
    usual = sinks(windowed)["sink_rate"]
    assert carried(windowed)["carried_rate"] >= usual > 10
    monkeypatch.setattr(attention, "CARRYING", 1)
    assert carried(windowed)["carried_rate"] == usual


@pytest.mark.parametrize(
    ("read_out", "shape"),
    [
        (sinks, {}), (sinks, {"operation": {"name": "sigmoid"}}), (effective, {}), (carried, {}), (norms, {}), (outliers, {}),
        (window, {"operation": {"name": "sink_token"}}),
    ],
    ids=lambda value: getattr(value, "__name__", "-".join(value) if isinstance(value, dict) else None),
)  # fmt: skip
def test_documents_are_read_as_the_training_reads_them(random_model, monkeypatch, read_out, shape):
    trained = random_model(position={"name": "rotary"}, **shape)
    apart = trained.rows(24, 64).reshape(48, 32)
    packed = TextRows(apart.reshape(24, 64), torch.arange(32).repeat(24, 2))
    found = []
    for text in (TextRows(apart), packed, TextRows(packed.ids)):
        monkeypatch.setattr(type(trained), "text", lambda self, samples=100, seq_len=None, text=text: text)
        found.append(read_out(trained))
    # sink_rate_max is over the first half of a row, which is longer. Sums in another order, in float32.
    expected, documents = ({name: value for name, value in each.items() if name != "sink_rate_max"} for each in found[:2])
    assert documents == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert found[2] != pytest.approx(found[1], rel=1e-3, abs=1e-5)


def test_ids_alone_are_no_text_of_documents_kept_apart(trained, monkeypatch):
    rows, positions = trained.rows(24, 64), torch.arange(32).repeat(24, 2)
    monkeypatch.setattr(
        type(trained), "text", lambda self, samples=100, seq_len=None: TextRows(rows, torch.arange(64).repeat(24, 1))
    )
    assert torch.equal(first_rows(trained), rows)  # each row lies inside one document
    monkeypatch.setattr(type(trained), "text", lambda self, samples=100, seq_len=None: TextRows(rows, positions))
    with pytest.raises(ConfigurationError, match=r"kept the documents of held-out rows apart.*data\.packing=stream"):
        first_rows(trained)
