"""Weights and mass on nothing: of every family what statistics say is what the weights that a model returns say."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import sinklab.attention.forward as describe_module
from sinklab.attention.call import AttentionCall
from sinklab.attention.session import attend
from sinklab.attention.visibility import Everything
from sinklab.errors import MeasurementError

from .harness import Recorded, Recorder, forward, recorded
from .zoo import LENGTH, MEASURED, ZOO, Entry, batch_of, build, model_of

# float32: scores are sums of 8 products of size one, scaled, so they carry some 8 · 2⁻²⁴ · |score| ≈ 1e-5 at |score| = 20;
# a weight in [0, 1] inherits that error.
TOLERANCE = 1e-5


def record(entry: Entry, backend: str = "eager", padded: bool = True) -> list[Recorded]:
    return recorded(model_of(entry.id, backend), batch_of(entry, padded))


def returned_weights(entry: Entry) -> list[Tensor | None]:
    """What the model returns for ``output_attentions=True``, in the order of the calls."""
    with torch.no_grad():
        output = model_of(entry.id)(**batch_of(entry, padded=True), output_attentions=True)
    if "decoder_attentions" in output:
        pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
        return [*output.encoder_attentions, *(weights for pair in pairs for weights in pair)]
    if entry.id == "swin":  # it returns the last block of every stage
        return [weights for stage in output.attentions for weights in (None, stage)]
    if "text_model_output" in output:
        towers = (output.text_model_output, output.vision_model_output)
        return [weights for tower in towers for weights in tower.attentions]
    return [weights for weights in output.attentions if weights is not None]


@pytest.mark.parametrize("entry", MEASURED, ids=lambda entry: entry.id)
def test_weights_are_those_the_model_returns(entry: Entry) -> None:
    expected = returned_weights(entry)
    found = record(entry)
    assert len(found) == len(expected) == entry.calls
    if entry.id in ("clip", "siglip"):  # towers run in an order of their own; tell them apart by their size
        found.sort(key=lambda one: one.call.q_len)
        expected.sort(key=lambda weights: 0 if weights is None else weights.shape[-1])
    for one, weights in zip(found, expected, strict=True):
        if weights is None:
            continue
        if entry.id == "granite_swa":  # it returns whole rows and scales the output afterwards
            assert one.statistics.null_mass is not None
            weights = weights * (1 - one.statistics.null_mass[..., None])
        counted = one.call.counted[:, None, :, None]
        assert counted.any()
        difference = (one.weights - weights.reshape(one.weights.shape)).masked_fill(~counted, 0.0)
        assert difference.abs().max() < TOLERANCE, one.site.module


@pytest.mark.parametrize("entry", [entry for entry in MEASURED if "sdpa" in entry.backends], ids=lambda entry: entry.id)
def test_backends_agree(entry: Entry) -> None:
    for eager, sdpa in zip(record(entry), record(entry, "sdpa"), strict=True):
        assert eager.site == sdpa.site
        assert torch.equal(eager.call.query_positions, sdpa.call.query_positions)
        assert torch.equal(eager.call.key_positions, sdpa.call.key_positions)
        counted = eager.call.counted[:, None, :, None]
        # One layer feeds the next, so differences of the kernels grow: two layers, each within the tolerance of one.
        assert ((eager.weights - sdpa.weights).masked_fill(~counted, 0.0).abs().max()) < 2 * TOLERANCE


def missing(field: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda fields: {field: None}


DAMAGE = {
    "scale": ("llama", "eager", lambda fields: {"scaling": fields["scaling"] * 1.1}),
    "scale on sdpa": ("llama", "sdpa", lambda fields: {"scaling": fields["scaling"] * 1.1}),
    "soft cap": ("gemma2", "eager", missing("softcap")),
    "position bias of T5": ("t5", "eager", missing("bias")),
    "position bias of T5 on sdpa": ("t5", "sdpa", missing("bias")),
    "bias in the mask of Swin": ("swin", "eager", missing("bias")),
    "bias in the mask of BEiT": ("beit", "sdpa", missing("bias")),
    "sink logit of gpt-oss": ("gpt_oss", "eager", missing("sink_scores")),
    "sink gain of Granite": ("granite_swa", "eager", missing("sink_scores")),
    "sink logit of MiMo": ("mimo_v2_flash", "eager", missing("sink_scores")),
    "causality": ("qwen2", "sdpa", lambda fields: {"visible": Everything()}),
    "padding": ("bert", "sdpa", lambda fields: {"visible": Everything()}),
    "window": ("modernbert", "eager", lambda fields: {"visible": Everything()}),
    "shift of Swin": ("swin", "sdpa", missing("bias")),
    "grouping": ("mistral", "eager", lambda fields: {"keys": fields["keys"].flip(1)}),
    "values": ("deepseek_v3", "eager", lambda fields: {"values": fields["values"].flip(2)}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_wrong_reconstruction_is_refused(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, backend, change = DAMAGE[damage]
    damaged = []

    def build(**fields: Any) -> AttentionCall:
        damaged.append(fields["site"].module)
        return AttentionCall(**{**fields, **change(fields)})

    monkeypatch.setattr(describe_module, "AttentionCall", build)
    model = model_of(family, backend)
    with pytest.raises(MeasurementError, match=r"."), attend(model, probes=[Recorder()], verify=True):
        forward(model, batch_of(ZOO[family], padded=True))
    assert damaged


FAMILIES = ("gpt_oss", "granite_swa", "mimo_v2_flash")
WINDOW = 4
SETTINGS = (20.0, -20.0, 0.5)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def measure(model: PreTrainedModel, padded: bool = False) -> list[Recorded]:
    return recorded(model, batch_of(ZOO["gpt_oss"], padded))


def with_sinks(family: str, value: float | None) -> PreTrainedModel:
    model = build(ZOO[family])
    if value is not None:
        with torch.no_grad():
            for module in attention_modules(model):
                if module.sinks is not None:
                    module.sinks.fill_(value)
    return model


def sinks_of(records: list[Recorded]) -> Iterator[Recorded]:
    for record in records:
        if record.call.sink_scores is not None:
            yield record


@pytest.mark.parametrize("sink", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_null_mass_in_closed_form(family: str, sink: float) -> None:
    model = with_sinks(family, sink)
    with torch.no_grad():
        for module in attention_modules(model):
            for projection in (module.q_proj, module.k_proj):
                projection.weight.zero_()
                if projection.bias is not None:
                    projection.bias.zero_()
    found = list(sinks_of(measure(model)))
    assert found
    for record in found:
        # All scores are zero, so n visible keys weigh exp(0) each against exp(sink): the mass on nothing is known exactly.
        sliding = record.site.layer == 0
        visible = [min(query + 1, WINDOW) if sliding else query + 1 for query in range(LENGTH)]
        expected = torch.tensor([math.exp(sink) / (n + math.exp(sink)) for n in visible], dtype=torch.float64)
        null_mass = record.statistics.null_mass
        assert null_mass is not None
        # float32, a difference of numbers near one: absolute error of a few times 2⁻²⁴.
        torch.testing.assert_close(null_mass.double(), expected.expand_as(null_mass), rtol=0, atol=5e-7)
        assert record.statistics.row_mass is not None
        total = record.statistics.row_mass + null_mass
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=5e-7)


@pytest.mark.parametrize("sink", [*SETTINGS, None], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_null_mass_is_what_the_head_outputs_lose(family: str, sink: float | None) -> None:
    # Whatever the form (an extra softmax column, a gain), outputs shrink by 1 - null mass against the same heads without sink.
    free, held = measure(with_sinks(family, -1e4))[0], measure(with_sinks(family, sink))[0]
    assert free.statistics.null_mass is not None
    assert (free.statistics.null_mass.abs() < 1e-6).all()
    assert held.statistics.null_mass is not None
    assert free.call.head_outputs is not None
    assert held.call.head_outputs is not None
    kept = 1 - held.statistics.null_mass.transpose(1, 2)[..., None]
    # One rounding of the gain, one of the product.
    torch.testing.assert_close(held.call.head_outputs, free.call.head_outputs * kept, rtol=1e-4, atol=2e-6)


def test_layers_without_a_sink_have_no_null_mass() -> None:
    sliding, full = measure(model_of("mimo_v2_flash"))
    assert sliding.call.sink_scores is not None
    for record in (full, *measure(model_of("llama"))):
        assert record.call.sink_scores is None
        assert record.statistics.null_mass is not None
        assert (record.statistics.null_mass == 0).all()
