"""What a config says of a model: its layers, and how long a text it can read."""

import pytest
import torch
from tests.conftest import make_sinklm
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    BertConfig,
    CLIPConfig,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    OPTConfig,
    RobertaConfig,
    T5Config,
    WhisperConfig,
)

from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, UnknownNameError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.models.positions import learned_positions, length_warning, require_lengths, require_positions, trained_length

GU_60M = {
    "vocab_size": 50432, "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
SMALLEST = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 5, "num_attention_heads": 2}


def parameters_of(fields: dict) -> int:
    with torch.device("meta"):
        return SinkLM(SinkLMConfig(**fields)).num_parameters()


def test_the_60m_model_of_gu_et_al():
    block = 4 * 768**2 + 3 * 768 * 1536 + 2 * 768
    assert round(block / 1e6, 2) == 5.90
    assert round((10 * block + 768) / 1e6, 1) == 59.0
    assert round(50432 * 768 / 1e6, 1) == 38.7
    assert parameters_of(GU_60M) == 10 * block + 768 + 2 * 50432 * 768


@pytest.mark.parametrize(
    ("fields", "fewer"),
    [
        ({"feed_forward": "relu"}, 5 * 64 * 176),
        ({"head_merge": "add"}, 5 * 32 * 64),
        ({"num_key_value_heads": 1}, 5 * 2 * 32 * 64),
        ({"norm_placement": "post"}, 64),
        ({"norm_placement": "sandwich"}, -5 * 2 * 64),
        ({"norm": "layer_norm"}, -11 * 64),
        ({"tie_word_embeddings": False}, -512 * 64),
        ({"position": {"name": "learned"}}, -256 * 64),
        ({"position": {"name": "relative"}}, -32 * 2),
        ({"head_dim": 8}, 5 * 4 * 64 * 48),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_what_an_axis_costs(fields, fewer):
    assert parameters_of(SMALLEST) - parameters_of(SMALLEST | fields) == fewer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads 2 must divide num_attention_heads 3"),
        ({"hidden_size": 100, "num_attention_heads": 3}, "100 is not a multiple of num_attention_heads 3; set head_dim"),
        ({"prefix": 256}, "prefix 256 leaves no token with a loss in max_position_embeddings 256"),
        ({"prefix": 4, "window": 8}, "prefix and window cannot be combined"),
        ({"head_dim": 7}, "head_dim 7 must be even: position scheme 'rotary' rotates pairs"),
        ({"hidden_size": 9, "head_dim": 4, "position": {"name": "sinusoid"}}, "'sinusoid' needs an even hidden_size.* got 9"),
        ({"position": {"name": "rotary", "thta": 1e6}}, r"'rotary': there is no field 'thta'. Did you mean 'theta'\?"),
        ({"position": {"name": "relative", "num_buckets": 8, "max_distance": 4}}, "max_distance 4 must exceed num_buckets / 2"),
        ({"widow": 4}, r"there is no field 'widow'. Did you mean 'window'\?"),
        ({"operation": {"name": "sigmoid", "beta": 1.0}}, "operation 'sigmoid' has no setting 'beta'"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        Architecture(**fields)


def test_an_unknown_position_scheme_is_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'alibi'"):
        Architecture(position={"name": "alibbi"})


def test_an_odd_head_is_fine_where_nothing_turns_it():
    assert Architecture(head_dim=7, position={"name": "alibi"}).head_size == 7


def test_the_config_has_the_fields_flat_and_resolved():
    config = SinkLMConfig.from_architecture(Architecture(hidden_size=64, num_attention_heads=4, window=8), bos_token_id=0)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads, config.window) == (64, 16, 4, 8)
    assert config.bos_token_id == 0
    assert config.architecture.head_size == 16


def test_the_config_comes_back_from_its_file(tmp_path):
    architecture = Architecture(
        norm_placement="sandwich",
        position={"name": "relative", "num_buckets": 16},
        operation={"name": "sigmoid", "bias": -3.0},
        prefix=5,
        tie_word_embeddings=False,
    )
    config = SinkLMConfig.from_architecture(architecture, eos_token_id=1)
    config.save_pretrained(tmp_path)
    assert SinkLMConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_a_config_refuses_what_it_does_not_know():
    with pytest.raises(
        ConfigurationError, match=r"no field 'rope_theta'.* Fields of the architecture: vocab_size, hidden_size"
    ):
        SinkLMConfig(rope_theta=1e6)
    with pytest.raises(ConfigurationError, match=r"no field 'hiden_size'. Did you mean 'hidden_size'\?"):
        SinkLMConfig(hiden_size=64)


def test_a_config_changed_afterwards_is_validated_by_the_model():
    config = SinkLMConfig()
    config.window = -1
    with pytest.raises(ConfigurationError, match="window = -1"):
        SinkLM(config)


SHAPES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}

WITH_TABLE = {
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_head=2, n_layer=1, n_positions=12),
    "bert": BertConfig(**SHAPES, max_position_embeddings=12),
    "roberta": RobertaConfig(**SHAPES, max_position_embeddings=14, pad_token_id=1),
    "opt": OPTConfig(
        vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, ffn_dim=16, word_embed_proj_dim=16,
        max_position_embeddings=12,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_TABLE)
def test_a_table_ends_where_the_model_fails(name):
    model = AutoModel.from_config(WITH_TABLE[name]).eval()
    assert learned_positions(model) == 12
    tokens = torch.arange(2, 15)[None]
    with torch.no_grad():
        model(tokens[:, :12])
        require_positions(model, 12)
        with pytest.raises((IndexError, RuntimeError), match=r"index|size"):
            model(tokens)
    with pytest.raises(ConfigurationError, match=r"has embeddings for 12 positions and a text has 13 tokens; choose a shorter"):
        require_positions(model, 13)


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SHAPES, max_position_embeddings=12), T5Config(d_model=16, num_layers=1, vocab_size=40)]
)
def test_positions_that_are_computed_have_no_end(config):
    model = AutoModel.from_config(config)
    assert learned_positions(model) is None
    require_positions(model, 10**6)


