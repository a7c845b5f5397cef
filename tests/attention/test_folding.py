"""Folded sinks: hidden keys on every route of a call, by an oracle that hides nothing and replaces the column of the sink."""

import copy
import dataclasses
import pickle

import pytest
import torch
import transformers
from tests.conftest import make_sinklm
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab import SinkCache, attend, load_model, save_model
from sinklab.attention.folding import find_source
from sinklab.attention.operation import ATTRIBUTE, Source
from sinklab.attention.paths.table import set_attention_path
from sinklab.errors import UnsupportedModelError
from sinklab.models.attach import attach, attach_folded, head_shapes
from sinklab.operations._bias import NO_SCORE
from sinklab.operations.folded_sink import FoldedSink
from sinklab.probes.sink_rate import SinkRate

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1
}  # fmt: skip
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 2}
GEMMA = {**LLAMA, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}

FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, head_dim=16)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**LLAMA)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, intermediate_size=48)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=3, n_head=4)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, intermediate_size=48)),
    "sinklm": lambda: make_sinklm(),
}
"""Rotation of halves, norms of queries and keys, a window, fused maps of two kinds, no rotation, both directions, our own."""


def folded(family: str, *, whole: bool = True):
    """A model with random constants in all layers but the first: in all key–value heads, or in the last one alone."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    shapes = head_shapes(model, None, sources=True)
    generator = torch.Generator().manual_seed(1)
    parameters, chosen = {}, {}
    for number, (name, shape) in enumerate(shapes.items()):
        heads = () if number == 0 else tuple(range(shape.num_kv_heads)) if whole else (shape.num_kv_heads - 1,)
        chosen[name] = dataclasses.replace(shape, folded=heads)
        rows = torch.tensor([index in heads for index in range(shape.num_kv_heads)])
        own = rows.repeat_interleave(shape.num_heads // shape.num_kv_heads)
        if heads:
            parameters[name] = {
                "key": torch.randn(shape.num_heads, shape.head_dim, generator=generator) * own[:, None],
                "constant": torch.where(own, torch.randn(shape.num_heads, generator=generator), NO_SCORE),
                "value": torch.randn(shape.num_kv_heads, shape.value_dim, generator=generator) * rows[:, None],
            }
    plain = copy.deepcopy(model)
    return attach_folded(model, FoldedSink(), chosen, parameters), plain, chosen, parameters


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(3, 60, (2, 14), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@torch.no_grad()
def test_equals_an_oracle_that_replaces_the_column(tokens, whole):
    model, plain, shapes, parameters = folded("llama", whole=whole)
    unfolded = plain(tokens).logits
    names = {id(module): name for name, module in plain.named_modules()}
    before = {}
    for name in shapes:
        plain.get_submodule(name).q_proj.register_forward_hook(
            lambda module, args, output, name=name: before.update({name: output})
        )

    def oracle(module, query, key, value, mask, scaling, **_):
        name = names[id(module)]
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = query @ key.transpose(2, 3) * scaling
        values = value[:, :, None].repeat(1, 1, query.shape[2], 1, 1)  # one set for each query
        for head in [head for head in range(4) if head // 2 in shapes[name].folded]:
            own = parameters[name]
            unrotated = before[name].unflatten(-1, (4, 8))[:, :, head]
            scores[:, head, 1:, 0] = (unrotated @ own["key"][head] + own["constant"][head])[:, 1:]
            values[:, head, 1:, 0] = own["value"][head // 2]
        weights = torch.softmax(scores.masked_fill(~torch.ones(14, 14).tril().bool(), float("-inf")), -1)
        return torch.einsum("bhqk,bhqkd->bqhd", weights, values), None

    ALL_ATTENTION_FUNCTIONS.register("oracle_of_folding", oracle)
    plain.set_attn_implementation("oracle_of_folding")
    found = model(tokens).logits
    torch.testing.assert_close(found, plain(tokens).logits, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found[:, 0], unfolded[:, 0])  # the hidden state of the sink stays what it was
    assert not torch.allclose(found[:, 1:], unfolded[:, 1:], atol=1e-3)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_route_of_a_call_agrees(family, whole, tokens, tmp_path):
    model, *_ = folded(family, whole=whole)
    expected = model(input_ids=tokens).logits

    def same(logits):
        torch.testing.assert_close(logits, expected, atol=2e-6, rtol=1e-5)

    with attend(model, [SinkRate()]) as session:  # proves every call
        assert torch.equal(model(input_ids=tokens).logits, expected)
    assert session.checks["rows_verified"] > 0
    same(pickle.loads(pickle.dumps(model))(input_ids=tokens).logits)
    same(copy.deepcopy(model)(input_ids=tokens, output_attentions=True).logits)
    save_model(model, tmp_path / "saved")
    same(load_model(str(tmp_path / "saved")).model(input_ids=tokens).logits)
    mask = torch.ones(2, 17, dtype=torch.long)
    right = torch.cat((tokens, torch.full((2, 3), 2)), 1)
    same(model(input_ids=right, attention_mask=mask.index_fill(1, torch.tensor([14, 15, 16]), 0)).logits[:, :14])
    if family == "bert":
        return
    mask[:, :3] = 0
    given = {} if family == "sinklm" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    same(model(input_ids=torch.cat((torch.full((2, 3), 2), tokens), 1), attention_mask=mask, **given).logits[:, 3:])
    for pieces in ([1] * 14, [6, 8]):
        cache, logits = None, []
        for piece in tokens.split(pieces, 1):
            output = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
        same(torch.cat(logits, 1))


def test_gradients_are_those_of_the_plain_path(tokens):
    gradients = []
    for path in ("auto", "plain"):
        model, *_ = folded("llama")
        set_attention_path(model, path)
        model.train()(tokens, labels=tokens).loss.backward()
        gradients.append({name: own.grad for name, own in model.named_parameters() if own.grad is not None})
    assert any("operation_state.key" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", ["sink_logit", "key_bias:value_norm=1", "key_value_bias", "folded_sink:positions=[0,1]"])
@torch.no_grad()
def test_a_step_of_decoding_takes_the_short_way_to_what_the_plain_path_gives(name, tokens, monkeypatch):
    model = attach(FAMILIES["llama"](), name).eval()
    for parameter in [own for path, own in model.named_parameters() if ATTRIBUTE in path]:
        torch.nn.init.normal_(parameter)
    cache = model(tokens[:, :-1]).past_key_values
    with monkeypatch.context() as patched:
        patched.setattr("sinklab.attention.seam.compute", None)
        step = model(tokens[:, -1:], past_key_values=cache).logits
    set_attention_path(model, "plain")
    torch.testing.assert_close(step, model(tokens).logits[:, -1:], atol=2e-6, rtol=1e-5)


def test_packed_texts_have_a_sink_each(tokens):
    model, *_ = folded("llama")
    packed, positions = tokens.reshape(1, -1), torch.arange(14).repeat(2)[None]
    with torch.no_grad():
        found = model(input_ids=packed, position_ids=positions, use_cache=False).logits.reshape(2, 14, -1)
        torch.testing.assert_close(found, model(input_ids=tokens).logits, atol=2e-6, rtol=1e-5)


def test_a_source_is_where_norms_agree():
    received = torch.randn(2, 4, 5, 8)
    turned = received.flip(-1)  # keeps norms, as a rotation does
    fused = torch.cat((torch.randn(2, 5, 32), turned.transpose(1, 2).flatten(2)), -1)
    assert find_source(received, {"a": torch.randn(2, 5, 32), "qkv": fused}) == "qkv:btn:32:8"
    assert torch.equal(Source.of("qkv:btn:32:8").read(fused, 4, 8), turned)
    assert find_source(received, {"a": torch.randn(2, 5, 32)}) is None


def test_attached_as_it_starts_it_finds_where_keys_are_made(tokens):
    model = attach(FAMILIES["llama"](), "folded_sink").eval()
    state = getattr(model.model.layers[1].self_attn, ATTRIBUTE)
    assert (state.shape.queries_from, state.shape.folded) == ("q_proj:btn:0:8", None)
    with attend(model, [SinkRate()]), torch.no_grad():
        model(tokens)
    del state.shape
    state.shape = dataclasses.replace(head_shapes(FAMILIES["llama"](), None)["model.layers.1.self_attn"])
    with pytest.raises(UnsupportedModelError, match="without saying where keys are made"):
        model(tokens)


def test_a_part_that_was_replaced_is_followed(tokens):
    model, *_ = folded("llama")
    with torch.no_grad():
        expected = model(tokens).logits
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                setattr(layer.self_attn, name, torch.nn.Sequential(getattr(layer.self_attn, name)))
        torch.testing.assert_close(model(tokens).logits, expected)
        plain = copy.deepcopy(model)
        for layer in plain.model.layers:
            fresh = torch.nn.Linear(32, 16, bias=False)
            fresh.load_state_dict(layer.self_attn.k_proj[0].state_dict())
            layer.self_attn.k_proj = fresh
        torch.testing.assert_close(plain(tokens).logits, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("window", [1, 5])
@torch.no_grad()
def test_a_bounded_cache_without_sinks_reads_at_once_what_it_reads_one_by_one(family, window, tokens):
    """With room for one key every token sees itself alone, and only the first of them begins the text."""
    model, *_ = folded(family)
    caches = [SinkCache(model, num_sinks=0, window=window, **one) for one in ({}, {"chunk": 1, "rebase_at": 9})]
    whole = model(tokens, past_key_values=caches[0]).logits
    pieces = [model(token, past_key_values=caches[1]).logits for token in tokens.split(1, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-6, rtol=1e-5)
