"""Read-outs of trained models against whole matrices by hand: attention, effective weights, norms, losses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tests.claims.by_hand import seen

from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import read_outs
from sinklab.results.metric import metrics_of
from sinklab.results.table import make_table
from sinklab_claims.numbers import attention
from sinklab_claims.numbers.attention import FIRST_POSITIONS, carried, effective, first_rows, inputs, sinks
from sinklab_claims.numbers.losses import curve_of, training, window
from sinklab_claims.numbers.norms import norms

SHAPES = [
    {},
    {"operation": {"name": "key_bias"}},
    {"operation": {"name": "sink_logit", "initial": 2.0}},
    {"operation": {"name": "sink_token"}},
    {"operation": {"name": "sink_token", "count": 2}},
    {"operation": {"name": "sigmoid"}},
]
OF = {"ids": lambda shape: "-".join(map(str, shape.get("operation", {"name": "softmax"}).values()))}


def by_hand(trained) -> dict[str, float]:
    """The numbers of ``sinks`` from whole matrices, in float64."""
    front = trained.config.model.tokens_in_front
    layers = seen(trained.loaded.model, first_rows(trained))
    weights = torch.stack([layer["weights"] for layer in layers]).double()  # layers, rows, heads, queries, keys
    nothing = torch.stack([layer["nothing"] for layer in layers]).double()
    shares = weights / (weights.sum(-1, keepdim=True) + 1e-8)
    if trained.config.model.operation["name"] != "sigmoid":
        shares = weights  # with their mass on nothing they sum to one
    total = weights.shape[-1]
    alphas = shares.sum(-2) / torch.arange(total, 0, -1)
    rates = [100 * (alphas[..., key] > 0.3).double().mean().item() for key in range(total)]
    star = max(rates[:front], default=100 * (nothing.mean(-1) > 0.3).double().mean().item())
    found = {f"sink_rate_{at}" if at else "sink_rate": rates[front + at] for at in range(FIRST_POSITIONS)}
    return found | {
        "sink_rate_max": max(rates[front : front + (total - front) // 2]),
        "sink_rate_star": star,
        "first_attention": shares[..., front:, front].mean().item(),
    }


@pytest.mark.parametrize("shape", SHAPES, **OF)
def test_sinks_are_those_of_the_whole_matrix(random_model, shape):
    trained = random_model(**shape)
    # Weights in float32, summed over at most 66 keys; rates are counts, and none lies on the threshold.
    assert sinks(trained) == pytest.approx(by_hand(trained), abs=1e-4)


def test_those_models_differ_in_what_is_asked(random_model):
    # The comparison above would say little if all rates were 0.
    found = [sinks(random_model(**shape)) for shape in SHAPES]
    assert all(found[place]["sink_rate"] > 10 for place in (0, 1, 2, 5))
    assert all(numbers["sink_rate_star"] > 0 for numbers in found[1:5])
    assert found[0]["sink_rate_star"] == found[5]["sink_rate_star"] == 0


@pytest.mark.parametrize("shape", [{}, {"operation": {"name": "sink_token"}}], **OF)
def test_norms_are_those_of_the_tensors(random_model, shape):
    trained = random_model(**shape)
    front = trained.config.model.tokens_in_front
    layers = seen(trained.loaded.model, first_rows(trained))
    found = norms(trained)

    def ratios(name: str) -> list[float]:
        """By query head; grouped ones share theirs."""
        return [
            (sizes[:, front].mean() / sizes[:, front + 1 :].mean()).item()
            for layer in layers
            for sizes in layer[name].norm(dim=-1).unbind(1)
        ]

    hidden = [layer["layer"].norm(dim=-1) for layer in layers]
    magnitudes = [layer["layer"].abs().flatten(1) for layer in layers]
    first = [w.mean().item() for layer in layers for w in layer["weights"][:, :, front:, front].unbind(1)]
    sink_heads = [head for head, weight in enumerate(first) if weight > 0.3]
    assert len(sink_heads) < len(first)
    assert bool(sink_heads) == (front == 0)
    expected = {
        "hidden_ratio": max((sizes[:, front].mean() / sizes[:, front + 1 :].mean()).item() for sizes in hidden),
        "massive_ratio": max((sizes.amax(1) / sizes.median(1).values).mean().item() for sizes in magnitudes),
    }
    for name in ("key", "value"):
        of_heads = ratios(f"{name}s")
        expected[f"{name}_ratio"] = sum(of_heads) / len(of_heads)
        if sink_heads:
            expected[f"{name}_ratio_sink"] = sum(of_heads[head] for head in sink_heads) / len(sink_heads)
    cosines: list[list[float]] = [[], []]
    for layer in layers:
        unit_queries, unit_keys = (layer[name] / layer[name].norm(dim=-1, keepdim=True) for name in ("queries", "keys"))
        all_pairs = unit_queries @ unit_keys.transpose(2, 3)
        visible = torch.ones(all_pairs.shape[-2:], dtype=torch.bool).tril()
        for of_head in all_pairs.unbind(1):
            cosines[0].append(of_head[:, visible[:, front], front].mean().item())
            others = visible.clone()
            others[:, : front + 1] = False
            cosines[1].append(of_head[:, others].mean().item())
    if sink_heads:
        for name, values in zip(("cosine_first", "cosine_other"), cosines, strict=True):
            expected[name] = sum(values[head] for head in sink_heads) / len(sink_heads)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("shape", [{}, {"operation": {"name": "sink_token"}}], **OF)
def test_windowed_losses_are_those_under_masks_by_hand(random_model, shape):
    trained = random_model(**shape)
    front, model = trained.config.model.tokens_in_front, trained.loaded.model
    rows = trained.rows(1000, 64)

    @torch.no_grad()
    def loss(mask) -> float:
        # The caller's mask knows nothing of tokens in front, so the layers get theirs by a model without such tokens.
        embedded = model.embed_tokens(rows)
        if front:
            embedded = torch.cat((model.front_tokens.weight.expand(len(rows), -1, -1), embedded), dim=1)
        logits = plain(inputs_embeds=embedded, attention_mask=mask[None, None].expand(len(rows), 1, -1, -1)).logits
        logits = logits[:, front + 16 : -1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits.double(), rows[:, 17:].flatten()).item()

    fields = {**trained.config.model.model_dump(), "operation": {"name": "softmax"}, "max_position_embeddings": 66}
    plain = SinkLM(SinkLMConfig(**{**fields, "vocab_size": 258})).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    steps = torch.arange(64 + front)
    causal = steps[:, None] >= steps
    near = causal & (steps[:, None] - steps < 16)
    dense, alone = loss(causal), loss(near)
    with_sinks = loss(near | (causal & (steps < front + 4)))
    found = window(trained)
    # Losses of about 5.5 nats in float32.
    assert found["window_gap"] == pytest.approx(alone - dense, abs=2e-5)
    assert found["window_sink_gap"] == pytest.approx(with_sinks - dense, abs=2e-5)
    assert found["sink_worth"] == pytest.approx(found["window_gap"] - found["window_sink_gap"], abs=1e-12)
    assert abs(found["sink_worth"]) > 1e-3


def test_one_token_repeated_without_positions_gives_uniform_rows(random_model):
    found = inputs(random_model())
    # All keys are equal, so query t gives the first of its t tokens 1/t (Gu et al. 2024, proposition 1).
    harmonic = sum(1 / t for t in range(1, 65)) / 64
    assert found["first_attention_repeated_no_bos"] == pytest.approx(harmonic, abs=1e-6)
    assert found["sink_rate_repeated_no_bos"] == 0
    assert found["first_attention_repeated"] != pytest.approx(harmonic, abs=1e-3)  # BOS is another token


def test_made_up_rows(trained, monkeypatch):
    shown = []

    def remember(model, rows, front):
        shown.append(rows.clone())
        return {"sink_rate": float(len(shown)), "first_attention": 0.0}

    monkeypatch.setattr("sinklab_claims.numbers.attention.attention_numbers", remember)
    found = inputs(trained)
    random_no_bos, random, repeated_no_bos, repeated = shown
    bos = trained.data.tokenizer.bos_token_id
    assert (random[:, 0] == bos).all()
    assert (repeated[:, 0] == bos).all()
    assert torch.equal(random[:, 1:], random_no_bos[:, 1:])
    assert (repeated_no_bos == repeated_no_bos[:, :1]).all()
    text = set(trained.data.held_out.unique().tolist()) - set(trained.data.tokenizer.all_special_ids)
    assert set(random_no_bos.unique().tolist()) == text  # 6,400 draws of some 27
    assert set(repeated_no_bos.unique().tolist()) <= text
    assert [found[f"sink_rate_{name}"] for name in ("random_no_bos", "random", "repeated_no_bos", "repeated")] == [1, 2, 3, 4]


GATED_SHAPES = [
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
def effective_by_hand(trained):
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


@pytest.mark.parametrize("shape", GATED_SHAPES, ids=lambda shape: shape.get("operation", {"name": "softmax"})["name"])
def test_effective_weights_are_those_of_the_whole_matrix(random_model, shape):
    trained = random_model(**shape)
    if shape.get("operation", {}).get("name", "").startswith("gated"):  # gates that differ, and are no halves
        with torch.no_grad():
            for layer in trained.loaded.model.layers:
                layer.self_attn.operation_state.weight.copy_(torch.randn_like(layer.self_attn.operation_state.weight))
    found = effective(trained)
    # Float32 weights of at most about 10 (relu), means of 64: 1e-5 relative.
    assert found == pytest.approx(effective_by_hand(trained), rel=1e-4, abs=1e-5)
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


def read(rates, warmup: int, front: int = 0) -> dict[str, float]:
    """From ``(step, value)`` pairs, with rows of heads and of other positions that must not be taken."""
    rows = [{"step": step, "metric": "gu2024", "value": value, "key_position": front} for step, value in rates]
    rows += [{**row, "value": 99.0, "key_position": front + 1} for row in rows]
    rows += [{**row, "value": 88.0, "layer": 0, "head": 0} for row in rows]
    rows.append({"step": 0, "metric": "entropy", "value": 3.0})
    table = make_table(({**row, "unit": "x"} for row in rows), probe="by hand", version=1)
    config = SimpleNamespace(schedule=SimpleNamespace(warmup_steps=warmup), model=SimpleNamespace(tokens_in_front=front))
    return training(SimpleNamespace(table=table, config=config))


def test_the_course_of_the_rate():
    rates = [(0, 1.0), (20, 2.0), (40, 9.0), (60, 12.0), (80, 8.0), (100, 16.0)]
    # Of step 20, the first behind step 10.
    assert read(rates, 10) == {"sink_rate_start": 1.0, "sink_rate_warm": 2.0, "sink_rate_end": 16.0}
    assert read(rates, 10, front=2) == read(rates, 10)  # tokens in front are not the first


def test_what_an_early_end_has_not_reached_is_absent():
    assert read([(0, 0.0), (30, 4.0)], 50) == {"sink_rate_start": 0.0, "sink_rate_end": 4.0}
    assert read([], 0) == {}


def test_a_curve_is_in_order_and_what_is_no_number_is_none():
    rows = [{"step": step, "metric": "train_loss", "value": value} for step, value in ((20, 6.0), (10, 9.0), (30, math.nan))]
    table = make_table(({**row, "unit": "nats"} for row in rows), probe="by hand", version=1)
    found = curve_of(table, "train_loss")
    assert list(found) == [10, 20, 30]
    assert math.isnan(found[30])


def test_of_a_real_run(trained):
    assert training.of_diverged  # the table says most about runs that broke
    found, table = training(trained), trained.table
    last = table[(table["metric"] == "gu2024") & table["layer"].isna() & (table["key_position"] == 0) & (table["step"] == 12)]
    assert found["sink_rate_end"] == last["value"].item()
    assert set(found) == {"sink_rate_start", "sink_rate_warm", "sink_rate_end"}


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
