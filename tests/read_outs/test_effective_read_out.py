"""The effective weight of the first token against whole matrices with gates, and the changes of text for robustness."""

from __future__ import annotations

import pytest
import torch
from tests.read_outs.by_hand import seen

from sinklab.errors import ConfigurationError
from sinklab.training.rows import TextRows, token_losses
from sinklab_claims.numbers import attention, losses
from sinklab_claims.numbers.attention import carried, effective, first_rows, sinks
from sinklab_claims.numbers.losses import NOISE, STRETCH, in_other_language, robustness, window, with_false_sink, with_noise
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
    """Both numbers from whole matrices: the gate times the weight, and nothing divided by row sums."""
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
    alpha = torch.stack(alphas)
    return {"effective_sink_rate": 100 * (alpha > 0.3).double().mean().item(), "effective_first": alpha.mean().item()}


@pytest.mark.parametrize("length", [24, 40, 52, 64])
def test_rates_agree_that_a_mean_as_large_as_the_threshold_is_not_above_it(random_model, monkeypatch, length):
    trained = random_model(sharpness=0.0)  # even rows: the first token has 1 of the first one, 1/2 of the second and so on
    monkeypatch.setattr(attention, "SEQ_LEN", length)
    monkeypatch.setattr(attention, "THRESHOLD", sum(1 / seen for seen in range(1, length + 1)) / length)
    found = effective(trained) | sinks(trained)
    names = ("sink_rate", "sink_rate_of_mass", "effective_sink_rate")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.get("operation", {"name": "softmax"})["name"])
def test_effective_weights_are_those_of_the_whole_matrix(random_model, shape):
    trained = random_model(**shape)
    if shape.get("operation", {}).get("name", "").startswith("gated"):  # gates that differ, and are no halves
        with torch.no_grad():
            for layer in trained.loaded.model.layers:
                layer.self_attn.operation_state.weight.copy_(torch.randn_like(layer.self_attn.operation_state.weight))
    found = effective(trained)
    # Float32 weights of at most about 10 (relu), means of 64: 1e-5 relative; rates are counts, and none lies on the threshold.
    assert found == pytest.approx(by_hand(trained), rel=1e-4, abs=1e-5)
    assert found["effective_first"] > 0


def test_without_a_gate_it_is_the_weight_and_a_shut_gate_takes_the_sink(random_model):
    plain, softmax = random_model(), effective(random_model())
    usual = sinks(plain)
    assert softmax["effective_sink_rate"] == usual["sink_rate"] > 10
    assert softmax["effective_first"] == pytest.approx(usual["first_attention"], abs=1e-6)
    shut = random_model(operation={"name": "gated_heads", "opening": 0.01})
    assert sinks(shut)["sink_rate"] > 10  # the map points at the first token all the same
    assert effective(shut)["effective_sink_rate"] == 0
    # Opened by a hundredth at every query: a hundredth of the weight.
    assert effective(shut)["effective_first"] == pytest.approx(0.01 * sinks(shut)["first_attention"], rel=1e-5)


def test_under_a_window_the_mean_is_over_the_queries_that_see_the_token(random_model):
    """With a softmax the weight is the share, and nothing gates it: one number under three names, and one of more tokens."""
    windowed = random_model(window=8)
    usual = sinks(windowed)
    assert usual["sink_rate_of_mass"] == usual["sink_rate"] > 10
    assert effective(windowed)["effective_sink_rate"] == usual["sink_rate"]
    assert carried(windowed)["carried_rate"] >= usual["sink_rate"]


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


def test_changes_of_a_text_keep_to_its_documents(trained, monkeypatch):
    rows = trained.rows(24, 64)
    positions = torch.cat((torch.arange(10), torch.arange(54))).repeat(24, 1)
    _, replaced = with_noise(trained, rows, positions)
    assert not replaced[:, [0, 10]].any()
    assert torch.equal(with_false_sink(rows, positions)[:, 16 : 16 + STRETCH], rows[:, 10:11].expand(-1, STRETCH))
    for short in (positions, torch.arange(16).repeat(24, 4)):
        text = TextRows(rows, short)
        monkeypatch.setattr(type(trained), "text", lambda self, samples=100, seq_len=None, text=text: text)
        # Where no document reaches from a quarter of the row into its second half, none is misled.
        assert set(robustness(trained)) == {"noise_gap", "other_language_gap"} | (
            {"false_sink_gap"} if short is positions else set()
        )


