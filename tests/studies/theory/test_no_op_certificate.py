"""No-op certificate on models: measured heads lie within it, every axis is where it belongs, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.architectures.zoo import ZOO, batch_of, model_of
from tests.conftest import TINY
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.session import attend
from sinklab.attention.visibility import Dense
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.registry import operations
from sinklab.results.table import make_table
from sinklab.studies.theory.no_op_certificate import NoOpCertificate, certify
from sinklab.testing import check_probe

# Weights are float32, of float32 scores; norms of outputs carry their error.
FLOAT32 = 1e-5


def sinklm(operation=None, **fields):
    torch.manual_seed(0)
    options = {**TINY, "initializer_range": 0.3, "operation": {"name": operation or "softmax"}, **fields}
    return SinkLM(SinkLMConfig(**options)).eval()


def tokens(batch=2, length=10, seed=1):
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
    probe = certify(make(), tokens(), delta="measured", tolerance=1e-6)
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


def test_values_that_are_equal_but_for_the_sink():
    # All tokens but the first are one token without positions: one value u, and a sink value s. The certificate is a segment.
    model = sinklm(position={"name": "no_position"}, num_hidden_layers=1)
    batch = torch.tensor([[5] + [7] * 8])
    layer = certify(model, batch, tolerance=1e-6).found[0]
    bounds = layer.certificate
    last, first = bounds.without_upper[0, :, -1], bounds.without_upper[0, :, 1]
    torch.testing.assert_close(last, first, rtol=1e-5, atol=1e-7)
    assert (bounds.with_upper <= torch.minimum(last[:, None], bounds.sink_norm[0]) + 1e-6)[0][bounds.counted[0]].all()


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
    model, batch = sinklm(), tokens(batch=1, length=20)
    whole, few = certify(model, batch).found[0], certify(model, batch, max_queries=5).found[0]
    assert few.queries.tolist() == [0, 5, 10, 14, 19]
    torch.testing.assert_close(few.sink_weight, whole.sink_weight[..., few.queries], rtol=0, atol=FLOAT32)
    torch.testing.assert_close(few.output_norm, whole.output_norm[..., few.queries], rtol=1e-5, atol=FLOAT32)
    assert certify(model, batch, max_queries=1).found[0].queries.tolist() == [19]


def test_contract():
    check_probe(NoOpCertificate, delta="measured")


def test_rows_fit_the_table_and_merge():
    model = sinklm()
    one, two = certify(model, tokens(seed=1), delta=0.2), certify(model, tokens(seed=2), delta=0.2)
    both = certify(model, torch.cat((tokens(seed=1), tokens(seed=2))), delta=0.2)
    one.merge(two)
    merged, whole = (make_table(probe.rows(), probe=probe.name) for probe in (one, both))
    assert set(merged["metric"]) == {metric.name for metric in NoOpCertificate.metrics}
    key = ["metric", "layer", "head"]
    merged, whole = merged.sort_values(key).reset_index(), whole.sort_values(key).reset_index()
    assert (merged["count"] == whole["count"]).all()
    # Different starts give different points within the tolerance.
    assert (merged["value"] - whole["value"]).abs().max() < 1e-3
    for metric in NoOpCertificate.metrics:
        values = merged.loc[merged["metric"] == metric.name, "value"]
        assert values.between(metric.range[0] - 1e-9, metric.range[1] + 1e-9).all(), metric.name
    with pytest.raises(ConfigurationError, match=r"two certificates with delta 0.2 and None measure different things"):
        one.merge(NoOpCertificate())


def test_what_is_refused():
    model = sinklm()
    with pytest.raises(InputError, match=r"no query of the batch sees its sink .position 0. and another key"):
        certify(model, tokens(length=1))
    with pytest.raises(InputError, match="position 30"):
        certify(model, tokens(), sink_position=30)
    with pytest.raises(ConfigurationError, match="sink_position -1 must be a position"):
        NoOpCertificate(-1)
    with pytest.raises(ConfigurationError, match="max_queries 0 must be at least 1"):
        NoOpCertificate(max_queries=0)
    with pytest.raises(ConfigurationError, match=r"delta -1.0 must be at least 0, or 'measured'"):
        NoOpCertificate(delta=-1.0)
    with pytest.raises(ConfigurationError, match="SinkLM has no module with null score"):
        certify(model, tokens(), sink_position="null")
    with pytest.raises(UnsupportedModelError, match=r"layers.0.self_attn: no output projection of the heads was found"):
        certify(sinklm(head_merge="add"), tokens())
    with torch.no_grad():
        model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    probe = NoOpCertificate()
    with pytest.raises(InputError, match=r"layers.1.self_attn: .* not finite"), attend(model, [probe], verify=False):
        model(tokens())
