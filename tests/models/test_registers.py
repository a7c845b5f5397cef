"""Registers at test time: against a forward written out by hand, on planted spikes, what is refused, what is taken away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as T
from torch.nn import functional

from sinklab import add_registers
from sinklab.attention.session import attend
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.positions import positions_of
from sinklab.probes.sink_rate import SinkRate
from sinklab.sinks import Sinks
from sinklab.studies.origin.measurement import locate_origins

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
WRITER = "vit.layers.1.mlp.fc2"
NEURON, CHANNEL, MARK = 7, 5, 9
CORNERS = (1, 4, 13, 16)
"""Of a picture of four by four patches behind [CLS]."""


def vit(*, writes: float = 0.0) -> T.ViTForImageClassification:
    """Random weights; a neuron of the second block sees the mark of the corner patches and writes into one channel."""
    torch.manual_seed(0)
    model = T.ViTForImageClassification(T.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=5)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        model.vit.embeddings.position_embeddings[:, :, MARK] = -1.0
        model.vit.embeddings.position_embeddings[0, list(CORNERS), MARK] = 6.0
        mlp = model.vit.layers[1].mlp
        mlp.fc1.weight[NEURON] = 0.0
        mlp.fc1.weight[NEURON, MARK] = 4.0
        mlp.fc1.bias[NEURON] = -8.0
        mlp.fc2.weight[CHANNEL, NEURON] = writes
    return model


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def by_hand(model: T.ViTForImageClassification, pictures: torch.Tensor, units: list[int], number: int) -> torch.Tensor:
    """The logits of a ViT with registers, from its weights alone."""
    weights = {name.removeprefix("vit."): tensor for name, tensor in model.state_dict().items()}

    def linear(name: str, values: torch.Tensor) -> torch.Tensor:
        return values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(values, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    hidden = model.vit.embeddings(pictures)
    hidden = torch.cat((hidden[:, :1], torch.zeros(len(pictures), number, 32), hidden[:, 1:]), 1)
    for layer in range(3):
        at, own = f"layers.{layer}", norm(f"layers.{layer}.layernorm_before", hidden)
        q, k, v = (linear(f"{at}.attention.{kind}_proj", own).unflatten(2, (2, 16)).transpose(1, 2) for kind in ("q", "k", "v"))
        heads = ((q @ k.mT / 4.0).softmax(-1) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + linear(f"{at}.attention.o_proj", heads)
        inner = functional.gelu(linear(f"{at}.mlp.fc1", norm(f"{at}.layernorm_after", hidden)))
        for unit in units if layer == 1 else []:
            column = inner[:, :, unit]
            for row in column:
                largest = row[row.abs().argmax()].clone()
                row[1 + number :] = 0.0
                row[1 : 1 + number] = largest
        hidden = hidden + linear(f"{at}.mlp.fc2", inner)
    return linear("classifier", norm("layernorm", hidden)[:, 0])


@pytest.mark.parametrize("number", [1, 3])
def test_outputs_are_those_of_a_forward_by_hand(pictures, number):
    """Sums of at most 48 float32 terms in another order, over three blocks and values up to 40."""
    model = vit(writes=40.0)
    with torch.no_grad(), add_registers(model, {WRITER: [NEURON, 3]}, number=number):
        found = model(pixel_values=pictures).logits
        torch.testing.assert_close(found, by_hand(model, pictures, [NEURON, 3], number), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found, by_hand(model, pictures, [], number), atol=1e-2)


def test_afterwards_the_model_is_as_it_was(pictures):
    model = vit(writes=40.0)
    with torch.no_grad():
        before = model(pixel_values=pictures).logits
        with pytest.raises(RuntimeError, match="stop"), add_registers(model, {WRITER: [NEURON]}):
            raise RuntimeError("stop")
        registers = add_registers(model, {WRITER: [NEURON]}, number=2)
        assert positions_of(model, {"pixel_values": pictures[:1]}).names[:4] == (
            "[CLS]", "register 0", "register 1", "corner patch (0, 0)",
        )  # fmt: skip
        registers.remove()
        registers.remove()
        assert torch.equal(model(pixel_values=pictures).logits, before)
    assert positions_of(model, {"pixel_values": pictures[:1]}).names[:2] == ("[CLS]", "corner patch (0, 0)")


def test_probes_see_the_registers_and_outputs_do_not(pictures):
    model = vit(writes=40.0)
    with torch.no_grad(), add_registers(model, {WRITER: [NEURON]}, number=2), attend(model, [SinkRate()]) as session:
        output = model.vit(pixel_values=pictures)
    assert output.last_hidden_state.shape == (4, 17, 32)
    assert session.table().query("metric == 'gu2024'")["key_position"].max() == 18


def test_the_spike_of_a_planted_neuron_moves_to_the_registers(pictures):
    model = vit(writes=60.0)
    samples = Samples({"pixel_values": pictures}, kind="image")
    found, rows = locate_origins(model, samples, Sinks(), controls=1, registers=2)
    (origin,) = found.origins
    assert (origin.positions, origin.block, [unit.unit for unit in origin.units]) == (list(CORNERS), 1, [NEURON])
    edits = {(edit.on, edit.edit): edit for edit in origin.edits}
    moved, silenced = edits["registers", "moved"], edits["units", "zero"]
    assert origin.spike > 20
    assert moved.spike < 0.3 * origin.spike
    assert moved.spike == pytest.approx(silenced.spike, rel=0.3)
    assert moved.loss is None  # without classes there is none
    assert 0 < origin.registers.weight < 1
    assert origin.registers.number == 2

    def classes(logits: torch.Tensor) -> np.ndarray:
        return logits.double().softmax(-1).numpy()

    with torch.no_grad():
        clean, other = classes(model(pixel_values=pictures).logits), classes(by_hand(model, pictures, [NEURON], 2))
    assert origin.registers.divergence.mean == pytest.approx(
        float((clean * np.log(clean / other)).sum(1).mean()), rel=1e-3, abs=1e-6
    )
    rows = {(row["metric"].name, row.get("intervention")) for row in rows}
    assert {("register_weight", "registers: moved"), ("class_divergence", "units: zero")} <= rows
    assert locate_origins(model, samples, Sinks(), controls=1)[0].origins[0].registers is None


@pytest.mark.parametrize(
    ("neurons", "number", "message"),
    [
        ({WRITER: [NEURON]}, 0, "`number` 0 must be 1 or more"),
        ({WRITER: []}, 1, "name the neurons that are moved"),
        ({"vit.layers.9.mlp.fc2": [1]}, 1, "ViTForImageClassification has no linear map 'vit.layers.9.mlp.fc2'"),
        ({"vit.layers.1": [1]}, 1, "has no linear map 'vit.layers.1'"),
        ({WRITER: [48]}, 1, "has no neuron 48; expected 0 to 47"),
    ],
)
def test_what_names_no_neuron_is_refused(neurons, number, message):
    with pytest.raises(ConfigurationError, match=message):
        add_registers(vit(), neurons, number=number)


def test_models_without_room_for_a_token_are_refused():
    text = T.GPT2LMHeadModel(T.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    windows = T.SwinModel(T.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=4))
    beit = T.BeitModel(T.BeitConfig(**SIZES, image_size=16, patch_size=4, use_relative_position_bias=True))
    for model, message in (
        (text, "GPT2LMHeadModel reads no pictures"),
        (windows, "SwinModel (reads pictures in windows|adds a bias)"),
        (beit, "BeitModel adds a bias for each pair of positions"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            add_registers(model, {"a": [0]})
    with pytest.raises(ConfigurationError, match="`registers` -1 must be 0 or more"):
        locate_origins(vit(), Samples({"pixel_values": torch.zeros(2, 3, 16, 16)}, kind="image"), Sinks(), registers=-1)
