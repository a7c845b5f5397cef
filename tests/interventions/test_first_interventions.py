"""Interventions on heads: neutral ones keep every bit, and each equals what its definition says, computed densely."""

from __future__ import annotations

import pytest
import torch
from edited_runs import ROUNDING, Scaled, Spy, first_call, head_outputs, logits
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import attend
from sinklab.attention.intervention import NEAR
from sinklab.errors import ConfigurationError, SessionError, UnsupportedModelError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.redirect import Redirect
from sinklab.interventions.zero_head import ZeroHead
from sinklab.interventions.zero_value import ZeroValue
from sinklab.testing import tiny_models


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_the_first_head_puts_out_under_each(name, tokens):
    model = tiny_models()[name]
    call = first_call(model, input_ids=tokens)
    scores = call.queries[:, 1] @ call.keys[:, 1 // call.groups].mT * call.scaling
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    values = call.values[:, 1 // call.groups]
    clean = weights @ values
    hidden, near, silent = weights.clone(), weights.clone(), weights.clone()
    hidden[:, 1:, 0], near[:, 3:, 0], silent[:, 1:, 0] = 0.0, 0.0, 0.0
    expected = {
        "hidden": (HideKey(heads={0: (1,)}), hidden / hidden.sum(-1, keepdim=True) @ values),
        "hidden but near": (HideKey(heads={0: (1,)}, spare=3), near / near.sum(-1, keepdim=True) @ values),
        "value zeroed": (ZeroValue(heads={0: (1,)}), silent @ values),
        "redirected": (Redirect(heads={0: (1,)}), values[:, :1].expand_as(clean)),
        "zeroed": (ZeroHead(heads={0: (1,)}), torch.zeros_like(clean)),
    }
    for what, (intervention, outputs) in expected.items():
        found = head_outputs(model, tokens, intervention)[0][:, :, 1]
        assert torch.allclose(found, outputs, rtol=0, atol=ROUNDING), what


def test_interventions_compose_in_the_order_of_their_stages(tokens):
    model = tiny_models()["llama"]
    together = logits(model, tokens, HideKey(heads={0: (1,)}), ZeroHead(heads={0: (2,)}))
    other_order = logits(model, tokens, ZeroHead(heads={0: (2,)}), HideKey(heads={0: (1,)}))
    assert torch.equal(together, other_order)
    alone = logits(model, tokens, ZeroHead(heads={0: (1,)}))
    both = logits(model, tokens, ZeroHead(heads={0: (1,)}), HideKey(heads={0: (1,)}))
    assert (alone - both).abs().max() < ROUNDING  # a head that is zeroed is zero, whatever it sees


def test_a_head_that_is_named_twice_is_edited_once(tokens):
    model, name = tiny_models()["llama"], "model.layers.0.self_attn"
    once = logits(model, tokens, Scaled(heads={0: (1, 2)}, factor=0.5))
    assert torch.equal(logits(model, tokens, Scaled(heads={0: (1, 1, 2)}, factor=0.5)), once)
    assert torch.equal(logits(model, tokens, Scaled(heads={0: (1,), name: (2, 1)}, factor=0.5)), once)


def test_probes_see_the_edited_call(tokens):
    model, clean, edited = tiny_models()["llama"], Spy(), Spy()
    logits(model, tokens, probes=[clean])
    logits(model, tokens, HideKey(heads={0: (1, 2)}), ZeroValue(heads={0: (2,)}), probes=[edited])
    before, after = clean.calls[0].weights(0, 9), edited.calls[0].weights(0, 9)
    assert torch.equal(after[:, [0, 3]], before[:, [0, 3]])
    assert (after[:, [1, 2], 1:, 0] == 0).all()
    # What the probe is shown accounts for what the model goes on with.
    outputs = edited.calls[0].outputs(0, 9).transpose(1, 2)
    assert (outputs - edited.calls[0].head_outputs).abs().max() < ROUNDING
    assert torch.equal(edited.calls[0].values, clean.calls[0].values)  # of a value of 0 the weights are shown as they are


def test_weights_that_are_returned_are_the_edited_ones(tokens):
    model = tiny_models()["llama"]
    model.set_attn_implementation("eager")
    with torch.no_grad(), attend(model, interventions=[HideKey(heads={0: (1,)})]):
        weights = model(input_ids=tokens, output_attentions=True).attentions[0]
    assert (weights[:, 1, 1:, 0] == 0).all()
    assert (weights[:, 0, 1:, 0] > 0).all()
    assert (weights.sum(-1) - 1).abs().max() < 1e-6  # this backend takes its softmax in float32


def test_errors(tokens):
    model = tiny_models()["llama"]
    for edit, message in (
        (ZeroHead(heads={2: (0,)}), "module 2 did not run, so nothing of it was edited"),
        (ZeroHead(heads={"decoder": (0,)}), "module 'decoder' did not run, so nothing of it was edited; these did: "),
        (ZeroHead(heads={0: (4,)}), "has no head 4; expected 0 to 3"),
        ("zero_head", r"holds a name; make one of it with sinklab.registry.interventions.make\('zero_head'\)"),
        (HideKey(place=torch.zeros(3, 1, dtype=torch.int64)), "positions are given for 3 samples, and the batch has 2"),
        (HideKey(place=9), "no text has the position 9, so nothing was edited; the longest had 9 tokens"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            logits(model, tokens, edit)
    for place in (-1, (0, -2), "sink", 1.5, (0.0, 1.0), True, torch.tensor([1.0])):
        with pytest.raises(ConfigurationError, match="is no position; they count from 0, from the first token"):
            logits(model, tokens, HideKey(place=place))
    for heads in ([(0, 0)], {0: 1}, {0: "1"}, 5):
        with pytest.raises(ConfigurationError, match=r"must be lists of heads by module, such as \{5: \(0, 1\)"):
            logits(model, tokens, ZeroHead(heads=heads))
    for wrong in ({"spare": -1}, {"spare": 1, "place": "null"}):
        with pytest.raises(ConfigurationError, match=f"hide_key: spare {wrong['spare']} must be 0 or more"):
            HideKey(**wrong)
    one_of_two = torch.tensor([[0, 3], [2, -1]])  # the second sample has only one
    assert torch.isfinite(logits(model, tokens, HideKey(place=one_of_two))).all()
    for intervention in (HideKey, Redirect, ZeroValue):
        with pytest.raises(UnsupportedModelError, match="no null"):
            logits(model, tokens, intervention(place="null"))
    with (
        pytest.raises(SessionError, match=r"no gradient; run the model under torch\.no_grad"),
        attend(model, interventions=[ZeroHead()]),
    ):
        model(input_ids=tokens)


def role_sink():
    """A rotary model whose sink is a role: the token that sees itself alone stands out, and block 1 rests on it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, head_dim=16, vocab_size=8,
        rope_theta=1e8, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    sign, constant, mean, mark = range(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.zero_()
        model.model.embed_tokens.weight[:, constant] = 4.0
        model.model.embed_tokens.weight[::2, sign], model.model.embed_tokens.weight[1::2, sign] = 1.0, -1.0
        first, second = model.model.layers
        first.self_attn.v_proj.weight[0, sign] = 1.0  # even attention: the mean of signs that alternate is 0 but for one key
        first.self_attn.o_proj.weight[mean, 0] = 1.0
        for neuron, side in enumerate((1.0, -1.0)):
            first.mlp.gate_proj.weight[neuron, mean], first.mlp.gate_proj.weight[neuron, constant] = 40.0 * side, -6.0
            first.mlp.up_proj.weight[neuron, constant] = 1.0
            first.mlp.down_proj.weight[mark, neuron] = 1.0
        second.self_attn.q_proj.weight[7, constant] = 8.0  # a pair that the rotation hardly turns
        second.self_attn.k_proj.weight[7, mark] = 8.0
    return model, torch.arange(20).remainder(2).repeat(2, 1)


def test_a_sink_hidden_from_all_heads_forms_again_unless_the_first_queries_keep_it():
    model, rows = role_sink()

    def weight_on(position, *edits):
        spy = Spy()
        logits(model, rows, *edits, probes=[spy])
        return spy.calls[1].weights(0, 20)[:, 0, 12:, position].mean().item()

    assert weight_on(0) > 0.9
    assert weight_on(1) < 0.01
    assert weight_on(1, HideKey()) > 0.9
    assert weight_on(1, HideKey(spare=NEAR)) < 0.1
