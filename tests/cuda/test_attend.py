"""Measured models on the device: outputs untouched, statistics those of the CPU, and sdpa those of eager."""

import copy

import pytest
import torch
from tests.architectures.harness import Recorder, forward
from tests.architectures.zoo import MEASURED, batch_of, build, model_of

from sinklab.attention.session import attend
from sinklab.errors import MeasurementError

CASES = [pytest.param(entry, backend, id=f"{entry.id}-{backend}") for entry in MEASURED for backend in entry.backends]

FIELDS = ("column_sum", "row_mass", "null_mass")


def moved(batch, device):
    return {name: value.to(device) for name, value in batch.items()}


def measured(model, batch):
    recorder = Recorder()
    with torch.no_grad(), attend(model, probes=[recorder], verify=True):
        outputs = forward(model, batch)
    return outputs, recorder.records


def on_the_cpu(entry, backend):
    """Model, batch, outputs and calls: in float64, in which a mistake of a device cannot hide behind a rounding, or float32."""
    for dtype in (torch.float64, torch.float32):
        model = copy.deepcopy(model_of(entry.id, backend)).to(dtype)
        batch = batch_of(entry, padded=True)
        batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
        try:
            outputs, records = measured(model, batch)
            if all(bool(output.isfinite().all()) for output in outputs):
                return model, batch, outputs, records
        except (MeasurementError, RuntimeError):  # NaN in padded rows; tensors that a model makes in float32 by itself
            if dtype == torch.float32:
                raise
    raise AssertionError(f"{entry.id} has outputs that are not finite, on the CPU")


def assert_untouched(before, during, again, noise):
    """Bit for bit, where two runs without a session are."""
    for first, second, third in zip(before, during, again, strict=True):
        if torch.equal(first, third):
            assert torch.equal(first, second)
        else:  # sums by atomic additions (index_add of experts) are not the same twice
            torch.testing.assert_close(second, first, rtol=noise, atol=noise * float(first.abs().max()))


@pytest.mark.parametrize(("entry", "backend"), CASES)
def test_outputs_are_untouched_and_statistics_those_of_the_cpu(device, entry, backend):
    """Verify proves each call besides."""
    model, batch, expected_outputs, expected = on_the_cpu(entry, backend)
    # There is float32 inside of a float64 model too: angles, router logits, norms, the scores of a softmax. Two layers of width
    # 32 with scores of about 1, logits up to 10: as in tests/streaming/decoders.py, which derives it.
    bound = 2e-4
    model, batch = model.to(device), moved(batch, device)
    before = forward(model, batch)
    during, records = measured(model, batch)
    again = forward(model, batch)
    assert_untouched(before, during, again, bound)
    assert len(records) == len(expected) > 0
    for one, other in zip(records, expected, strict=True):
        assert one.site.module == other.site.module
        assert one.weights.device.type == device.type
        assert torch.equal(one.visible.expand(other.visible.shape).cpu(), other.visible)
        shown = other.visible.expand(other.weights.shape)
        torch.testing.assert_close(one.weights.cpu().double() * shown, other.weights.double() * shown, atol=bound, rtol=bound)
        for name in FIELDS:
            found, wanted = getattr(one.statistics, name), getattr(other.statistics, name)
            assert (found is None) == (wanted is None), name
            if wanted is not None:
                found, words = found.cpu().double(), lambda text, name=name: f"{name}: {text}"
                torch.testing.assert_close(found, wanted.double(), atol=10 * bound, rtol=bound, msg=words)
    for found, wanted in zip(during, expected_outputs, strict=True):
        scale = max(1.0, float(wanted.abs().max()))
        assert float((found.cpu().double() - wanted.double()).abs().max()) <= bound * scale


LONG = ("llama", "gpt2", "mistral", "qwen3", "gemma2", "gpt_oss", "bert", "t5")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", LONG)
def test_kernels_of_half_precision_and_long_texts(device, family, dtype):
    """1,024 tokens, where the device takes other kernels and other ways to the statistics; sdpa beside eager."""
    (entry,) = [entry for entry in MEASURED if entry.id == family]
    length = 1024 if device.type == "cuda" else 160
    changes = {name: 2048 for name in ("max_position_embeddings", "n_positions") if name in entry.config}
    ids = torch.randint(4, 40, (2, length), generator=torch.Generator().manual_seed(1)).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if entry.kind == "encoder-decoder":
        batch["decoder_input_ids"] = ids[:, :300]
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    found = {}
    for backend in entry.backends:
        model = build(entry, backend, **changes).to(device, dtype)
        before = forward(model, batch)
        during, records = measured(model, batch)
        assert_untouched(before, during, forward(model, batch), 64 * unit)
        found[backend] = records
    if len(found) < 2:
        pytest.skip(f"{family} has one attention only")
    for one, other in zip(found["eager"], found["sdpa"], strict=True):
        # The mass of all columns is the number of counted queries, less what a null term takes: the same for both kernels.
        first, second = (record.statistics.column_sum.double() for record in (one, other))
        # Hidden states of the second layer have gone through some dozen roundings on different ways; scores have the size of 1
        # to 5, and move a weight by as much: 64 roundings of a column, relative to the largest.
        assert float((first - second).norm() / second.norm()) <= 64 * unit, one.site.module
