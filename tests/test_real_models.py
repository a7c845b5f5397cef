"""Numbers and verdicts on models that others trained: those of ``make models``, and those that SINKLAB_REAL_MODELS names."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tests.conftest import real
from tests.streaming.decoders import slow_logits
from transformers import ViTForImageClassification

from sinklab import audit, show
from sinklab.corpora import resolve_corpus
from sinklab.corpora._reading import read_samples
from sinklab.corpora.samples import Samples
from sinklab.corpora.text_file import TextFile
from sinklab.interventions.resample_head import ResampleHead
from sinklab.models.loading import load_model
from sinklab.models.losses import IGNORED, cross_entropies, hide_tokens
from sinklab.sinks import Head, Sinks, find_sinks
from sinklab.streaming.perplexity import losses
from sinklab.studies.cache.comparison import compared
from sinklab.studies.causes.effects import HeadEdit, one_by_one
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.readout import MaskedToken
from sinklab.studies.causes.samples import Samples as MaskedSamples
from sinklab.studies.origin.measurement import locate_origins

pytestmark = pytest.mark.real


@pytest.mark.parametrize("bos", [True, False])
def test_a_llama_has_its_sink_at_bos_and_none_without(bos):
    loaded = load_model(str(real("tiny1m")))
    tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=64, samples=16, seed=0, bos=bos)
    found = find_sinks(loaded.model, tokens, decode=lambda token: loaded.tokenizer.decode([token]))
    if not bos:
        assert found.main is None
        return
    assert (found.main.position, found.main.text, found.main.token_share) == (0, "<s>", 1.0)
    assert 2 <= found.main.sinking < len(found.heads) == 8
    assert found.positions == [0]
    assert found.followed == found.silent == ()


def test_the_sink_of_a_llama_is_written_by_one_neuron():
    loaded = load_model(str(real("tiny1m")))
    tokens = resolve_corpus("python_source").sample(loaded.encoder, seq_len=64, samples=8, seed=0, bos=True)
    found = find_sinks(loaded.model, tokens)
    (origin,) = locate_origins(loaded.model, Samples.of_tokens(tokens), found, controls=2)[0].origins
    assert (origin.positions, origin.by, origin.block, origin.sublayer) == ([0], "norm", 0, "mlp")
    assert [unit.unit for unit in origin.units] == [233]
    # Published beside the checkpoint, from plain code: it writes 18.9 of 19.8.
    assert origin.units[0].size == pytest.approx(18.9, abs=0.05)
    assert origin.norm == pytest.approx(19.8, abs=0.05)
    # With the whole write gone the heads of the last layer let go of BOS; there they gave it 0.24 and 0.28 on other texts.
    last = {head.head: (head.weight, head.edited["write zero"]) for head in origin.heads if head.layer == 3}
    assert all(before > 0.2 and after < before / 2 for before, after in last.values())


def test_the_spike_of_a_vision_transformer_is_one_neuron_and_goes_without_the_sink():
    model = ViTForImageClassification.from_pretrained(real("vit-tiny-patch16-224")).eval()
    # Smooth noise: the spike stands at the four corners whatever the picture is.
    draw = torch.Generator().manual_seed(0)
    pictures = torch.nn.functional.interpolate(torch.randn(2, 3, 14, 14, generator=draw), size=(224, 224), mode="bilinear")
    samples = Samples({"pixel_values": pictures.clamp(-1, 1)}, kind="image")
    with torch.no_grad():
        samples = dataclasses.replace(samples, targets=model(pictures.clamp(-1, 1)).logits.argmax(-1))
    (origin,) = locate_origins(model, samples, Sinks(), controls=1, registers=4, batch_size=16)[0].origins
    assert (origin.kind, origin.positions, origin.block, origin.sublayer) == ("spike", [1, 14, 183, 196], 7, "mlp")
    assert [unit.unit for unit in origin.units] == [417]
    (channel,) = origin.channels
    assert channel.channel == 41
    assert origin.units[0].in_channel / channel.value > 0.98
    assert [(weight.part, weight.channel, weight.rank) for weight in origin.weights[:1]] == [("[:, 417]", 41, 1)]
    assert origin.spike > 500
    zero = next(edit for edit in origin.edits if (edit.on, edit.edit) == ("units", "zero"))
    assert zero.spike < 40
    assert zero.weight > 5 * origin.uniform
    assert "silenced, the spike goes" in origin.verdict
    # Four tokens that were never trained take the sink over, and the classes stay nearer than with the neuron silenced.
    moved = next(edit for edit in origin.edits if edit.on == "registers")
    assert moved.spike < 40
    assert origin.registers.weight > 0.5 > 0.25 > moved.weight
    assert origin.weight > 0.7
    assert origin.registers.divergence.mean < origin.registers.silenced.mean / 2


def test_a_tokenizer_of_chemistry_reads_reactions_and_no_python():
    path = real("rxnmapper-albert")
    encoder = load_model(str(path)).encoder
    arguments = {"seq_len": 32, "samples": 8, "seed": 0, "bos": True}
    own = read_samples(TextFile(path / "reactions.txt"), encoder, **arguments)
    other = read_samples(resolve_corpus("python_source"), encoder, **arguments)
    assert own.unread_share < 0.01
    assert own.warning == ""
    assert other.unread_share > 0.5
    assert other.warning


def test_the_head_that_maps_atoms_says_more_of_the_product_than_any_other_of_its_layer():
    """Head 5 of the eleventh run of the one shared layer (Schwaller et al. 2021); masked atoms of the product are scored."""
    path = real("rxnmapper-albert")
    loaded = load_model(str(path))
    tokenizer, (front, back) = loaded.tokenizer, loaded.encoder.frame(bos=True)
    read = (
        tokenizer(line, add_special_tokens=False)["input_ids"] for line in (path / "reactions.txt").read_text().splitlines()
    )
    whole = [[*front, *tokens, *back] for tokens in read if 40 <= len(tokens) <= 62][:32]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in whole], True, tokenizer.pad_token_id)
    atoms = {
        number
        for token, number in tokenizer.get_vocab().items()
        if re.fullmatch(r"\[(?!CLS|SEP|MASK|PAD|UNK).+|[A-Za-z]+", token)
    }
    product = (ids == tokenizer.convert_tokens_to_ids(">>")).cumsum(1) == 1
    hidden, asked = hide_tokens(ids, product & torch.isin(ids, torch.tensor(sorted(atoms))), tokenizer.mask_token_id, share=0.2)
    inputs = {"input_ids": hidden, "attention_mask": (ids != tokenizer.pad_token_id).long()}
    samples = MaskedSamples(inputs, torch.where(asked == IGNORED, -1, 0), ids)
    heads, variants = [Head(10, head) for head in range(8)], [HeadEdit("resample", (ResampleHead(),))]
    found = measure_effects(loaded.model, samples, MaskedToken(), variants, heads)
    assert found.record == {"albert.encoder.albert_layer_groups.0.albert_layers.0.attention#10": "replayed"}
    first = samples.part(0, 4)  # a text is given what its head says of the next one of its batch
    one = one_by_one(loaded.model, first, MaskedToken(), variants, heads[5:6])
    assert_allclose(measure_effects(loaded.model, first, MaskedToken(), variants, heads[5:6]).loss, one.loss, rtol=0, atol=1e-5)
    changed = found.divergence[0, :, :, 0].mean(1)
    assert changed.argmax() == 5
    assert changed[5] > 1.5 * np.delete(changed, 5).max()


def test_a_vision_transformer_has_its_sink_at_the_corner_patches(tmp_path):
    """The corners were found, and their weight in block 10 (0.71), by other code and on other photographs."""
    result = audit(str(real("vit-tiny-patch16-224")), samples=4, cache=False, out=tmp_path / "audit")
    (main, *_), corners = result.summary["sinks"]["sinks"], [1, 14, 183, 196]
    assert (main["kind"], main["name"], main["positions"]) == ("group", "the corner patches", corners)
    assert main["sinking"] in range(10, 15)
    assert "the corner patches: 12 of 36 heads" in result.summary["finding"]
    on_noise = result.summary["conditions"][1]
    assert (on_noise["corpus"], on_noise["sink"]) == ("noise", "the corner patches (positions 1, 14, 183, 196)")
    table = result.table.query("corpus == 'photographs' and metric == 'mean_weight' and layer == 10")
    assert table[table["key_position"].isin(corners)]["value"].sum() / 3 == pytest.approx(0.71, abs=0.1)
    norms = result.table.query("corpus == 'photographs' and metric == 'hidden_norm'").set_index(["layer", "key_position"])[
        "value"
    ]
    ratios = [norms[layer, 1] / norms[layer, 90] for layer in range(12)]
    assert max(ratios[:7]) < 3 < 6 < min(ratios[7:11]), ratios
    picture = next(iter(resolve_corpus("photographs").pictures(1, 224))).image
    shown = show(str(real("vit-tiny-patch16-224")), picture).sinks[0]
    assert shown["name"] == "the corner patches"
    assert {layer for layer, _, _ in shown["heads"]} <= set(range(8, 12))
    page = (tmp_path / "audit" / "report.html").read_text()
    assert "corner patches" in page
    result.show()


PROSE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so "
    "well fixed."
)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_losses_under_a_policy_are_those_of_the_published_rule_token_by_token(name):
    """In chunks, with the sinks apart and a large vocabulary, against every key rotated anew for every token."""
    loaded = load_model(str(real(name)))
    tokens = torch.tensor([loaded.encoder.encode(PROSE)[:40]])
    slow = cross_entropies(slow_logits(loaded.model, tokens, 2, 13)[:, :-1], tokens[:, 1:])
    fast = losses(loaded.model, tokens, {"name": "sink_window", "num_sinks": 2, "window": 13}, chunk=11)
    # Rounding of float32 over some tens of layers, whose largest hidden state is some 1e4 times the others.
    torch.testing.assert_close(fast, slow, atol=2e-3, rtol=0)
    # A window without the first tokens is another thing altogether.
    assert (losses(loaded.model, tokens, "window:window=15") - slow).abs().max() > 0.5


def test_the_cache_of_a_language_model_needs_its_first_token():
    loaded = load_model(str(real("smollm2-135m")))
    rows = torch.tensor(loaded.encoder.encode(PROSE * 8)[:320]).view(2, 160)
    found, _ = compared(
        loaded, rows, names=["full", "window", "sink_window"], budgets=[32], sinks=(0, 1, 4), corpus="prose",
        bos=False,
    )  # fmt: skip
    dense, alone, one, four = (entry.loss for entry in found.policies)
    assert dense < four < alone - 1
    assert one < alone - 1
    assert found.sinks_needed == "yes"
    assert all(4 <= entry.decoded_tokens < 32 for entry in found.policies)  # a step of so many parameters is timed less often
