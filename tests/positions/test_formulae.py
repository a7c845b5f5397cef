"""Positions against their formulae, alone and of one token repeated."""

import math

import pytest
import torch
from tests.conftest import TINY
from transformers.models.t5.modeling_t5 import T5Attention

from sinklab.errors import ConfigurationError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.positions._buckets import bucket_numbers
from sinklab.registry import positions

INDEX = torch.arange(4)[None]


def scheme(name: str, architecture: Architecture | None = None, **settings):
    built = positions[name](architecture or Architecture(hidden_size=32, num_attention_heads=8), settings)
    torch.manual_seed(0)
    built.reset_parameters()
    return built


def test_alibi_slopes_of_eight_heads():
    bias = scheme("alibi").score_bias(INDEX, INDEX)
    assert bias.shape == (1, 8, 4, 4)
    assert bias[0, :, 3, 2].tolist() == [-(2.0**-h) for h in range(1, 9)]
    assert bias[0, 0].tolist() == [[0, 0, 0, 0], [-0.5, 0, 0, 0], [-1, -0.5, 0, 0], [-1.5, -1, -0.5, 0]]


def test_buckets_are_those_of_t5():
    distance = torch.arange(300)
    for number, largest in ((32, 128), (8, 20), (2, 2)):
        theirs = T5Attention._relative_position_bucket(-distance, False, number, largest)
        assert torch.equal(bucket_numbers(distance, number, largest), theirs)
    assert bucket_numbers(torch.tensor([0, 1, 15, 16, 127, 128, 10_000]), 32, 128).tolist() == [0, 1, 15, 16, 31, 31, 31]


def test_bucket_index_adds_the_number_itself():
    far = torch.tensor([[200]])
    assert scheme("bucket_index").score_bias(far, torch.tensor([[200, 199, 190, 50, 0]]))[0, 3, 0].tolist() == [
        0,
        1,
        10,
        31,
        31,
    ]


def test_relative_looks_the_number_up_for_each_head():
    built = scheme("relative")
    bias = built.score_bias(torch.tensor([[5]]), torch.tensor([[5, 3, 0]]))
    assert torch.equal(bias[0, :, 0], built.table[[0, 2, 5]].T)


def test_sinusoid_is_all_sines_then_all_cosines():
    built = scheme("sinusoid", Architecture(hidden_size=4, num_attention_heads=1))
    added = built.embed(torch.zeros(1, 1, 4), torch.tensor([[3]]))
    expected = torch.tensor([[[math.sin(3), math.sin(0.03), math.cos(3), math.cos(0.03)]]])
    torch.testing.assert_close(added, expected)


def test_rotary_turns_halves_and_scores_see_differences():
    built = scheme("rotary", Architecture(hidden_size=4, num_attention_heads=1))
    unit = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64).expand(1, 1, 4, 4)
    rotated, _ = built.rotate(unit, unit, built.rotation(INDEX, torch.float64))
    expected = [[math.cos(p), 0.0, math.sin(p), 0.0] for p in range(4)]
    torch.testing.assert_close(rotated[0, 0], torch.tensor(expected, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(1, 2, 4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = [
        (lambda q, k: q @ k.mT)(*built.rotate(queries, keys, built.rotation(INDEX + shift, torch.float64)))
        for shift in (0, 1000)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-11)


def test_learned_refuses_positions_beyond_its_table():
    model = SinkLM(SinkLMConfig(**TINY | {"max_position_embeddings": 8}, position={"name": "learned"}))
    model(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match="table of 8 positions and was asked for position 8; give shorter"):
        model(input_ids=torch.zeros(1, 9, dtype=torch.int64))


def test_keys_ahead_are_at_distance_zero():
    for name in ("alibi", "relative", "bucket_index"):
        bias = scheme(name).score_bias(INDEX, INDEX)
        assert torch.equal(bias[..., 0, 3], bias[..., 0, 0])


LENGTH = 40
REPEATED = torch.full((1, LENGTH), 7)


@torch.no_grad()
def run(name: str) -> tuple[SinkLM, list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = SinkLM(SinkLMConfig(**TINY, initializer_range=0.3, position={"name": name})).double().eval()
    output = model(input_ids=REPEATED, output_attentions=True, output_hidden_states=True)
    return model, output.attentions, output.hidden_states


@pytest.mark.parametrize("name", ["no_position", "relative", "bucket_index", "alibi", "rotary"])
def test_all_hidden_states_agree(name):
    for states in run(name)[2]:
        torch.testing.assert_close(states, states[:, :1].expand_as(states), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sinusoid", "learned"])
def test_absolute_positions_tell_them_apart(name):
    states = run(name)[2][0]
    assert float((states - states[:, :1]).abs().max()) > 1e-3


def test_without_positions_weights_are_even():
    rows = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    for weights in run("no_position")[1]:
        torch.testing.assert_close(weights[0, 0, :, 0], 1 / rows, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["relative", "bucket_index", "alibi"])
def test_weights_follow_the_bias_alone(name):
    model, attentions, _ = run(name)
    index = torch.arange(LENGTH)[None]
    bias = model.position.score_bias(index, index).double()
    expected = bias.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -math.inf).softmax(dim=-1)
    for weights in attentions:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def test_rotary_weights_are_bounded():
    model, attentions, states = run("rotary")
    rows = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    for layer, weights, entering in zip(model.layers, attentions, states, strict=False):
        normed = layer.input_layernorm(entering[0, :1]).detach()
        queries, keys = (
            linear(normed).view(-1, 8).norm(dim=1).detach() for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
        for head in range(4):
            xi = float(queries[head] * keys[head // 2]) * layer.self_attn.scaling
            bound = math.exp(2 * xi) / (math.exp(2 * xi) + rows - 1)
            assert (weights[0, head] <= bound[:, None] + 1e-12).all()