def test_noise_leaves_the_first_token_and_replaces_its_share(trained):
    rows = trained.rows(24, 64)
    noisy, replaced = with_noise(trained, rows)
    assert not replaced[:, 0].any()
    assert torch.equal(noisy[~replaced], rows[~replaced])
    assert set(noisy[replaced].tolist()) <= set(trained.text_ids.tolist())
    # 24 rows of 63 tokens, each with chance 0.1: a standard deviation of 0.0077.
    assert replaced[:, 1:].double().mean().item() == pytest.approx(NOISE, abs=4 * 0.0077)
    assert torch.equal(with_noise(trained, rows)[0], noisy)


def test_another_language_has_the_same_triggers_and_copies(trained):
    rows = trained.rows(24, 64)
    other = in_other_language(trained, rows)
    letters = torch.tensor([chr(token).isalpha() for token in range(256)] + [False, False])[_bytes_of(trained, rows)]
    assert torch.equal(other[~letters], rows[~letters])
    assert not (other[letters] == rows[letters]).any()
    assert len(torch.stack((rows[letters], other[letters])).unique(dim=1).T) == len(rows[letters].unique())  # one to one
    # What makes the language one of copies stays: equal tokens stay equal.
    assert torch.equal(rows[:, 1:] == rows[:, :-1], other[:, 1:] == other[:, :-1])


@pytest.mark.parametrize("letters", [0, 1, 2])
def test_there_is_no_other_language_without_two_tokens_of_letters(random_model, monkeypatch, letters):
    """Digits alone have none, and of one token of letters the exchange would be the text as it is, at no loss."""
    trained = random_model()
    tokenizer = trained.data.tokenizer
    known = [token for token in trained.text_ids.tolist() if tokenizer.decode([token]).isalpha()][:letters]
    digits = [token for token in range(258) if tokenizer.decode([token]).isdigit()]
    monkeypatch.setattr(type(trained), "text_ids", torch.tensor([*digits, *known]))
    rows = trained.rows(24, 64)
    assert (in_other_language(trained, rows) is None) == (letters < 2)
    assert set(robustness(trained)) == {"noise_gap", "false_sink_gap"} | ({"other_language_gap"} if letters == 2 else set())


def _bytes_of(trained, rows):
    """Code points of the tokens, which are single bytes; special ones above them."""
    tokenizer = trained.data.tokenizer
    table = [ord(text) if len(text := tokenizer.decode([token])) == 1 else 256 for token in range(258)]
    return torch.tensor(table).clamp(max=256)[rows]


def test_a_false_sink_is_the_first_token_again(trained):
    rows = trained.rows(24, 64)
    changed = with_false_sink(rows)
    assert (changed[:, 16 : 16 + STRETCH] == trained.data.tokenizer.bos_token_id).all()
    assert torch.equal(changed[:, :16], rows[:, :16])
    assert torch.equal(changed[:, 16 + STRETCH :], rows[:, 16 + STRETCH :])


def test_gaps_are_those_of_the_changed_rows(random_model, monkeypatch):
    trained = random_model()
    rows = trained.rows(1000, 64)
    model = trained.loaded.model
    noisy, replaced = with_noise(trained, rows)
    found = robustness(trained)
    with torch.no_grad():
        plain, under = (token_losses(model, part).double() for part in (rows, noisy))
        false = token_losses(model, with_false_sink(rows)).double()
    kept = [(at, place) for at, row in enumerate(replaced.tolist()) for place, gone in enumerate(row) if place and not gone]
    by_hand = sum((under[at, place - 1] - plain[at, place - 1]).item() for at, place in kept) / len(kept)
    # Losses of about 6 nats in float32, means of hundreds.
    assert found["noise_gap"] == pytest.approx(by_hand, abs=1e-5)
    assert found["false_sink_gap"] == pytest.approx((false - plain)[:, 32:].mean().item(), abs=1e-5)
    assert abs(found["noise_gap"]) > 1e-3
    monkeypatch.setattr(losses, "in_other_language", lambda trained, rows: rows)
    assert robustness(trained)["other_language_gap"] == 0.0
