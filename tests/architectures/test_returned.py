"""The second tier: models off the interface, measured from the weights they return, or refused where these prove nothing."""

import math
import types

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from sinklab import attend, audit, from_weights, measure
from sinklab.attention.returned import TIER, attend_returned, bytes_of_weights, row_tolerance, uses_returned
from sinklab.errors import ConfigurationError, MeasurementError, SessionError, UnsupportedModelError
from sinklab.probes.attention_received import AttentionReceived
from sinklab.probes.hidden_norm import HiddenNorm
from sinklab.probes.null_mass import NullMass
from sinklab.probes.sink_rate import SinkRate
from sinklab.probes.value_norm import ValueNorm
from sinklab.results import environment
from sinklab.results.table import read_table
from sinklab.studies.measure.probing import check_identity, run_probes

from .harness import Recorder, assert_identical, decode, forward, tensors
from .zoo import SECOND_TIER, WAVES, ZOO, Entry, batch_of, build, model_of, shape

AT = ["probe", "metric", "layer", "head", "key_position", "count"]
every_family = pytest.mark.parametrize("entry", SECOND_TIER, ids=lambda entry: entry.id)


def returned(entry: Entry, padded: bool = False) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return model_of(entry.id)(**batch_of(entry, padded), output_attentions=True).attentions


@every_family
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_outputs_are_bit_identical_and_the_weights_are_those_returned(entry, padded):
    model, batch, recorder = model_of(entry.id), batch_of(entry, padded), Recorder()
    plain = forward(model, batch)
    with torch.no_grad(), attend_returned(model, [recorder]) as session:
        output = model(**batch)
    assert_identical(tensors(output), plain)
    assert "attentions" not in output
    assert session.tier == TIER
    assert [site.module for site in session.sites] == list(session.calls)
    weights = returned(entry, padded)
    assert len(recorder.records) == len(weights) == session.checks["calls_verified"] == 2
    for one, expected in zip(recorder.records, weights, strict=True):
        counted = one.call.counted[:, None, :, None]
        assert torch.equal(one.weights.masked_fill(~counted, 0.0), expected.masked_fill(~counted, 0.0))
        if entry.kind == "decoder":
            later = one.call.key_positions[:, None] > one.call.query_positions[..., None]
            assert not one.visible.expand(2, 1, -1, -1)[:, 0][later].any()
    if padded:
        assert (recorder.records[0].call.query_positions == -1).sum() == 3
    assert 0 < session.checks["largest_error"] < row_tolerance(weights[0])


@every_family
def test_numbers_are_those_of_the_plain_definition(entry):
    model, batch = model_of(entry.id), batch_of(entry)
    with torch.no_grad(), attend_returned(model, [SinkRate(), AttentionReceived(), NullMass()]) as session:
        model(**batch)
    table = session.table()
    assert set(table["tier"]) == {TIER}
    assert table.query("metric == 'null_mass'")["value"].eq(0).all()
    for layer, weights in enumerate(returned(entry)):
        visible = np.ones((10, 10)) if entry.kind == "encoder" else np.tril(np.ones((10, 10)))
        if entry.id == "gpt_neo" and layer == 1:  # a local layer of four keys
            visible = visible - np.tril(np.ones((10, 10)), -4)
        means = (weights.double().sum(2) / torch.from_numpy(visible.sum(0))).numpy()  # samples, heads, keys
        rows = table.query(f"metric == 'mean_weight' and layer == {layer}")
        np.testing.assert_allclose(rows["value"].to_numpy(float), means.mean(0).ravel(), atol=1e-6)
        rates = table.query(f"metric == 'gu2024' and layer == {layer}")
        np.testing.assert_array_equal(rates["value"].to_numpy(float), 100 * (means > 0.3).mean(0).ravel())


