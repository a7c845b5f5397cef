"""Models of texts with pictures in them: every patch by its row and column, in show(), sessions, find_sinks() and audits."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sinklab import attend, audit, find_sinks, load_model, show, wrap_model
from sinklab.attention.maps import AttentionMaps, picture_names

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
EYES = {"Qwen2VL": QWEN | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}}
EYES["Qwen2_5_VL"] = QWEN | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "fullatt_block_indexes": [1]}
EYES |= dict.fromkeys(("Llava", "Gemma3", "PaliGemma"), SIZES | {"image_size": 24, "patch_size": 4})

MORE = {"Gemma3": {"mm_tokens_per_image": 9}, "PaliGemma": {"projection_dim": 32}}


class Processor:
    """What processors of transformers make, without the one of videos, which needs torchvision."""

    def __init__(self, of):
        self.tokenizer, self.image_token, self.qwen = load_model("embedded:softmax").tokenizer, "<image>", of.startswith("Qwen")
        self.tokenizer.add_special_tokens({"additional_special_tokens": [self.image_token]})
        small = CLIPImageProcessorPil(size={"height": 24, "width": 24}, do_center_crop=False)
        qwen = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
        self.image_processor, self.number = (qwen, None) if self.qwen else (small, 9 if of == "Gemma3" else 36)

    def __call__(self, images, text, return_tensors):
        seen = dict(self.image_processor(images=images, return_tensors="pt"))
        number = self.number or int(seen["image_grid_thw"][0].prod()) // 4
        read = self.tokenizer(text.replace(self.image_token, self.image_token * number), return_tensors="pt")
        of_picture = (read["input_ids"] == len(self.tokenizer) - 1).long()
        return seen | dict(read) | {"mm_token_type_ids" if self.qwen else "token_type_ids": of_picture}


def toy(of, **more):
    torch.manual_seed(0)
    processor = Processor(of)
    words = len(processor.tokenizer)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = SIZES | {"num_key_value_heads": 2, "vocab_size": words, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 1}
    text |= {"rope_parameters": rope} if processor.qwen else {"model_type": "llama"} if of == "Llava" else {}
    config = getattr(transformers, f"{of}Config")(
        text_config=text, vision_config=EYES[of], image_token_id=words - 1, image_token_index=words - 1, **more
    )
    return getattr(transformers, f"{of}ForConditionalGeneration")(config).eval(), processor


def picture(seed=0, size=(24, 32)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


@torch.no_grad()
def embedded(model, given):
    """What enters the language model."""
    kept = []
    handle = model.get_decoder().register_forward_pre_hook(lambda module, args, named: kept.append(named), with_kwargs=True)
    model(**given)
    handle.remove()
    return kept[0]["inputs_embeds"][0]


@pytest.mark.parametrize("of", EYES)
def test_a_patch_is_called_by_its_place_in_the_picture(of):
    """In a tower whose blocks do nothing a patch of the picture changes the one token that has its name."""
    model, processor = toy(of, **MORE.get(of, {}))
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data.normal_()  # the projection of Gemma 3 begins at 0
    for name, parameter in model.get_encoder(modality="image").named_parameters():
        if re.search(r"(layers|blocks)\..*(out_proj|attn\.proj|fc2|down_proj)", name):
            parameter.data.zero_()
    plain = np.array(picture(size=(24, 32) if processor.qwen else (24, 24)))
    edge = 4 if processor.number == 36 else 8
    row, column = 2, 1
    plain[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge] = 0
    changed = plain.copy()
    changed[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge] = 255
    given = [processor(images=Image.fromarray(each), text="<image>\nWhat?", return_tensors="pt") for each in (plain, changed)]
    left, right = (embedded(model, each) for each in given)
    (at,) = (left - right).abs().amax(-1).gt(1e-6).nonzero()[:, 0].tolist()
    names = picture_names(model.config, given[0])[0]
    assert names[at].endswith(f"patch ({row}, {column})")
    assert names.count(None) == len(names) - (given[0]["input_ids"] == len(processor.tokenizer) - 1).sum()


@pytest.mark.parametrize("of", ["Qwen2VL", "Qwen2_5_VL", "Llava"])
def test_a_head_that_looks_at_a_patch_is_said_to(of, tmp_path):
    model, processor = toy(of)
    loaded, name = wrap_model(model, processor=processor, name="toy"), "patch (1, 1)"
    given = processor(images=picture(), text="<image>\nDescribe the picture.", return_tensors="pt")
    names = picture_names(model.config, given)[0]
    states = embedded(model, given)
    normed = states / states.pow(2).mean(-1, keepdim=True).sqrt()
    wanted = torch.linalg.lstsq(normed, 400.0 * torch.eye(len(names))[names.index(name)]).solution
    attention = model.get_decoder().layers[0].self_attn
    for projection, row in ((attention.q_proj, torch.ones(32)), (attention.k_proj, wanted)):
        projection.weight.data[15] = row  # the slowest pair of the rotation, of head 0
    for number in range(5):
        picture().save(tmp_path / f"{number}.png")
    view = show(loaded, picture(), threshold=0.2)
    assert view.sinks[0]["name"] == name
    assert 'id="picture-host"' in view.html
    assert show(loaded, given, threshold=0.2).sinks[0]["name"] == name
    two = {key: torch.cat([tensor, tensor]) for key, tensor in given.items()}
    with attend(model, [AttentionMaps()]) as session, torch.no_grad():
        model(**two)
    assert session.show(processor.tokenizer, threshold=0.2).sinks[0]["name"] == name
    assert [site.layer for site in session.sites] == [0, 1]  # those of the language model
    assert find_sinks(loaded, two, threshold=0.2, batch_size=1).main.describe() == f"{name} (position {names.index(name)})"
    result = audit(loaded, corpus=str(tmp_path), samples=5, threshold=0.2)
    assert (result.summary["sinks"]["sinks"][0]["name"], result.summary["loss"]) == (name, None)
    assert "in front of “Describe" in result.summary["samples_definition"]


def test_patches_that_are_not_accounted_for_have_no_name():
    model, processor = toy("Llava")
    given = processor(images=picture(), text="<image> and <image>", return_tensors="pt")
    both = given | {"pixel_values": given["pixel_values"].repeat(2, 1, 1, 1)}
    assert [name for name in picture_names(model.config, both)[0] if name][36] == "corner patch (0, 0) of picture 2"
    crops = given | {"pixel_values": given["pixel_values"][None]}
    for unknown in (given, crops, both | {"image_sizes": torch.tensor([[24, 24]] * 2)}, {"input_ids": given["input_ids"]}):
        assert picture_names(model.config, unknown) == []
