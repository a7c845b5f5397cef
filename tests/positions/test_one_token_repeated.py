"""One token repeated (Gu et al. 2024, section 3.2): with relative positions all hidden states agree and the sink dissolves."""

import math

import pytest
import torch
from tests.conftest import TINY

from sinklab.models.language_model import SinkLM, SinkLMConfig

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
