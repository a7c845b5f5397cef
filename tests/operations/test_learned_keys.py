"""Operations that learn keys, values, scores or tokens: by hand, and as softmax over what they stand for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from sinklab.attention.operation import HeadShape, repeat_groups
from sinklab.attention.seam import register_operation
from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.operations.key_bias import KeyBias
from sinklab.operations.key_value_bias import KeyValueBias
from sinklab.operations.sink_logit import SinkLogit
from sinklab.operations.sink_token import SinkToken
from sinklab.operations.softmax import Softmax
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.operations.value_bias import ValueBias
from sinklab.registry import operations

# --- key_bias ----------------------------------------------------------------------------------------------------------------
SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, hidden_size=16)


def test_three_tokens_by_hand():
    scores = torch.log(torch.tensor([[1.0, 1.0, 1.0], [3.0, 1.0, 1.0], [2.0, 1.0, 5.0]]))[None, None]
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    queries = torch.tensor([[1.0, 5.0], [2.0, 5.0], [0.0, 5.0]])[None, None]
    null = KeyBias().null_scores(queries, 0.5, {"key": torch.tensor([[2 * math.log(2.0), 0.0]])})
    # The bias key scores ln 2, ln 4 and 0: it adds 2, 4 and 1 to sums of 1, 4 and 8.
    torch.testing.assert_close(null[0, 0], torch.log(torch.tensor([2.0, 4.0, 1.0])), rtol=0, atol=1e-6)
    mass = KeyBias().null_mass(scores, lower, null)[0, 0]
    torch.testing.assert_close(mass, torch.tensor([2 / 3, 4 / 8, 1 / 9]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        KeyBias().weights(scores, lower, null)[0, 0, 2], torch.tensor([2 / 9, 1 / 9, 5 / 9]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("operation", "value"),
    [
        (KeyBias(), [0.0] * 8),
        (KeyBias(value_norm=5.0), [5.0, *[0.0] * 7]),
        (KeyBias(value_norm=20.0, value_ones=True), [20.0 / math.sqrt(8.0)] * 8),
        (KeyBias(shared=True, value_norm=2.0), [2.0, *[0.0] * 7]),
    ],
    ids=str,
)
def test_it_is_softmax_over_one_more_key(operation, value):
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    key = torch.randn(1 if operation.shared else 4, 8, dtype=torch.float64)
    outputs, weights = operation.head_outputs(queries, keys, values, None, 0.5, {"key": key})
    front = [torch.cat((key[None, :, None].expand(2, 4, 1, 8), keys), dim=2)]
    front.append(torch.cat((torch.tensor(value, dtype=torch.float64).expand(2, 4, 1, 8), values), dim=2))
    expected, full = Softmax().head_outputs(queries, *front, None, 0.5)
    # Rounding of the product with a value of norm 20.
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(weights, full[..., 1:], rtol=0, atol=1e-14)


def test_parameters():
    assert KeyBias().parameters(SHAPE)["key"].shape == (4, 8)
    assert KeyBias(shared=True).parameters(SHAPE)["key"].shape == (1, 8)
    wide = HeadShape(num_heads=50, num_kv_heads=50, head_dim=100, value_dim=100, hidden_size=100)
    torch.manual_seed(0)
    # 5000 numbers: their deviation is known to 1 %; four times that
    assert float(KeyBias().parameters(wide)["key"].std()) == pytest.approx(0.02, rel=0.04)


def test_coordinates_that_are_not_learned_stay_zero():
    operation = KeyBias(learnable=3)
    key = operation.parameters(SHAPE)["key"].requires_grad_()
    assert bool((key[:, :3] != 0).all())
    assert float(key.detach()[:, 3:].abs().max()) == 0.0
    optimizer = torch.optim.AdamW([key], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        operation.head_outputs(*torch.randn(3, 1, 4, 5, 8), None, 0.5, {"key": key})[0].square().sum().backward()
        optimizer.step()
    assert float(key.detach()[:, 3:].abs().max()) == 0.0
    assert float(key.detach()[:, :3].abs().min()) > 0.01


def test_scores_in_half_precision_are_not_rounded():
    queries, key = torch.randn(1, 4, 5, 8).bfloat16(), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = KeyBias().null_scores(queries, 0.5, {"key": key})
    assert scores.dtype == torch.float32
    exact = torch.einsum("bhqd,hd->bhq", queries.double(), key.double()) * 0.5
    # Eight products and sums of numbers up to a few units, each rounded to 6e-8 of its size.
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=4e-6)


def test_heads_that_it_does_not_fit():
    with pytest.raises(ConfigurationError, match="learnable = 9 exceeds the 8 numbers of a key"):
        KeyBias(learnable=9).parameters(SHAPE)
    latent = HeadShape(num_heads=4, num_kv_heads=4, head_dim=8, value_dim=6, hidden_size=16)
    assert KeyBias().parameters(latent)["key"].shape == (4, 8)
    with pytest.raises(ConfigurationError, match=r"values as long as keys; these heads have 6 and 8\. Use key_value_bias"):
        KeyBias(value_norm=1.0).parameters(latent)


# --- key_value_bias ----------------------------------------------------------------------------------------------------------


def test_three_tokens_by_hand_of_key_value_bias():
    queries = torch.tensor([[0.0], [math.log(2.0)], [math.log(3.0)]])[None, None]
    keys, values = torch.zeros(1, 1, 3, 1), torch.tensor([[3.0], [6.0], [9.0]])[None, None]
    state = {"key": torch.ones(1, 1), "value": torch.tensor([[-6.0]])}
    lower = torch.ones(3, 3, dtype=torch.bool).tril()
    outputs, _ = KeyValueBias().head_outputs(queries, keys, values, lower, 1.0, state)
    # The bias weighs 1, 2 and 3 against ones: (3 - 6)/2, (3 + 6 - 12)/4, (3 + 6 + 9 - 18)/6
    torch.testing.assert_close(outputs.flatten(), torch.tensor([-1.5, -0.75, 0.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_it_is_softmax_over_one_more_key_and_value_of_each_query_head(shared):
    torch.manual_seed(0)
    heads = 1 if shared else 4
    state = {name: torch.randn(heads, 8, dtype=torch.float64) for name in ("key", "value")}
    given = [torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    results = []
    for concatenated in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (*given, *state.values())]
        queries, keys, values, key, value = leaves
        if concatenated:
            keys, values = (
                torch.cat((bias[None, :, None].expand(2, 4, 1, 8), repeat_groups(states, 2)), dim=2)
                for bias, states in ((key, keys), (value, values))
            )
            outputs, _ = Softmax().head_outputs(queries, keys, values, None, 0.5)
        else:
            outputs, _ = KeyValueBias(shared=shared).head_outputs(
                queries, keys, values, None, 0.5, {"key": key, "value": value}
            )
        results.append([outputs, *torch.autograd.grad(outputs.square().sum(), leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_parameters_of_key_value_bias():
    shape = HeadShape(num_heads=40, num_kv_heads=8, head_dim=100, value_dim=60, hidden_size=16)
    torch.manual_seed(0)
    values = KeyValueBias().parameters(shape)
    assert {name: tuple(value.shape) for name, value in values.items()} == {"key": (40, 100), "value": (40, 60)}
    # 6400 numbers: their deviation is known to 0.9 %; four times that
    assert float(torch.cat([value.flatten() for value in values.values()]).std()) == pytest.approx(0.02, rel=0.036)
    assert KeyValueBias(shared=True).parameters(shape)["value"].shape == (1, 60)


# --- value_bias --------------------------------------------------------------------------------------------------------------


def test_outputs_move_by_the_vector_and_weights_do_not():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    plain, weights = Softmax().head_outputs(queries, keys, values, None, 0.5)
    for heads in (4, 1):
        vector = torch.randn(heads, 8, dtype=torch.float64)
        outputs, same = ValueBias(shared=heads == 1).head_outputs(queries, keys, values, None, 0.5, {"value": vector})
        assert torch.equal(same, weights)
        assert torch.equal(outputs, plain + vector[None, :, None])


def test_nothing_is_spent_on_nothing():
    assert ValueBias().null_scores(torch.randn(1, 4, 5, 8), 0.5, {}) is None
    assert ValueBias().null_mass(torch.randn(1, 4, 5, 5), None) is None


def test_parameters_and_round_trip():
    shape = HeadShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=6, hidden_size=16)
    assert ValueBias().parameters(shape)["value"].shape == (4, 6)
    assert ValueBias(shared=True).parameters(shape)["value"].shape == (1, 6)
    assert operations.make({"name": "value_bias", "shared": True}) == ValueBias(shared=True)


# --- sink_logit --------------------------------------------------------------------------------------------------------------


def test_three_tokens_by_hand_of_sink_logit():
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


# --- sink_token --------------------------------------------------------------------------------------------------------------
MODEL = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_weights_are_those_of_softmax_and_nothing_is_spent_on_nothing():
    scores = torch.randn(1, 2, 3, 3)
    assert torch.equal(SinkToken().weights(scores, None), Softmax().weights(scores, None))
    assert SinkToken().null_mass(scores, None) is None


def test_a_sink_lm_computes_as_if_the_tokens_were_in_the_sequence():
    torch.manual_seed(0)
    with_tokens = SinkLM(SinkLMConfig(**MODEL, operation={"name": "sink_token", "count": 2})).double().eval()
    plain = SinkLM(SinkLMConfig(**MODEL)).double().eval()
    plain.load_state_dict({name: value for name, value in with_tokens.state_dict().items() if "front_tokens" not in name})
    ids = torch.randint(0, 20, (3, 7))
    with torch.no_grad():
        front = with_tokens.front_tokens.weight.expand(3, -1, -1)
        expected = plain(inputs_embeds=torch.cat((front, plain.embed_tokens(ids)), dim=1)).logits[:, 2:]
        torch.testing.assert_close(with_tokens(input_ids=ids).logits, expected, rtol=0, atol=1e-12)


def test_another_model_is_not_silently_a_softmax_model():
    config = transformers.LlamaConfig(**MODEL, attn_implementation=register_operation(SinkToken()))
    with pytest.raises(
        ConfigurationError, match="operation 'sink_token' has learned parameters, which LlamaAttention does not"
    ):
        transformers.LlamaForCausalLM(config)(torch.zeros(1, 3, dtype=torch.int64))
