"""Sinks, norms, outliers, windows and made-up inputs of a model, against plain matrices and closed forms."""

from __future__ import annotations

import pytest
import torch
from tests.claims.by_hand import seen

from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab_claims.numbers.attention import FIRST_POSITIONS, first_rows, inputs, sinks
from sinklab_claims.numbers.losses import window
from sinklab_claims.numbers.norms import norms, outliers

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


def test_outliers_are_those_of_the_tensors(random_model):
    trained = random_model()
    layers = seen(trained.loaded.model, first_rows(trained))
    expected = {}
    for prefix, name in (("", "attention"), ("layer_", "layer")):
        tensors = [layer[name].flatten(1).double() for layer in layers]
        centred = [tensor - tensor.mean(1, keepdim=True) for tensor in tensors]
        kurtosis = [((c**4).mean(1) / (c**2).mean(1) ** 2).mean().item() for c in centred]
        expected[f"{prefix}kurtosis"] = sum(kurtosis) / len(kurtosis)
        expected[f"{prefix}max_inf_norm"] = max(tensor.abs().amax(1).mean().item() for tensor in tensors)
    assert outliers(trained) == pytest.approx(expected, rel=1e-5)


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
