"""Sink token: the embedding in front that the model learns, and what it is without the model's help."""

from __future__ import annotations

import pytest
import torch
import transformers

from sinklab.attention.seam import register_operation
from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.operations.sink_token import SinkToken
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.testing import check_operation

SHAPE = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_contract():
    check_operation(SinkToken(count=2))


def test_weights_are_those_of_softmax_and_nothing_is_spent_on_nothing():
    scores = torch.randn(1, 2, 3, 3)
    assert torch.equal(SinkToken().weights(scores, None), Softmax().weights(scores, None))
    assert SinkToken().null_mass(scores, None) is None


def test_a_sink_lm_computes_as_if_the_tokens_were_in_the_sequence():
    torch.manual_seed(0)
    with_tokens = SinkLM(SinkLMConfig(**SHAPE, operation={"name": "sink_token", "count": 2})).double().eval()
    plain = SinkLM(SinkLMConfig(**SHAPE)).double().eval()
    plain.load_state_dict({name: value for name, value in with_tokens.state_dict().items() if "front_tokens" not in name})
    ids = torch.randint(0, 20, (3, 7))
    with torch.no_grad():
        front = with_tokens.front_tokens.weight.expand(3, -1, -1)
        expected = plain(inputs_embeds=torch.cat((front, plain.embed_tokens(ids)), dim=1)).logits[:, 2:]
        torch.testing.assert_close(with_tokens(input_ids=ids).logits, expected, rtol=0, atol=1e-12)


def test_another_model_is_not_silently_a_softmax_model():
    config = transformers.LlamaConfig(**SHAPE, attn_implementation=register_operation(SinkToken()))
    with pytest.raises(
        ConfigurationError, match="operation 'sink_token' has learned parameters, which LlamaAttention does not"
    ):
        transformers.LlamaForCausalLM(config)(torch.zeros(1, 3, dtype=torch.int64))


def test_no_token_is_softmax():
    with pytest.raises(
        ConfigurationError, match="operation 'sink_token': count = 0 must be at least 1; without one, use softmax"
    ):
        SinkToken(count=0)


def test_round_trip():
    assert SinkToken(count=3).tokens_in_front == 3
    assert operations.make({"name": "sink_token", "count": 3}) == SinkToken(count=3)
