"""Checkpoints whose config, weights or tokenizer do not belong together."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sinklab.errors import InputError
from sinklab.models.loading import load_model


def set_fields(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_a_config_of_another_shape_is_refused(own_checkpoint):
    set_fields(own_checkpoint, intermediate_size=64)
    with pytest.raises(
        InputError, match=r"config.json makes layers.0.mlp.down_proj.weight of shape \(32, 64\), and .* \(32, 48\)"
    ):
        load_model(str(own_checkpoint))


def test_a_matrix_that_is_tied_several_times_counts_once_on_the_disk(tmp_path):
    config = transformers.T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("dtype", "written"),
    [
        (torch.int32, "I32"),
        (torch.int64, "I64"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.complex64, "C64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_what_is_no_weight_is_not_cast_to_one(own_checkpoint, dtype, written):
    key = "layers.1.mlp.up_proj.weight"
    change_tensors(own_checkpoint, lambda tensors: tensors | {key: tensors[key].to(dtype)})
    with pytest.raises(InputError, match=rf"holds {key} in {written}, .*a weight is one of BF16, F16, F32, F64"):
        load_model(str(own_checkpoint))


def test_half_and_double_precision_are_weights(own_checkpoint):
    change_tensors(
        own_checkpoint,
        lambda tensors: {
            key: tensor.to((torch.float16, torch.bfloat16, torch.float64)[index % 3])
            for index, (key, tensor) in enumerate(sorted(tensors.items()))
        },
    )
    assert load_model(str(own_checkpoint)).dtype == torch.float32


def test_tables_of_positions_and_masks_may_be_whole_numbers(tmp_path):
    """Older checkpoints hold them, with the prefix of their class or without."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    extra = {
        "bert.embeddings.position_ids": torch.arange(512)[None],
        "embeddings.token_type_ids": torch.zeros(1, 512, dtype=torch.int64),
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
    }
    change_tensors(tmp_path, lambda tensors: tensors | extra)
    assert load_model(str(tmp_path)).num_parameters > 0


def test_a_base_model_under_a_head_lacks_the_prefix_and_is_seen(tmp_path):
    """transformers adds the prefix itself, so the name on the disk is not the name in the model."""
    config = transformers.GPT2Config(vocab_size=64, n_layer=1, n_head=2, n_embd=16, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda tensors: {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()})
    assert load_model(str(tmp_path)).num_parameters == model.num_parameters()
    change_tensors(tmp_path, lambda tensors: tensors | {"wte.weight": tensors["wte.weight"].to(torch.int32)})
    with pytest.raises(InputError, match=r"holds wte\.weight in I32"):
        load_model(str(tmp_path))


def change(folder, edit, name="tokenizer.json"):
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    edit(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_ids_that_the_model_does_not_have(own_checkpoint):
    change(
        own_checkpoint,
        lambda content: content["model"].update(vocab={word: 7 * number for word, number in content["model"]["vocab"].items()}),
    )
    encoder = load_model(str(own_checkpoint)).encoder
    with pytest.raises(InputError, match=r"gives token \d+, and the model's embedding has 300 rows"):
        encoder.encode("return self")


def test_a_bos_token_beyond_the_embedding_is_none(own_checkpoint):
    change(own_checkpoint, lambda content: content.update(bos_token="<new>"), "tokenizer_config.json")
    encoder = load_model(str(own_checkpoint)).encoder
    assert encoder.tokenizer.bos_token_id >= encoder.rows == 300
    assert encoder.bos_token_id == 0  # what the config says
