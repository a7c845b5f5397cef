"""How long a text a model can read: the first length that is refused is the first that fails."""

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
from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.models.positions import learned_positions, length_warning, require_lengths, require_positions, trained_length

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}

WITH_TABLE = {
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_head=2, n_layer=1, n_positions=12),
    "bert": BertConfig(**SIZES, max_position_embeddings=12),
    "roberta": RobertaConfig(**SIZES, max_position_embeddings=14, pad_token_id=1),
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
    "config", [LlamaConfig(**SIZES, max_position_embeddings=12), T5Config(d_model=16, num_layers=1, vocab_size=40)]
)
def test_positions_that_are_computed_have_no_end(config):
    model = AutoModel.from_config(config)
    assert learned_positions(model) is None
    require_positions(model, 10**6)


def test_a_tower_of_pictures_says_nothing_of_texts():
    sizes = {key: size for key, size in SIZES.items() if key != "vocab_size"}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)  # five positions
    text = LlamaConfig(**SIZES, max_position_embeddings=64)
    model = AutoModelForImageTextToText.from_config(
        LlavaConfig(text_config=text, vision_config=vision, image_token_id=39)
    ).eval()
    assert learned_positions(model) is None
    require_positions(model, 20)
    with torch.no_grad():
        model(torch.arange(2, 22)[None])
    both = CLIPConfig(text_config={**SIZES, "max_position_embeddings": 12}, vision_config=vision.to_dict())
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