@pytest.mark.parametrize("entry", [entry for entry in SECOND_TIER if entry.kind == "decoder"], ids=lambda entry: entry.id)
def test_decoding_with_a_cache_gives_the_numbers_of_the_whole_text(entry):
    model = model_of(entry.id)
    plain = decode(model, entry, padded=True)
    stepwise, whole = AttentionReceived(), AttentionReceived()
    with attend_returned(model, [stepwise]) as session:
        assert_identical(decode(model, entry, padded=True), plain)
    assert session.checks["calls_verified"] == 8  # a prefill and three steps of two layers
    words = torch.randint(4, 40, (2, 3), generator=torch.Generator().manual_seed(2))
    batch = batch_of(entry, padded=True)
    grown = {
        "input_ids": torch.cat((batch["input_ids"], words), 1),
        "attention_mask": torch.cat((batch["attention_mask"], torch.ones(2, 3, dtype=torch.long)), 1),
    }
    with attend_returned(model, [whole]):
        forward(model, grown)
    found, expected = (
        sorted((row["layer"], *np.atleast_1d(row["value"]).tolist()) for row in probe.rows()) for probe in (stepwise, whole)
    )
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=1e-5)


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("gpt2", None), ("bert", None)])
def test_on_the_interface_both_tiers_agree(family, window):
    model, batch = model_of(family), batch_of(ZOO[family], padded=True)
    first, second = ([SinkRate(), AttentionReceived(), HiddenNorm()] for _ in range(2))
    with attend(model, first) as session:
        forward(model, batch)
    with attend_returned(model, second) as other:
        forward(model, batch)
    one, two = (s.table().sort_values(AT).reset_index(drop=True) for s in (session, other))
    assert one[AT].equals(two[AT])
    assert (one["value"] - two["value"]).abs().max() < 1e-6  # float32 on both sides, of the same weights
    assert session.tier is None
    assert one["tier"].isna().all()


