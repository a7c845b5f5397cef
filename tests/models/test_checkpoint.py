from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from sinklab.errors import ConfigurationError, InputError, UnknownNameError
from sinklab.models.checkpoint import locate, read_config, weight_files
from sinklab.models.loading import load_model


def test_a_directory_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    folder, commit = locate("org/model", None, False)
    assert folder.resolve() == tmp_path / "org" / "model"
    assert commit is None


@pytest.mark.parametrize("name", ["/no/such/place", "./no", "no such place", "a/b/c", "-x"])
def test_what_can_be_no_hub_id_is_a_missing_directory(name):
    with pytest.raises(InputError, match=r"there is no directory .* a hub id looks like org/model"):
        locate(name, None, False)


def test_offline_is_said(monkeypatch):
    with pytest.raises(InputError, match=r"'no/where' is not a local directory, not in the hub cache .*offline\?"):
        locate("no/where", None, False)


def test_an_unknown_embedded_model():
    with pytest.raises(UnknownNameError, match="no embedded model is called 'embedded:softmx'"):
        locate("embedded:softmx", None, False)


def test_empty_name_and_file(tmp_path):
    with pytest.raises(InputError, match="name is empty"):
        locate("", None, False)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match="is a file; give the directory"):
        locate(str(tmp_path / "model.safetensors"), None, False)


def test_a_revision_of_something_local(tmp_path):
    with pytest.raises(ConfigurationError, match="`revision` v2 is for hub repositories"):
        locate(str(tmp_path), "v2", False)


def _refuse(error):
    def download(*args, **kwargs):
        raise error

    return download


def _hub_error(cls):
    # The hub's errors carry an HTTP response; what it holds does not matter here.
    error = cls.__new__(cls)
    Exception.__init__(error, "as the hub words it")
    return error


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (GatedRepoError, "org/model is gated on the hub: accept its terms there"),
        (RevisionNotFoundError, "has no revision 'v9'"),
        (RepositoryNotFoundError, "neither a local directory nor a public hub repository; check the spelling"),
        (LocalEntryNotFoundError, r"could not be fetched from the hub \(offline\?\)"),
    ],
)
def test_what_the_hub_says_becomes_one_sentence(cls, message, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _refuse(_hub_error(cls)))
    with pytest.raises(InputError, match=message):
        locate("org/model", "v9", False)


def test_a_full_disk_is_not_blamed_on_the_name(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _refuse(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        locate("org/model", None, False)


@pytest.mark.parametrize("trust", [False, True])
def test_code_is_not_even_downloaded_unless_asked_for(trust, monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: asked.update(options, name=name) or str(tmp_path / "c0ffee"),
    )
    assert locate("org/model", "v1", trust) == (tmp_path / "c0ffee", "c0ffee")
    assert ("*.py" in asked["allow_patterns"]) is trust
    assert asked["revision"] == "v1"
    assert not any("bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a model directory: it has no config.json"),
        ("{", "config.json is damaged: not valid JSON"),
        ("[]", "config.json is damaged: expected a JSON object, got list"),
        ("{}", "does not say which architecture it describes: it has no model_type"),
        ('{"model_type": "sinklm", "head_dim": 3}', "config.json.*head_dim 3 must be even"),
        ('{"model_type": "sinklm", "operation": {"name": "sigmoit"}}', "config.json.*no operation is called 'sigmoit'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json.*hidden_size"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((InputError, ConfigurationError), match=message):
        read_config(tmp_path, "it", False)


def test_an_adapter_is_not_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="is an adapter, not a model; merge it"):
        read_config(tmp_path, "it", False)


def test_pickled_weights_are_refused_with_the_reason_and_the_way_out(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        InputError, match=r"only pickled weights \(pytorch_model\.bin\).*run any code.*save_pretrained\('converted'\)"
    ):
        weight_files(tmp_path, "it")


def test_the_way_out_works(tmp_path, monkeypatch):
    """The conversion that the message spells out gives a directory that loads."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_layer=1, n_head=1, n_embd=8))
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        load_model("pickled")
    exec(str(caught.value).split('python -c "')[1].rstrip('"'), {})
    assert torch.equal(load_model("converted").model.transformer.wte.weight, model.transformer.wte.weight)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(InputError, match=r"has no weights: expected model\.safetensors"):
        weight_files(tmp_path, "it")


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\xff" * 64])
def test_damaged_weights_are_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged \(.*\); get the file again"):
        weight_files(tmp_path, "it")


def test_cut_off_weights_are_named(own_checkpoint):
    path = own_checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        weight_files(own_checkpoint, "it")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"index\.json is damaged"):
        weight_files(tmp_path, "it")


def test_an_index_lists_each_shard_once(tmp_path):
    from safetensors.torch import save_file

    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    weights = {"w1": "b.safetensors", "w2": "a.safetensors", "w3": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert [path.name for path in weight_files(tmp_path, "it")] == ["a.safetensors", "b.safetensors"]
