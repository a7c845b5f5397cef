"""SinkLM as a transformers model: saved, loaded, compiled, cached, and never another operation than its own."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.conftest import make_sinklm
from transformers import AutoModelForCausalLM

from sinklab.errors import ConfigurationError, UnknownNameError
from sinklab.models.language_model import SinkLM, SinkLMConfig

SIGMOID = {"name": "sigmoid", "bias": -2.5}
TOKENS = torch.randint(2, 300, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("operation", [None, SIGMOID], ids=["softmax", "sigmoid"])
def test_a_checkpoint_comes_back_with_its_operation(operation, tmp_path):
    model = make_sinklm(operation)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(again, SinkLM)
    assert again.config.operation == (operation or {"name": "softmax"})
    again.set_attn_implementation(model.config._attn_implementation)
    with torch.no_grad():
        assert torch.equal(again(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_the_operation_changes_the_model():
    with torch.no_grad():
        softmax, sigmoid = (make_sinklm(operation)(input_ids=TOKENS).logits for operation in (None, SIGMOID))
    assert not torch.allclose(softmax, sigmoid, atol=1e-4)


@pytest.mark.parametrize("operation", [None, SIGMOID], ids=["softmax", "sigmoid"])
def test_compiles_with_labels_in_one_graph(operation):
    model = make_sinklm(operation)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert compiled(input_ids=TOKENS, labels=TOKENS).loss.item() == pytest.approx(
        model(input_ids=TOKENS, labels=TOKENS).loss.item(), rel=1e-6
    )


def test_the_loss_is_the_mean_over_next_tokens(caplog):
    model = make_sinklm()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        output = model(input_ids=TOKENS, labels=TOKENS)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    assert "loss_type" not in caplog.text


def test_generation_with_and_without_cache_agree():
    model = make_sinklm(SIGMOID)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    assert torch.equal(model.generate(TOKENS, **settings), model.generate(TOKENS, use_cache=False, **settings))


def test_heads_must_be_shared_evenly():
    with pytest.raises(ConfigurationError, match="num_key_value_heads 2 must divide num_attention_heads 3"):
        SinkLMConfig(num_attention_heads=3, num_key_value_heads=2)


def test_rotary_needs_an_even_head():
    with pytest.raises(ConfigurationError, match="head_dim 7 must be even"):
        SinkLMConfig(head_dim=7)


def test_an_unknown_operation_is_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'sigmoid'"):
        SinkLM(SinkLMConfig(hidden_size=8, num_hidden_layers=1, operation={"name": "sigmiod"}))


def test_an_unknown_parameter_is_refused():
    with pytest.raises(ConfigurationError, match=r"operation 'sigmoid' has no parameter beta; its parameters: bias"):
        SinkLM(SinkLMConfig(hidden_size=8, num_hidden_layers=1, operation={"name": "sigmoid", "beta": 1.0}))


def test_ids_and_embeddings_exclude_each_other():
    with pytest.raises(ConfigurationError, match="exactly one of input_ids and inputs_embeds"):
        make_sinklm()(input_ids=TOKENS, inputs_embeds=torch.zeros(2, 12, 32))
