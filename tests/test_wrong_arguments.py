"""What a user hands over by mistake in Python: a name for a model, a list for one thing, text or a fraction for a number."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from tests.conftest import make_sinklm, make_tokenizer

import sinklab
from sinklab.cli.commands import find_commands
from sinklab.errors import ConfigurationError, InputError, SinklabError
from sinklab.policies.window import Window
from sinklab.probes.sink_rate import SinkRate
from sinklab.registry import operations
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.perplexity import decoding, losses

STEPS = "what is done and what there is in all"
IDS = torch.arange(2, 30)[None]


@pytest.fixture
def model():
    return make_sinklm().eval()


@pytest.fixture
def llama():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("given", [3, None, ["sigmoid"], ("sigmoid",)])
def test_a_plugin_is_no_number_and_no_list(given, llama, model):
    with pytest.raises(ConfigurationError, match=r"is no operation; expected one, its name, or \{.*\} with settings\. Known"):
        sinklab.attach(llama, given)
    with pytest.raises(ConfigurationError, match=r"is no .*policy; expected one"):
        sinklab.open_reader(model, given)
    assert operations.make(operations.make("sigmoid")).name == "sigmoid"


@pytest.mark.parametrize("example", [IDS, {"input_ids": [[1, 2]]}, "text"])
def test_an_example_is_tensors_by_name(example, llama):
    with pytest.raises(InputError, match=r"`example` is of \w+; give tensors by the names of arguments"):
        sinklab.attach(llama, "sigmoid", example=example)


@pytest.mark.parametrize("policy", ["window", None, ["window"]])
def test_a_cache_is_of_a_policy(policy):
    with pytest.raises(ConfigurationError, match=r"`policy` is of \w+, which is no policy; make one with .*open_reader"):
        PolicyCache(policy)
    with pytest.raises(ConfigurationError, match="SinkLM, which is no policy"):
        PolicyCache(make_sinklm(), Window(window=8))


@pytest.mark.parametrize(
    ("name", "says"),
    [(3, "int"), (None, "NoneType"), (["embedded:softmax"], "list"), (torch.nn.Linear(1, 1), "Linear; wrap_model")],
)
def test_a_model_is_loaded_by_its_name(name, says):
    with pytest.raises(InputError, match=f"the name of a model is a text or a path, and this is of {says}"):
        sinklab.load_model(name)


def test_a_device_of_torch_is_one():
    assert sinklab.load_model("embedded:softmax", device=torch.device("cpu")).device == torch.device("cpu")


def test_a_tokenizer_is_no_name(model, tmp_path):
    with pytest.raises(InputError, match="`tokenizer` is of str; give one of transformers, as AutoTokenizer loads it"):
        sinklab.wrap_model(model, "org/model")
    with pytest.raises(InputError, match="`tokenizer` is of str; give one of transformers, or none"):
        sinklab.save_model(model, tmp_path / "model", "org/model")
    assert not (tmp_path / "model").exists()


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


@pytest.mark.parametrize("threshold", ["0.3", [0.3], None])
def test_a_threshold_is_a_number(threshold, model):
    loaded = sinklab.wrap_model(model, make_tokenizer())
    calls = (
        lambda: SinkRate(threshold),
        lambda: sinklab.show(loaded, "import os", threshold=threshold),
        lambda: sinklab.SinkCallback(torch.zeros(1, 64, dtype=torch.int64), threshold=threshold),
    )
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"threshold`? .* must be a number in \[0, 1\)"):
            call()


@pytest.mark.parametrize("sinks", [0, "null", [0]])
def test_sinks_are_what_was_found(sinks, model):
    loaded = sinklab.wrap_model(model, make_tokenizer())
    for function in (sinklab.find_causes, sinklab.find_origin):
        with pytest.raises(ConfigurationError, match=r"`sinks` is of \w+; expected what find_sinks\(model, inputs\) found"):
            function(loaded, sinks=sinks)


@pytest.mark.parametrize("probes", [3, [3]])
def test_probes_are_a_list_of_probes(probes):
    weights = [(torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None])[None, None]]
    with pytest.raises(ConfigurationError, match=r"`probes` is 3; expected a list of them|3 is no probe; expected one"):
        sinklab.from_weights(weights, probes=probes)


@pytest.mark.parametrize("recipe", [3, ["tiny"], None])
def test_a_training_is_named(recipe):
    with pytest.raises(ConfigurationError, match="a training is a recipe, a file or a PretrainingConfig, and this is of"):
        sinklab.pretrain(recipe)
    with pytest.raises(SinklabError):
        sinklab.pretrain(Path("missing.yaml"))


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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"attn_implementation": 3}, "`attn_implementation` is of int; expected a name, or None"),
        ({"attn_implementation": {"text_config": "eager"}}, "`attn_implementation` is of dict; expected a name, or None"),
        ({"revision": 3}, "`revision` is of int; expected a name, or None"),
        ({"device_map": "auto", "max_memory": 3}, "`max_memory` is 3; expected places and sizes such as 0=20GiB,cpu=64GiB"),
        ({"device_map": "auto", "offload_folder": 3}, "`offload_folder` is 3; expected a path"),
    ],
)
def test_how_a_model_is_loaded_is_said_in_texts(settings, says):
    with pytest.raises(ConfigurationError, match=says):
        sinklab.load_model("org/model", **settings)


@pytest.mark.parametrize("tolerance", ["x", [0.1]])
def test_a_tolerance_and_a_scale_are_numbers(tolerance):
    weights = [(torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None])[None, None]]
    with pytest.raises(ConfigurationError, match=r"`tolerance` is ('x'|of list); expected a number"):
        sinklab.from_weights(weights, tolerance=tolerance)
    queries = torch.randn(1, 2, 5, 4)
    with pytest.raises(ConfigurationError, match=r"`scale` is ('x'|of list); expected a number"):
        sinklab.attention_statistics(queries, queries, causal=True, scale=tolerance)
    scaled = [sinklab.attention_statistics(queries, queries, causal=True, scale=scale) for scale in (0.5, torch.tensor(0.5))]
    assert torch.equal(scaled[0].column_sum, scaled[1].column_sum)


@pytest.mark.parametrize(("folder", "says"), [(3, "3"), (None, "None"), ([], "of list")])
def test_a_folder_is_a_path(folder, says, model):
    with pytest.raises(ConfigurationError, match=f"`folder` is {says}; expected a path"):
        sinklab.write_report(folder)
    with pytest.raises(ConfigurationError, match=f"`folder` is {says}; expected a path"):
        sinklab.save_model(model, folder, make_tokenizer())


@pytest.mark.parametrize("name", sorted(find_commands()))
def test_where_a_command_writes_is_a_path_and_its_seed_one_of_numpy(name):
    """``random`` takes -1 for 1, and numpy takes none below 0."""
    function = find_commands()[name].load()
    parameters = inspect.signature(function).parameters
    needed = [one for one in parameters.values() if one.default is one.empty]
    arguments = {one.name: ["name"] if re.search(r"[Ss]equence|list", str(one.annotation)) else "name" for one in needed}
    for option, value, says in (
        ("out", 3, "`out` is 3; expected a path"),
        ("out", ["a"], "`out` is of list; expected a path"),
        ("seed", -1, "`seed` -1 must be 0 or more"),
        ("seeds", [0, -1], "`seeds` -1 must be 0 or more"),
        ("progress", 3, f"`progress` is 3; expected a function of the stage, {STEPS}"),
        ("progress", True, f"`progress` is True; expected a function of the stage, {STEPS}"),
    ):
        if option in parameters:
            with pytest.raises(ConfigurationError, match=f"^{says}$"):
                function(**arguments, **{option: value})


@pytest.mark.parametrize("given", [3, True, [print]])
def test_what_follows_a_text_is_a_function(given, model):
    """Before, a prompt was read to its first chunk."""
    tokenizer = make_tokenizer()
    stream = sinklab.Stream(model)
    calls = (
        lambda: stream.feed(IDS, progress=given),
        lambda: stream.read_on(progress=given),
        lambda: sinklab.Chat(model, tokenizer=tokenizer).say("a turn", progress=given),
        lambda: losses(model, IDS, "window", progress=given),
        lambda: decoding(model, IDS, ["window"], steps=2, warm_up=1, progress=given),
    )
    for call in calls:
        with pytest.raises(ConfigurationError, match=f"^progress is (3|True|of list); expected a function of {STEPS}$"):
            call()
    assert (stream.position, stream.unread) == (0, 0)


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


def test_maps_have_a_whole_number_of_tiles():
    for settings, says in (({"tiles": "x"}, "tiles must be a whole number"), ({"tiles": 0}, "tiles 0 must be 1 or more")):
        with pytest.raises(ConfigurationError, match=says):
            sinklab.AttentionMaps(**settings)
    with pytest.raises(ConfigurationError, match="length must be a whole number, got None"):
        sinklab.AttentionMaps(length=None)
