"""What a user hands over by mistake in Python: a name for a model, a list for one thing, text or a fraction for a number."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.conftest import make_sinklm, make_tokenizer

import sinklab
from sinklab.errors import ConfigurationError, InputError

IDS = torch.arange(2, 30)[None]


@pytest.fixture
def model():
    return make_sinklm().eval()


@pytest.mark.parametrize(
    ("name", "says"),
    [(3, "int"), (None, "NoneType"), (["embedded:softmax"], "list"), (torch.nn.Linear(1, 1), "Linear; wrap_model")],
)
def test_a_model_is_loaded_by_its_name(name, says):
    with pytest.raises(InputError, match=f"the name of a model is a text or a path, and this is of {says}"):
        sinklab.load_model(name)


def test_a_device_of_torch_is_one():
    assert sinklab.load_model("embedded:softmax", device=torch.device("cpu")).device == torch.device("cpu")


def test_a_model_is_not_saved_to_a_file(model, tmp_path):
    """transformers says so in its log, and returns as if it had."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file is a file; give the directory that the checkpoint goes to"):
        sinklab.save_model(model, tmp_path / "file", make_tokenizer())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_stream_ends_after_a_whole_number_of_tokens(model):
    """After 2.5 it never did."""
    with pytest.raises(ConfigurationError, match=r"max_new_tokens must be a whole number, got 2\.5"):
        sinklab.stream(model, IDS, max_new_tokens=2.5)
    with pytest.raises(ConfigurationError, match="max_new_tokens 0 must be 1 or more"):
        sinklab.stream(model, IDS, max_new_tokens=0)


def test_registers_go_into_a_model_of_pictures():
    with pytest.raises(InputError, match="'org/vit' is the name of a model; load it first"):
        sinklab.add_registers("org/vit", {})
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16
    )
    with pytest.raises(ConfigurationError, match="`neurons` is of int; expected numbers by names of linear maps"):
        sinklab.add_registers(transformers.ViTModel(config), 1)


def test_a_table_may_be_named_by_its_path(tmp_path):
    callback = sinklab.SinkCallback(torch.zeros(1, 64, dtype=torch.int64), table=str(tmp_path / "sinks.parquet"))
    assert callback.table.path == tmp_path / "sinks.parquet"


def test_settings_of_a_stream(model):
    with pytest.raises(
        TypeError, match=r"stream\(\) got an unexpected keyword argument 'foo'; its settings are policy, tokenizer"
    ):
        sinklab.stream(model, IDS, foo=1)
    for settings, says in (
        ({"temperature": "1"}, "temperature is '1'; expected a number"),
        ({"top_p": [0.5], "temperature": 1}, "top_p is of list; expected a number"),
        ({"top_k": 2.5, "temperature": 1}, r"top_k must be a whole number, got 2\.5"),
        ({"seed": -1, "temperature": 1}, "seed -1 must be 0 or more"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            sinklab.Stream(model, **settings)
