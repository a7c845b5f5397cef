"""What the architecture tests share: flattening of outputs, cached decoding, and a probe that keeps everything it is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.probe import Probe
from sinklab.attention.session import attend

from .zoo import MEASURED, Batch, Entry, batch_of

STEPS = 3

every_backend = pytest.mark.parametrize(
    ("entry", "backend"),
    [pytest.param(entry, backend, id=f"{entry.id}-{backend}") for entry in MEASURED for backend in entry.backends],
)
every_decoding_backend = pytest.mark.parametrize(
    ("entry", "backend"),
    [
        pytest.param(entry, backend, id=f"{entry.id}-{backend}")
        for entry in MEASURED
        if entry.decodes
        for backend in entry.backends
    ],
)


def tensors(output: Any) -> list[Tensor]:
    """Every floating-point tensor of a model output, in order, those of the cache included."""
    if isinstance(output, Tensor):
        return [output.detach().clone()] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in tensors(value)]
    caches = [getattr(output, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(output, name)]
    layers = [layer for cache in caches or [output] for layer in getattr(cache, "layers", [])]
    return [tensor for layer in layers for name in ("keys", "values") for tensor in tensors(getattr(layer, name, None))]


def forward(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """Every output tensor of one forward."""
    with torch.no_grad():
        return tensors(model(**batch))


def decode(model: PreTrainedModel, entry: Entry, padded: bool) -> list[Tensor]:
    """Every output tensor of a prefill and three steps of one token with the key-value cache."""
    batch = batch_of(entry, padded)
    words = torch.randint(4, 40, (2, STEPS), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output = model(**batch, use_cache=True)
        found = tensors(output)
        kept = {name: value for name, value in batch.items() if name == "attention_mask"}
        for step in range(STEPS):
            word = words[:, step : step + 1]
            if entry.inputs == "tokens":
                kept["attention_mask"] = torch.cat((kept["attention_mask"], torch.ones(2, 1, dtype=torch.long)), dim=1)
                fed: dict[str, Any] = {"input_ids": word}
            else:
                encoded = BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
                fed = {"encoder_outputs": encoded, "decoder_input_ids": word}
            output = model(**fed, **kept, past_key_values=output.past_key_values, use_cache=True)
            found += tensors(output)
    return found


def assert_identical(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit, and not vacuously: there are tensors and they are finite."""
    assert expected
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.isfinite(other).all(), f"output tensor {number} is not finite"
        assert torch.equal(one, other), f"output tensor {number} moved by up to {(one - other).abs().max():.3g}"


@dataclasses.dataclass
class Recorded:
    """Copy of one call: nothing in it changes when the model goes on."""

    site: Site
    call: AttentionCall
    statistics: Statistics
    weights: Tensor
    visible: Tensor


class Recorder(Probe):
    """Keeps every call with its dense weights: an instrument for tests, quadratic in memory."""

    name = "recorder"
    needs = frozenset({"columns", "mass"})

    def __init__(self) -> None:
        self.records: list[Recorded] = []

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        copies = {
            field.name: value.detach().clone()
            for field in dataclasses.fields(call)
            if isinstance(value := getattr(call, field.name), Tensor)
        }
        visible = call.visible.block(0, call.q_len, 0, call.kv_len).clone()
        weights = call.weights(0, call.q_len).detach().clone()
        self.records.append(Recorded(call.site, dataclasses.replace(call, **copies), statistics, weights, visible))

    def rows(self) -> Iterator[dict[str, Any]]:
        for site in {record.site.module: record.site for record in self.records}.values():
            weights = [record.weights for record in self.records if record.site == site]
            yield {
                "metric": "total_weight",
                "module": site.module,
                "layer": site.layer,
                "value": float(sum(weight.sum() for weight in weights)),
                "count": len(weights),
                "unit": "weight",
            }


def recorded(model: PreTrainedModel, batch: Batch) -> list[Recorded]:
    """What one forward shows, proved against the module's own outputs."""
    recorder = Recorder()
    with attend(model, probes=[recorder], verify=True):
        forward(model, batch)
    return recorder.records