def test_longformer_and_falcon_on_sdpa_are_refused():
    for family, backend, reason in (
        ("longformer", "eager", r"LongformerModel computes .* windows of its own layout \(`attention_window`\)"),
        ("falcon", "sdpa", r"FalconForCausalLM .* on 'sdpa' it may compute .* load it with attn_implementation='eager'"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason), attend_returned(model_of(family, backend)):
            pass


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_wavlm_returns_the_mean_of_its_heads_and_is_refused():
    entry = Entry("wavlm", "audio", "WavLMModel", shape(**WAVES), 0, inputs="waveform")
    model = build(entry)
    assert uses_returned(model)
    message = r"layers\.0\.attention \(WavLMAttention\) returns the same weights for all of its 4 heads"
    with pytest.raises(UnsupportedModelError, match=message), attend_returned(model):
        forward(model, batch_of(entry))


def test_padding_that_is_given_by_points_of_a_wave_is_refused():
    config = shape(squeeze_factor=2, position_buckets=8, **WAVES)
    entry = Entry("sew-d", "audio", "SEWDModel", config, 0, inputs="waveform")
    model = build(entry)
    with attend_returned(model, [SinkRate()]) as session:
        forward(model, batch_of(entry))
    assert session.checks["rows_verified"] == 2 * 2 * 4 * 5  # layers, samples, heads, and frames: two of 32 points squeezed
    message = r"SEWDModel was given an attention mask of shape \(2, 320\) and returns weights over 5 keys, of which it is not"
    with pytest.raises(UnsupportedModelError, match=message), attend_returned(model):
        forward(model, batch_of(entry, padded=True))


class OddAttention(nn.Module):
    """Attention in its own code, whose weights can be spoiled."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil

    def forward(self, hidden):
        scores = hidden @ hidden.transpose(1, 2)
        weights = torch.softmax(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf), -1)
        return weights @ hidden, self.spoil(weights[:, None])


class OddModel(transformers.PreTrainedModel):
    """Two layers of it."""

    config_class = transformers.GPT2Config

    def __init__(self, config, spoil, give=lambda weights: weights):
        super().__init__(config)
        self.give, self.embed = give, nn.Embedding(40, 8)
        self.layers = nn.ModuleList([OddAttention(spoil) for _ in range(2)])

    def forward(self, input_ids, attention_mask=None, output_attentions=False):
        hidden, weights = self.embed(input_ids), ()
        for layer in self.layers:
            hidden, own = layer(hidden)
            weights += (own,)
        return BaseModelOutput(last_hidden_state=hidden, attentions=self.give(weights) if output_attentions else None)


def halved(weights):
    return weights * torch.linspace(1, 0.5, weights.shape[2])[:, None]


def short(weights):
    near = torch.ones(weights.shape[2:]).triu(-2)
    return weights * near / (weights * near).sum(-1, keepdim=True)


def changed(weights, value):
    weights = weights.clone()
    weights[0, 0, 3, 1] = value
    return weights


@pytest.mark.parametrize(
    ("spoil", "give", "error", "message"),
    [
        (halved, tuple, MeasurementError, r"layers\.0 of OddModel returns: .*, query \d sums to 0\.\d+, and not to 1"),
        (lambda weights: changed(weights, torch.nan), tuple, MeasurementError, r"query 3 gives nan to key 1"),
        (lambda weights: changed(weights, -0.1), tuple, MeasurementError, r"query 3 gives -0\.1 to key 1"),
        (short, tuple, UnsupportedModelError, r"nothing for keys more than 2 away, .* of 9 tokens: a window"),
        (lambda weights: weights[..., :5], tuple, UnsupportedModelError, r"returns weights of shape \(2, 1, 9, 5\) for 9"),
        (lambda weights: weights[:, 0], tuple, UnsupportedModelError, r"returns weights of shape \(2, 9, 9\) for 9 tokens"),
        (lambda weights: weights, lambda all: all[:1], UnsupportedModelError, r"those of 1 layer, while 2 attention"),
        (lambda weights: weights, lambda all: None, UnsupportedModelError, r"those of 0 layers, while 2 attention modules ran"),
    ],
)  # fmt: skip
def test_weights_that_prove_nothing_are_refused(spoil, give, error, message):
    torch.manual_seed(0)
    model = OddModel(transformers.GPT2Config(), spoil, give).eval()
    assert uses_returned(model)
    tokens = torch.randint(0, 40, (2, 9))
    with pytest.raises(error, match=message), attend_returned(model):
        forward(model, {"input_ids": tokens})
    sound = OddModel(transformers.GPT2Config(), lambda weights: weights).eval()
    with attend_returned(sound, [SinkRate()]) as session:
        forward(sound, {"input_ids": tokens})
    assert session.checks["rows_verified"] == 2 * 2 * 9


def test_what_weights_do_not_give_is_refused_by_name():
    model = model_of("gpt_neo")
    with pytest.raises(
        UnsupportedModelError, match=r"probe 'value_norm' reads queries, keys and values, which GPTNeoForCausalLM"
    ):
        run_probes(model, batch_of(ZOO["gpt_neo"])["input_ids"], [ValueNorm()])
    mask = torch.ones(2, 1, 10, 10)
    with pytest.raises(UnsupportedModelError, match=r"mask of shape \(2, 1, 10, 10\); in this tier"), attend_returned(model):
        forward(model, {**batch_of(ZOO["gpt_neo"]), "attention_mask": mask})
    with (
        pytest.raises(SessionError, match="a session on this GPTNeoForCausalLM is already active"),
        attend_returned(model),
        attend_returned(model),
    ):
        pass
    t5 = model_of("t5")
    with pytest.raises(UnsupportedModelError, match=r"T5.* an encoder and a decoder"), attend_returned(t5):
        pass


def test_a_caller_who_asks_for_weights_gets_them():
    model = model_of("mpt")
    with torch.no_grad(), attend_returned(model):
        output = model(**batch_of(ZOO["mpt"]), output_attentions=True)
    for one, other in zip(output.attentions, returned(ZOO["mpt"]), strict=True):
        assert torch.equal(one, other)


def test_memory_is_said_before_it_is_taken(monkeypatch):
    model = model_of("bloom")
    # Two layers of four heads, and two more of one layer: float32.
    assert bytes_of_weights(model, 3, 10) == (2 + 2) * 3 * 4 * 10 * 10 * 4
    said = []
    tokens = torch.randint(4, 40, (5, 10))
    run_probes(model, tokens, [SinkRate()], stage="text", progress=lambda *step: said.append(step))
    assert said[0] == ("text (second tier: 32 kB of weights at a time)", 0, 5)
    monkeypatch.setattr(environment, "machine_memory", lambda: 10_000)
    with pytest.raises(ConfigurationError, match=r"BloomForCausalLM returns of 5 samples of 10 positions: at least 32 kB"):
        run_probes(model, tokens, [SinkRate()])
    run_probes(model, tokens[:1], [SinkRate()], batch_size=1)
    with pytest.raises(ConfigurationError, match=r"returns of 5 samples of 10 tokens: at least 32 kB"), attend_returned(model):
        forward(model, {"input_ids": tokens})


def test_an_output_that_changes_by_asking_is_found_out():
    model = build(ZOO["gpt_neo"])
    plain = model.forward

    def other(self, input_ids, output_attentions=False, **kwargs):
        output = plain(input_ids, output_attentions=output_attentions, **kwargs)
        output.logits = output.logits + (1e-3 if output_attentions else 0.0)
        return output

    model.forward = types.MethodType(other, model)
    with pytest.raises(MeasurementError, match="gives other outputs while it is being looked at"):
        check_identity(model, batch_of(ZOO["gpt_neo"])["input_ids"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("off_seam")
    for family in ("gpt_neo", "falcon"):
        model = build(ZOO[family])
        model.config.bos_token_id, model.config.eos_token_id = 1, 2
        model.save_pretrained(folder / family)
    return folder


def test_an_audit_says_its_tier_everywhere(checkpoints, tmp_path, capsys):
    out = tmp_path / "out"
    result = audit(
        str(checkpoints / "gpt_neo"), corpus="random_tokens", samples=4, seq_len=12, certificate=True, causes=True, out=out
    )
    result.show()
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"tier {TIER}; not measured: head_output, key_norm, max_logit, outliers, query_key_angle, score_gap, value_norm"
        in shown
    )
    summary = result.summary
    assert summary["tier"] == result.record["model"]["tier"] == TIER
    assert set(summary["not_measured"]) == {
        "head_output", "key_norm", "max_logit", "outliers", "query_key_angle", "score_gap", "value_norm",
    }  # fmt: skip
    assert summary["off_seam_modules"] == []
    assert "outputs of heads" in summary["certificate"]["refused"]
    assert "no call can be seen or edited" in summary["causes"]["refused"]
    assert summary["sinks"]["sinks"] == [] or all(sink["value_ratio"] is None for sink in summary["sinks"]["sinks"])
    table = read_table(out / "table.parquet")
    of_probes = table[table["policy"].isna()]
    assert set(of_probes["tier"]) == {TIER}
    assert {"hidden_norm", "massive_activation", "sink_rate"} <= set(of_probes["probe"])
    page = (out / "report.html").read_text()
    assert page.count(TIER) >= 1
    assert "does not go through the attention interface" in page


def test_measure_loads_falcon_so_that_its_weights_are_its_own(checkpoints):
    result = measure(str(checkpoints / "falcon"), probes=["sink_rate"], corpus="random_tokens", samples=3, seq_len=12)
    assert result.record["model"]["attn_implementation"] == "eager"
    assert set(result.table["tier"]) == {TIER}


def test_given_weights_and_returned_ones_are_one_core():
    entry = ZOO["xglm"]
    with torch.no_grad(), attend_returned(model_of("xglm"), [AttentionReceived()]) as session:
        model_of("xglm")(**batch_of(entry))
    rows = from_weights(returned(entry), probes=["attention_received"]).table
    assert rows["value"].tolist() == session.table()["value"].tolist()
