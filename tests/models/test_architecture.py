"""Architecture: the one description of a SinkLM's shape; fields that cannot go together are refused."""

import pytest
import torch

from sinklab.errors import ConfigurationError, UnknownNameError
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig

GU_60M = {
    "vocab_size": 50432,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
GU_1B = GU_60M | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16}
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
        ({"norm": "dynamic_tanh"}, -11 * 65),
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
