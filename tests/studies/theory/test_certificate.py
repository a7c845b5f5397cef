"""The no-op certificate of every kind of head is that of the right vectors, by another solver; measured heads lie within it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.architectures.zoo import ZOO, batch_of, model_of
from tests.conftest import TINY
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.session import attend
from sinklab.attention.visibility import Dense
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import operations
from sinklab.studies.theory.no_op_certificate import NoOpCertificate, certify
from sinklab.testing import check_probe

HEADS, GROUPS, DIM = 4, 2, 8
# Bounds meet to 1e-6 of the longest vector and values are products in float32. SLSQP stops at changes of the squared norm of
# 1e-14, so it is off by 1e-7 in norm near 0 and by less elsewhere.
NEAR = 1e-5


def tokens(length=8):
    return torch.randint(2, 40, (1, length), generator=torch.Generator().manual_seed(1))


def sinklm(operation="softmax", **fields):
    torch.manual_seed(0)
    return SinkLM(SinkLMConfig(**{**TINY, "initializer_range": 0.3, "operation": {"name": operation}, **fields})).eval()


def written(model, batch, layer=1):
    """What every head writes for every key, ``(heads, keys, hidden)``, and its columns of the output projection."""
    attention = getattr(model, "model", model).layers[layer].self_attn
    entered = []
    hook = attention.v_proj.register_forward_hook(lambda _module, args, output: entered.append(output[0]))
    with torch.no_grad():
        model(batch)
    hook.remove()
    of_group = entered[0].double().unflatten(-1, (HEADS // GROUPS, DIM))
    columns = [attention.o_proj.weight.detach().double()[:, DIM * head : DIM * (head + 1)] for head in range(HEADS)]
    return torch.stack([of_group[:, head // GROUPS] @ columns[head].T for head in range(HEADS)]), torch.stack(columns)


def least(vectors):
    """Distance of the convex hull of a few vectors from 0."""
    vectors = vectors.numpy()
    unit = np.linalg.norm(vectors, axis=1).max() or 1.0
    gram = vectors @ vectors.T / unit**2
    done = minimize(
        lambda p: p @ gram @ p,
        np.full(len(gram), 1 / len(gram)),
        jac=lambda p: 2 * gram @ p,
        bounds=[(0, 1)] * len(gram),
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert done.success, done.message
    return unit * max(done.fun, 0.0) ** 0.5


def check(layer, head, query, vectors, sink, near=NEAR):
    """A head and query have the certificate of these vectors, the sink being one of them."""
    bounds = layer.certificate
    assert bounds.counted[0, head, query]
    scale, whole = vectors.norm(dim=1).max().item(), least(vectors)
    without = least(vectors[torch.arange(len(vectors)) != sink])
    expected = {
        "scale": scale,
        "sink_norm": vectors[sink].norm().item(),
        "with_upper": whole,
        "with_lower": whole,
        "without_upper": without,
        "without_lower": without,
    }
    ours = {name: getattr(bounds, name)[0, head, query].item() for name in expected}
    assert ours == pytest.approx(expected, abs=near * scale), (head, query)


def test_grouped_queries_write_the_values_of_their_group_through_their_own_columns():
    model, batch = sinklm(), tokens()
    vectors, _ = written(model, batch)
    layer = certify(model, batch, tolerance=1e-6).found[1]
    for head in range(HEADS):
        for query in (1, 4, 7):
            check(layer, head, query, vectors[head, : query + 1], 0)
    # Heads of one group share values, and yet not their certificates.
    assert not torch.allclose(layer.certificate.scale[0, 0], layer.certificate.scale[0, 1], rtol=1e-2)


@pytest.mark.parametrize("sink", [0, 2])
def test_a_sliding_window_asks_only_the_keys_in_it(sink):
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**TINY, sliding_window=3, initializer_range=0.3)).eval()
    batch = tokens()
    vectors, _ = written(model, batch)
    layer = certify(model, batch, sink_position=sink, tolerance=1e-6).found[1]
    # Query q sees keys q - 2 to q: a sink that has left the window forces nothing, and is not asked about.
    seeing = [query for query in range(8) if sink <= query <= sink + 2 and query > 0]
    assert [query for query in range(8) if layer.certificate.counted[0, 0, query]] == seeing
    for head in range(HEADS):
        for query in seeing:
            first = max(0, query - 2)
            check(layer, head, query, vectors[head, first : query + 1], sink - first)


def test_a_null_that_writes_nothing_is_a_key_at_0():
    model, batch = sinklm("sink_logit"), tokens()
    vectors, _ = written(model, batch)
    as_sink = certify(model, batch, sink_position="null", tolerance=1e-6).found[1]
    beside = certify(model, batch, sink_position=0, delta=0.2, tolerance=1e-6).found[1]
    for head in range(HEADS):
        for query in (0, 3, 7):
            check(as_sink, head, query, torch.cat((vectors[head, : query + 1], torch.zeros(1, 32).double())), query + 1)
    # With a null, position 0 is needed for nothing: the null makes silent without it.
    bounds = beside.certificate
    counted = bounds.counted
    assert counted[..., 1:].all()
    assert (bounds.without_upper <= 1e-6 * bounds.scale)[counted].all()
    assert (bounds.gap <= 1e-6 * bounds.scale)[counted].all()
    assert (bounds.needed_upper == 0)[counted].all()


def test_a_null_with_a_value_of_its_own_writes_that_value():
    model, batch = sinklm("key_value_bias"), tokens()
    state = dict(model.layers[1].self_attn.operation_state.named_parameters())
    (null,) = (value for name, value in state.items() if name.endswith("value"))
    with torch.no_grad():
        null.normal_(generator=torch.Generator().manual_seed(5))
    vectors, columns = written(model, batch)
    null = null.detach().double().expand(HEADS, DIM)
    as_sink = certify(model, batch, sink_position="null", tolerance=1e-6).found[1]
    beside = certify(model, batch, sink_position=0, tolerance=1e-6).found[1]
    for head in range(HEADS):
        of_null = (columns[head] @ null[head])[None]
        for query in (0, 3, 7):
            seen = torch.cat((vectors[head, : query + 1], of_null))
            check(as_sink, head, query, seen, query + 1)
            check(beside, head, query, seen, 0)


def test_a_bias_of_the_values_is_in_every_value_and_that_of_the_projection_in_none():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, attention_bias=True, initializer_range=0.3)).eval()
    attention, batch = model.model.layers[0].self_attn, tokens()
    with torch.no_grad():
        attention.v_proj.bias.normal_(generator=torch.Generator().manual_seed(5))
    vectors, _ = written(model, batch, layer=0)  # v_proj gives its bias with it
    layer = certify(model, batch, tolerance=1e-6).found[0]
    for head in range(HEADS):
        for query in (1, 7):
            check(layer, head, query, vectors[head, : query + 1], 0)
    with torch.no_grad():
        attention.o_proj.bias.fill_(100.0)
    moved = certify(model, batch, tolerance=1e-6).found[0]
    assert torch.equal(moved.output_norm, layer.output_norm)
    assert torch.equal(moved.certificate.with_upper, layer.certificate.with_upper)
    assert torch.equal(moved.certificate.without_lower, layer.certificate.without_lower)


def test_a_bias_of_the_operation_is_in_every_vector():
    model, batch = sinklm("value_bias"), tokens()
    ((_, bias),) = model.layers[1].self_attn.operation_state.named_parameters()
    with torch.no_grad():
        bias.normal_(generator=torch.Generator().manual_seed(5))
    vectors, columns = written(model, batch)
    added = bias.detach().double().expand(HEADS, DIM)
    layer = certify(model, batch, tolerance=1e-6).found[1]
    for head in range(HEADS):
        for query in (1, 7):
            check(layer, head, query, vectors[head, : query + 1] + columns[head] @ added[head], 0)


@pytest.mark.parametrize(
    "operation",
    ["value_bias", "key_value_bias", "key_bias", "sink_logit", "softmax_plus_one", "sigmoid", "softpick", "relu",
     "clipped_softmax"],
)  # fmt: skip
def test_the_norm_of_the_output_is_the_models_own(operation):
    # The bias of an operation is written once, whatever the weights sum to, and a null writes its value for its share.
    model, batch = sinklm(operation), tokens()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "operation_state" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(5))
    entered = []
    for block in model.layers:
        block.self_attn.o_proj.register_forward_pre_hook(lambda _module, args: entered.append(args[0].detach()))
    found = certify(model, batch).found
    for merged, layer, block in zip(entered, found, model.layers, strict=True):
        columns, heads = block.self_attn.o_proj.weight.detach().unflatten(1, (HEADS, DIM)), merged.unflatten(2, (HEADS, DIM))
        norms = torch.einsum("dhv,bqhv->bhqd", columns, heads).norm(dim=-1)
        # Weights of float32 scores: relative errors of a few 1e-7 for each of up to eight keys.
        torch.testing.assert_close(layer.output_norm.float(), norms, rtol=1e-4, atol=1e-5)


# Weights are float32, of float32 scores; norms of outputs carry their error.
FLOAT32 = 1e-5


def some_rows(batch=2, length=10, seed=1):
    return torch.randint(2, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.3)).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    ).eval()


@pytest.mark.parametrize("make", [sinklm, llama, gpt2], ids=["sinklm", "llama", "gpt2"])
def test_measured_heads_lie_within_their_certificate(make):
    probe = certify(make(), some_rows(), delta="measured", tolerance=1e-6)
    assert [layer.site.layer for layer in probe.found] == [0, 1]
    for layer in probe.found:
        bounds = layer.certificate
        assert bounds.counted.shape == (2, 4, 10)
        assert bounds.counted[:, :, 1:].all()
        assert not bounds.counted[:, :, 0].any()  # the first query sees the sink alone
        counted = bounds.counted
        assert (layer.output_norm >= bounds.with_lower - FLOAT32)[counted].all()
        assert (bounds.without_upper >= bounds.with_lower - FLOAT32)[counted].all()
        # Its own weights attain the norm that it has: so much on the sink is enough, and no less than needed.
        assert (bounds.needed_lower <= layer.sink_weight + 1e-3)[counted].all()
        assert torch.isfinite(bounds.needed_upper)[counted].all()
        for upper, lower in ((bounds.with_upper, bounds.with_lower), (bounds.without_upper, bounds.without_lower)):
            assert (upper - lower <= 2e-6 * bounds.scale)[counted].all()


def test_padding_may_be_anything():
    def call(broken):
        generator = torch.Generator().manual_seed(0)
        queries, keys, values = (torch.randn(1, 2, 5, 4, generator=generator) for _ in range(3))
        for states in (queries, keys, values):
            states[:, :, 0] = broken
        positions = torch.tensor([[-1, 0, 1, 2, 3]])
        return AttentionCall(
            site=Site("layers.0.self_attn", 0),
            queries=queries,
            keys=keys,
            values=values,
            scaling=0.5,
            visible=Dense(torch.ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) > 0)[None, None, None]),
            operation=operations.make({"name": "softmax"}),
            query_positions=positions,
            key_positions=positions,
            query_documents=positions.clamp(max=0),
            key_documents=positions.clamp(max=0),
            projection=torch.randn(6, 8, generator=generator),
        )

    found = []
    for broken in (0.0, float("nan")):
        probe = NoOpCertificate()
        probe.update(call(broken), Statistics())
        found.append(probe.found[0])
    clean, padded = found
    counted = clean.certificate.counted
    assert counted[0, 0].tolist() == [False, False, True, True, True]
    assert torch.equal(counted, padded.certificate.counted)
    for name in ("with_upper", "without_lower", "scale"):
        assert torch.equal(getattr(clean.certificate, name)[counted], getattr(padded.certificate, name)[counted])
    assert torch.equal(clean.output_norm[counted], padded.output_norm[counted])


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash", "gpt2", "gemma2", "deepseek_v3", "t5", "bert"])
def test_heads_of_many_families_lie_within_their_certificate(family):
    # Grouped and latent values, fused projections, soft caps, relative biases, windows, learned sink logits, both directions.
    entry = ZOO[family]
    probe = certify(model_of(family, entry.backends[-1]), batch_of(entry, True), delta="measured", tolerance=1e-5)
    for layer in probe.found:
        bounds = layer.certificate
        counted = bounds.counted
        assert counted.any()
        assert (layer.output_norm >= bounds.with_lower - FLOAT32 * bounds.scale)[counted].all()
        assert (bounds.needed_lower <= layer.sink_weight + 1e-2)[counted].all()


def test_few_queries_of_a_long_call_are_those_of_all():
    model, batch = sinklm(), some_rows(batch=1, length=20)
    whole, few = certify(model, batch).found[0], certify(model, batch, max_queries=5).found[0]
    assert few.queries.tolist() == [0, 5, 10, 14, 19]
    torch.testing.assert_close(few.sink_weight, whole.sink_weight[..., few.queries], rtol=0, atol=FLOAT32)
    torch.testing.assert_close(few.output_norm, whole.output_norm[..., few.queries], rtol=1e-5, atol=FLOAT32)
    assert certify(model, batch, max_queries=1).found[0].queries.tolist() == [19]


def test_contract():
    check_probe(NoOpCertificate, delta="measured")


def test_what_is_refused():
    model = sinklm()
    with pytest.raises(InputError, match=r"no query of the batch sees its sink .position 0. and another key"):
        certify(model, some_rows(length=1))
    with pytest.raises(InputError, match="position 30"):
        certify(model, some_rows(), sink_position=30)
    with pytest.raises(ConfigurationError, match="sink_position -1 must be a position"):
        NoOpCertificate(-1)
    with pytest.raises(ConfigurationError, match="max_queries 0 must be at least 1"):
        NoOpCertificate(max_queries=0)
    with pytest.raises(ConfigurationError, match=r"delta -1.0 must be at least 0, or 'measured'"):
        NoOpCertificate(delta=-1.0)
    with pytest.raises(ConfigurationError, match="SinkLM has no module with null score"):
        certify(model, some_rows(), sink_position="null")
    with pytest.raises(UnsupportedModelError, match=r"layers.0.self_attn: no output projection of the heads was found"):
        certify(sinklm(head_merge="add"), some_rows())
    with torch.no_grad():
        model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    probe = NoOpCertificate()
    with pytest.raises(InputError, match=r"layers.1.self_attn: .* not finite"), attend(model, [probe], verify=False):
        model(some_rows())
