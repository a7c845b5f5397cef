"""Learned sink logits let a head put mass on nothing; the measured null mass is the one worked out by hand."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from sinklab.attention.session import attend

from .harness import Recorded, Recorder, forward
from .zoo import LENGTH, ZOO, batch_of, build, model_of

FAMILIES = ("gpt_oss", "granite_swa", "mimo_v2_flash")
WINDOW = 4
SETTINGS = (20.0, -20.0, 0.5)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def measure(model: PreTrainedModel, padded: bool = False) -> list[Recorded]:
    recorder = Recorder()
    with attend(model, probes=[recorder], verify=True):
        forward(model, batch_of(ZOO["gpt_oss"], padded))
    return recorder.records


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
