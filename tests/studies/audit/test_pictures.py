"""An audit of pictures and of sound: what it writes, and which sections it does not have."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import DetrConfig, DetrImageProcessor, DetrModel, ResNetConfig, ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from sinklab import audit, find_origin, measure
from sinklab.errors import ConfigurationError
from sinklab.models.loading import wrap_model
from sinklab.studies.audit.page import layer_figures, read_audit
from sinklab.studies.quantize.quantize import quantize

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def processor(edge):
    return ViTImageProcessorPil(size={"height": edge, "width": edge})


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SIZES, image_size=56, patch_size=8, num_labels=3)).eval()
    loaded = wrap_model(model, processor=processor(56), name="toy")
    folder = tmp_path_factory.mktemp("pictures") / "audit"
    return model, audit(loaded, samples=4, threshold=0.075, certificate=True, causes=True, out=folder)


def test_the_summary_names_what_it_found_and_what_there_is_not(audited):
    summary = audited[1].summary
    assert (summary["kind"], summary["seq_len"], summary["loss"], summary["loss_kind"]) == ("image", 50, None, "class")
    assert [condition["corpus"] for condition in summary["conditions"]] == ["photographs", "noise", "constant"]
    # Attention of a random model looks everywhere alike: four of 50 positions get 0.08 of it.
    assert summary["sinks"]["sinks"][0]["name"] == "the corner patches"
    assert summary["sinks"]["sinks"][0]["positions"] == [1, 7, 43, 49]
    assert summary["sink_role"] == "the corner patches (positions 1, 7, 43, 49)"
    for section in ("cache", "certificate", "causes"):
        assert summary[section]["refused"].startswith("not for a model of pictures: ")
    assert summary["bos_name"] == ""
    record = json.loads((audited[1].folder / "run.json").read_text())
    assert (record["corpus"]["name"], record["config"]["seq_len"]) == ("photographs", 50)


def test_a_length_that_pictures_do_not_have_is_refused(audited):
    loaded = wrap_model(audited[0], processor=processor(56), name="toy")
    commands = [
        lambda **given: audit(loaded, **given),
        lambda **given: find_origin(loaded, **given),
        lambda **given: measure(loaded, probes=["sink_rate"], **given),
        lambda **given: quantize(loaded, calibration=2, **given),
    ]
    said = "`seq_len` 128 has no effect on ViTForImageClassification, whose pictures have 50 positions each; leave it out"
    for command in commands:
        with pytest.raises(ConfigurationError, match=said):
            command(samples=4, seq_len=128)
    assert len(measure(loaded, probes=["sink_rate"], samples=2, seq_len=50).table)


def toy_detr():
    """16 places of a picture in the encoder, 5 queries for what there is in it in the decoder."""
    torch.manual_seed(0)
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, out_features=["stage4"])
    sizes = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 5}
    return DetrModel(DetrConfig(**sizes, backbone_config=backbone, use_timm_backbone=False)).eval()


def test_numbers_by_layer_are_those_of_one_kind_of_attention(tmp_path):
    """Both kinds of a decoder's attention are numbered from 0."""
    detr = toy_detr()
    # A sharp encoder, so that its numbers are not those of cross-attention, which looks at as many keys.
    for layer in detr.encoder.layers:
        layer.self_attn.q_proj.weight.data *= 400
        layer.self_attn.k_proj.weight.data *= 400
    reads = DetrImageProcessor(size={"height": 128, "width": 128})
    result = audit(wrap_model(detr, processor=reads, name="toy"), samples=3, out=tmp_path / "audit")
    table = result.table
    of_layer = table[(table.metric == "entropy") & (table.corpus == "photographs") & table.layer.notna()]
    mean = of_layer.groupby(["part", "layer"]).value.mean()
    assert abs(mean["encoder", 0] - mean["cross-attention", 0]) > 0.1
    view = read_audit(result.folder)
    own = {layer: mean[part, layer] for part, layer in (("encoder", 0), ("encoder", 1), ("decoder", 2), ("decoder", 3))}
    assert view.numbers.by_layer("entropy", "entropy") == pytest.approx(own, rel=1e-6)
    figures = {
        figure["title"].partition(",")[0]: figure for figure in layer_figures([(part.part, part) for part in view.views])
    }
    drawn = {series["name"]: series["y"] for series in figures["Entropy of attention"]["series"]}
    assert list(drawn) == ["encoder", "decoder", "cross-attention"]
    assert drawn["cross-attention"] == pytest.approx([mean["cross-attention", 0], mean["cross-attention", 1]], rel=1e-3)


def test_the_sinks_of_encoder_and_decoder_of_pictures_are_found_apart(tmp_path):
    """A sink at query 3 of the decoder is none at place 3 of the picture, and its heads are one of 4 and not one of 8."""
    detr = toy_detr()

    def only_third(module, inputs, output):
        keys = torch.zeros_like(output)
        keys[:, 3, :8] = 60  # head 0
        return keys

    attention = detr.decoder.layers[0].self_attn
    attention.k_proj.register_forward_hook(only_third)
    attention.q_proj.register_forward_hook(lambda module, inputs, output: torch.ones_like(output))
    reads = DetrImageProcessor(size={"height": 128, "width": 128})
    result = audit(wrap_model(detr, processor=reads, name="toy"), samples=8, out=tmp_path / "audit")
    summary = result.summary
    assert [(part["part"], part["num_heads"]) for part in summary["parts"]] == [
        ("encoder", 4), ("decoder", 4), ("cross-attention", 4)
    ]  # fmt: skip
    encoder, decoder, cross = summary["parts"]
    assert encoder["sinks"]["sinks"] == cross["sinks"]["sinks"] == []
    (sink,) = decoder["sinks"]["sinks"]
    assert (sink["position"], sink["rate"], sink["sinking"]) == (3, 25.0, 1)
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    conditions = re.findall(r'<tr><th scope="row">(encoder|decoder) · noise</th><td>([^<]*)</td>', page)
    assert conditions == [("encoder", "none"), ("decoder", "position 3")]
