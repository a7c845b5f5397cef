import hashlib
import json
import shutil

import pytest

from sinklab.errors import UnknownNameError
from sinklab.models.embedded import embedded_names, embedded_path
from sinklab.models.loading import load_model

OPERATIONS = ("sigmoid", "softmax")
NAMES = [f"embedded:{operation}{seed}" for operation in OPERATIONS for seed in ("", "-1", "-2")]


def training(name: str) -> dict:
    return json.loads((embedded_path(name) / "training.json").read_text(encoding="utf-8"))


def test_both_operations_are_shipped_from_three_seeds():
    assert embedded_names() == NAMES
    assert [training(name)["recipe"]["seed"] for name in NAMES] == [0, 1, 2] * 2


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_the_training_log(name):
    content = (embedded_path(name) / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == training(name)["safetensors_sha256"]
    assert len(content) <= 12e6
    assert load_model(name).revision == f"sha256-{training(name)['safetensors_sha256'][:16]}"


@pytest.mark.parametrize("name", NAMES)
def test_they_load_generate_and_say_what_they_are(name):
    loaded = load_model(name)
    recipe = training(name)["recipe"]
    assert loaded.operation == training(name)["operation"]["name"]
    assert loaded.model.config.operation == training(name)["operation"]
    assert (loaded.model.config.num_hidden_layers, loaded.model.config.num_attention_heads) == (
        recipe["num_layers"],
        recipe["num_heads"],
    )
    assert loaded.encoder.adds_bos
    prompt = loaded.tokenizer("import ", return_tensors="pt")["input_ids"]
    text = loaded.tokenizer.decode(loaded.model.generate(prompt, max_new_tokens=8, do_sample=False)[0])
    assert text.startswith("<|bos|>import ")
    assert len(text) > len("<|bos|>import ")


def test_every_softmax_sinks_and_no_sigmoid_does():
    last = {name: training(name)["log"][-1]["sink_rate_gu2024"] for name in NAMES}
    for name, rate in last.items():
        assert rate < 2 if "sigmoid" in name else rate > 10


def test_an_unknown_one_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"'embedded:softmx'\. Did you mean 'embedded:softmax'\? Known: embedded:sig"):
        embedded_path("embedded:softmx")


class TestFurtherSeeds:
    def test_a_training_is_found_below_the_folder_that_the_environment_names(self, tmp_path, monkeypatch):
        shutil.copytree(embedded_path("embedded:sigmoid-1"), tmp_path / "sigmoid-7" / "final")
        monkeypatch.setenv("SINKLAB_EMBEDDED", str(tmp_path))
        assert embedded_path("embedded:sigmoid-7") == tmp_path / "sigmoid-7" / "final"
        loaded = load_model("embedded:sigmoid-7")
        assert (loaded.name, loaded.operation) == ("embedded:sigmoid-7", "sigmoid")
        assert embedded_names() == NAMES  # what is listed is the package's

    def test_a_missing_one_says_how_it_is_made(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SINKLAB_EMBEDDED", str(tmp_path))
        with pytest.raises(UnknownNameError) as refused:
            embedded_path("embedded:softmax-3")
        assert "`make embedded SEEDS=3`" in str(refused.value)
        assert f"{tmp_path} has none from seed 3" in str(refused.value)