def test_a_tower_of_pictures_says_nothing_of_texts():
    sizes = {key: size for key, size in SHAPES.items() if key != "vocab_size"}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)  # five positions
    text = LlamaConfig(**SHAPES, max_position_embeddings=64)
    model = AutoModelForImageTextToText.from_config(
        LlavaConfig(text_config=text, vision_config=vision, image_token_id=39)
    ).eval()
    assert learned_positions(model) is None
    require_positions(model, 20)
    with torch.no_grad():
        model(torch.arange(2, 22)[None])
    both = CLIPConfig(text_config={**SHAPES, "max_position_embeddings": 12}, vision_config=vision.to_dict())
    assert learned_positions(AutoModel.from_config(both)) == 12


def test_the_table_of_a_decoder_beside_an_encoder_of_sound():
    """Before, a target that is too long ended in an index of torch."""
    config = WhisperConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_target_positions=12, max_source_positions=5, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = AutoModel.from_config(config).eval()
    assert learned_positions(model) == trained_length(model) == 12
    sound, targets = torch.zeros(1, 8, 10), torch.arange(4, 17)[None]
    with torch.no_grad():
        model(input_features=sound, decoder_input_ids=targets[:, :12])
        with pytest.raises((IndexError, RuntimeError), match=r"index|size"):
            model(input_features=sound, decoder_input_ids=targets)
    with pytest.raises(ConfigurationError, match="WhisperModel has embeddings for 12 positions and a text has 13 tokens"):
        require_lengths(model, Samples({"input_features": sound, "decoder_input_ids": targets}))


def test_past_the_trained_length_there_is_a_hint():
    model = make_sinklm()
    assert trained_length(model) == 128
    assert length_warning(model, 128) == ""
    assert length_warning(model, 129).startswith("The samples have 129 tokens and the model was made for 128: past that length")


@pytest.mark.parametrize("operation", [{"name": "softmax"}, {"name": "sink_token", "count": 3}])
def test_positions_of_learned_tokens_in_front_are_none_of_a_text(operation):
    config = SinkLMConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, head_dim=16,
        max_position_embeddings=12, position={"name": "learned"}, operation=operation,
    )  # fmt: skip
    model = SinkLM(config).eval()
    assert learned_positions(model) == 12
    require_positions(model, 12)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 12, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match="SinkLM has embeddings for 12 positions and a text has 13 tokens"):
        require_positions(model, 13)
