"""Sink logit: hand-computed rows, gpt-oss's own attention, and one number for each head."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from sinklab.attention.operation import HeadShape
from sinklab.errors import ConfigurationError
from sinklab.operations.sink_logit import SinkLogit
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.registry import operations
from sinklab.testing import check_operation

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, hidden_size=16)


def test_contract():
    check_operation(SinkLogit(initial=-3.0))


def test_three_tokens_by_hand():
    scores = torch.log(torch.tensor([[1.0, 1.0, 1.0], [3.0, 1.0, 1.0], [2.0, 1.0, 5.0]]))[None, None].expand(1, 2, 3, 3)
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    state = {"sink_logit": torch.tensor([math.log(4.0), math.log(2.0)])}
    null = SinkLogit().null_scores(torch.zeros(1, 2, 3, 8), 0.5, state)
    weights, mass = SinkLogit().weights(scores, lower, null)[0], SinkLogit().null_mass(scores, lower, null)[0]
    # The first head adds 4 to the sums 1, 4 and 8, the second one 2.
    torch.testing.assert_close(weights[0, 1], torch.tensor([3 / 8, 1 / 8, 0.0]), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights[1, 2], torch.tensor([0.2, 0.1, 0.5]), rtol=0, atol=1e-6)
    torch.testing.assert_close(mass, torch.tensor([[4 / 5, 4 / 8, 4 / 12], [2 / 3, 2 / 6, 2 / 10]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 20.0, -20.0])
def test_it_is_the_attention_of_gpt_oss(shift):
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    sinks = [(torch.randn(4) + shift).requires_grad_()]
    sinks.append(sinks[0].detach().clone().requires_grad_())
    module = SimpleNamespace(sinks=sinks[0], num_key_value_groups=2, training=False)
    additive = torch.zeros(5, 5).masked_fill(~lower, torch.finfo(torch.float32).min)[None, None]
    theirs, _ = eager_attention_forward(module, queries, keys, values, additive, scaling=0.5)
    ours, _ = SinkLogit().head_outputs(queries, keys, values, lower, 0.5, {"sink_logit": sinks[1]})
    # A few roundings of 6e-8 in weights and sums below 1, on values up to 4.
    torch.testing.assert_close(ours.transpose(1, 2), theirs, rtol=0, atol=2e-6)
    gradients = [torch.autograd.grad((outputs**2).sum(), sink)[0] for outputs, sink in zip((theirs, ours), sinks, strict=True)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


def test_initial_value():
    assert SinkLogit(initial=1.5).parameters(SHAPE)["sink_logit"].tolist() == [1.5] * 4
    queries, keys, values = torch.randn(3, 1, 4, 5, 8)
    ours, _ = SinkLogit().head_outputs(queries, keys, values, None, 0.5, SinkLogit().parameters(SHAPE))
    assert torch.equal(ours, SoftmaxPlusOne().head_outputs(queries, keys, values, None, 0.5)[0])


@pytest.mark.parametrize("initial", [math.inf, math.nan])
def test_an_initial_value_that_cannot_take_effect(initial):
    with pytest.raises(ConfigurationError, match=r"operation 'sink_logit': initial = (inf|nan) must be a finite score"):
        SinkLogit(initial=initial)


def test_round_trip():
    assert operations.make(SinkLogit(initial=-1.0).to_dict()) == SinkLogit(initial=-1.0)
