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
from sinklab.studies.theory.hull_certificate import certify_hulls
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


@torch.no_grad()
def test_against_values_and_projections_taken_from_the_module():
    model, batch = sinklm(), tokens(batch=1, length=6)
    entered = {}
    attention = model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda _m, args, kwargs: entered.update(x=args[0]), with_kwargs=True)
    layer = certify(model, batch, tolerance=1e-6).found[1]
    values = attention.v_proj(entered["x"])[0].double()
    for head in range(4):
        of_group = values[:, 8 * (head // 2) : 8 * (head // 2) + 8]  # four query heads share two of values
        written = of_group @ attention.o_proj.weight[:, 8 * head : 8 * head + 8].double().T
        for query in range(1, 6):
            vectors = written[: query + 1]
            alone = certify_hulls((vectors @ vectors.T)[None], torch.ones(1, 1, query + 1).bool(), 0, tolerance=1e-6)
            for name in ("with_upper", "without_upper", "scale", "sink_norm"):
                ours, theirs = getattr(layer.certificate, name)[0, head, query].item(), getattr(alone, name).item()
                assert ours == pytest.approx(theirs, abs=2e-6 * alone.scale.item()), (head, query, name)


@torch.no_grad()
def test_measured_weight_and_norm_are_the_models_own():
    model, batch = sinklm(attn_implementation="eager"), tokens(batch=1)
    model.set_attn_implementation("eager")
    weights = model(batch, output_attentions=True).attentions
    written = {}
    for index, block in enumerate(model.layers):
        block.self_attn.o_proj.register_forward_pre_hook(lambda m, args, i=index: written.update({i: (m.weight, args[0])}))
    for index, layer in enumerate(certify(model, batch).found):
        torch.testing.assert_close(layer.sink_weight, weights[index][..., 0].double(), rtol=0, atol=FLOAT32)
        weight, merged = written[index]
        for head in range(4):
            columns = slice(8 * head, 8 * head + 8)
            norms = (merged[..., columns] @ weight[:, columns].T).norm(dim=-1)
            torch.testing.assert_close(layer.output_norm[:, head].float(), norms, rtol=1e-4, atol=FLOAT32)


def test_values_that_are_equal_but_for_the_sink():
    # All tokens but the first are one token without positions: one value u, and a sink value s. The certificate is a segment.
    model = sinklm(position={"name": "no_position"}, num_hidden_layers=1)
    batch = torch.tensor([[5] + [7] * 8])
    layer = certify(model, batch, tolerance=1e-6).found[0]
    bounds = layer.certificate
    last, first = bounds.without_upper[0, :, -1], bounds.without_upper[0, :, 1]
    torch.testing.assert_close(last, first, rtol=1e-5, atol=1e-7)
    assert (bounds.with_upper <= torch.minimum(last[:, None], bounds.sink_norm[0]) + 1e-6)[0][bounds.counted[0]].all()


def test_another_sink_position_and_padding_on_the_left():
    model, batch = llama(), tokens(batch=1, length=7)
    plain = certify(model, batch, sink_position=2).found
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), batch), dim=1)
    mask = torch.cat((torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 7, dtype=torch.long)), dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    moved = certify(model, {"input_ids": padded, "attention_mask": mask, "position_ids": positions}, sink_position=2).found
    for one, two in zip(plain, moved, strict=True):
        # Queries in front of position 2 do not see it.
        assert one.certificate.counted[0, 0].tolist() == [False] * 2 + [True] * 5
        assert two.certificate.counted[0, 0].tolist() == [False] * 5 + [True] * 5
        for name in ("with_upper", "without_lower", "scale"):
            ours, theirs = getattr(one.certificate, name)[..., 2:], getattr(two.certificate, name)[..., 5:]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-4 * one.certificate.scale[..., 2:].max().item())


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


def test_a_bias_of_the_operation_is_written_whatever_the_weights_are():
    model, batch = sinklm("value_bias"), tokens(batch=1, length=6)
    ((_, parameter),) = model.layers[0].self_attn.operation_state.named_parameters()
    with torch.no_grad():
        parameter.zero_()
    plain = certify(model, batch).found[0]
    with torch.no_grad():
        parameter.fill_(50.0)
    moved = certify(model, batch).found[0]
    counted = plain.certificate.counted
    # Far from 0 every combination has about the norm of the bias: neither hull holds 0, and outputs lie in between.
    assert (moved.certificate.with_lower > plain.certificate.scale)[counted].all()
    assert (moved.output_norm >= moved.certificate.with_lower - 1e-3)[counted].all()
    assert (moved.output_norm <= moved.certificate.scale + 1e-3)[counted].all()


def test_the_null_as_the_sink():
    model = sinklm("sink_logit")
    probe = certify(model, tokens(), sink_position="null", delta="measured", tolerance=1e-6)
    for layer in probe.found:
        bounds = layer.certificate
        assert bounds.counted.all()  # also the first query has a key and the null
        # The null writes nothing: with it silence is possible.
        assert (bounds.with_upper <= 1e-6 * bounds.scale).all()
        assert (bounds.sink_norm == 0).all()
        assert (bounds.needed_lower <= layer.sink_weight + 1e-3).all()
        assert (layer.sink_weight > 0).all()


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
