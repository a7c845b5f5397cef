""""""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from sinklab.errors import ConfigurationError, InputError
from sinklab.models.checkpoint import locate, read_config, weight_files
from sinklab.models.loading import load_model


def test_a_directory_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    folder, commit, _ = locate("org/model", None, False)
    assert folder.resolve() == tmp_path / "org" / "model"
    assert commit is None


@pytest.mark.parametrize("name", ["/no/such/place", "./no", "no such place", "a/b/c", "-x"])
def test_what_can_be_no_hub_id_is_a_missing_directory(name):
    with pytest.raises(InputError, match=r"there is no directory .* a hub id looks like org/model"):
        locate(name, None, False)


def test_offline_is_said():
    with pytest.raises(
        InputError, match=r"'no/where' is not a local directory and not in the hub cache, and HF_HUB_OFFLINE is "
    ):
        locate("no/where", None, False)


def test_empty_name_and_file(tmp_path):
    with pytest.raises(InputError, match="name is empty"):
        locate("", None, False)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"is a file; give one that ends in \.gguf"):
        locate(str(tmp_path / "model.safetensors"), None, False)


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
        (GatedRepoError, r"org/model is gated on the hub: accept its terms there \(https://.*/org/model\), then run: hf auth"),
        (RevisionNotFoundError, "has no revision 'v9'"),
        (RepositoryNotFoundError, "neither a local directory nor a public hub repository; check the spelling, or run"),
        (LocalEntryNotFoundError, r"could not be fetched from the hub \(offline\?\)"),
    ],
)
def test_what_the_hub_says_becomes_one_sentence(cls, message, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _refuse(_hub_error(cls)))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match=message) as caught:
        locate("org/model", "v9", False)
    assert "\n" not in str(caught.value)


def test_a_hub_that_is_broken(monkeypatch):
    error = _hub_error(HfHubHTTPError)
    error.response = SimpleNamespace(status_code=503)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _refuse(error))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match=r"'org/model' is not fetched: the hub answered with an error \(HTTP 503\); try again"):
        locate("org/model", None, False)


@pytest.mark.parametrize("trust", [False, True])
def test_code_is_not_even_downloaded_unless_asked_for(trust, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append(options) or str(tmp_path / "c0ffee")
    )
    assert locate("org/model", "v1", trust) == (tmp_path / "c0ffee", "c0ffee", None)
    patterns = [pattern for options in asked for pattern in options["allow_patterns"]]
    assert ("*.py" in patterns) is trust
    assert [options["revision"] for options in asked] == ["v1", "c0ffee"]
    assert not any("bin" in pattern or ".pt" in pattern for pattern in patterns)


class Repository:
    """What huggingface_hub does with a repository of these files, and which it was made to fetch."""

    def __init__(self, monkeypatch, cache, files):
        self.files, self.snapshot, self.fetched = files, cache / "snapshots" / "c0ffee", []
        self.snapshot.mkdir(parents=True)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, revision: list(files))

    def download(self, name, *, revision, allow_patterns, ignore_patterns, **access):
        self.access = access
        chosen = huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for file in chosen:
            self.fetched.append(file)
            (self.snapshot / file).parent.mkdir(exist_ok=True)
            (self.snapshot / file).write_bytes(self.files[file])
        return str(self.snapshot)


def test_of_a_folder_in_a_repository_only_its_files_are_fetched(monkeypatch, tmp_path):
    files = dict.fromkeys(["config.json", "model.safetensors", "a/config.json", "a/model.safetensors", "a/onnx/b.json"], b"{}")
    repository = Repository(monkeypatch, tmp_path, files)
    located = locate("org/model", None, False, "a", token="secret", local_files_only=True)
    assert (located.folder, located.commit) == (repository.snapshot / "a", "c0ffee")
    assert set(repository.fetched) == {"a/config.json", "a/model.safetensors"}
    assert repository.access == {"token": "secret", "local_files_only": True}


@pytest.mark.parametrize(
    ("weights", "read"),
    [
        (["model.safetensors", "model.fp16.safetensors", "other.safetensors"], ["model.safetensors"]),
        (
            ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "model-00001-of-00001.fp16.safetensors"],
            ["model-00001-of-00001.safetensors"],
        ),
        (["model.safetensors", "model-00001-of-00001.safetensors", "model.safetensors.index.json"], ["model.safetensors"]),
        (["model.safetensors", "adapter_model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "onnx/model.safetensors"], ["model.safetensors"]),
    ],
)
def test_of_a_repository_only_the_weights_that_are_read_are_fetched(weights, read, monkeypatch, tmp_path, checkpoint):
    content = (checkpoint / "model.safetensors").read_bytes()
    index = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()
    files = {
        "config.json": b"{}",
        "pytorch_model.bin": b"",
        **{name: index if "index" in name else content for name in weights},
    }
    repository = Repository(monkeypatch, tmp_path, files)
    folder, commit, _ = locate("org/model", None, False)
    assert commit == "c0ffee"
    assert [path.name for path in weight_files(folder, "org/model")] == read
    fetched = [name for name in repository.fetched if name.endswith(".safetensors")]
    assert fetched == [*read, *(["adapter_model.safetensors"] if "adapter_model.safetensors" in weights else [])]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (["model.fp16.safetensors", "pytorch_model.bin"], r"what is there is model\.fp16\.safetensors: rename it"),
        (["model-00001-of-00002.bf16.safetensors", "model.safetensors.index.bf16.json"], r"index\.bf16\.json: rename it"),
        (["pytorch_model.bin"], r"has only pickled weights \(pytorch_model\.bin\)"),
        (["onnx/model.safetensors"], r"has no model\.safetensors and no index of shards; there is none"),
    ],
)
def test_a_repository_without_weights_that_can_be_read_is_refused_before_any_is_fetched(weights, says, monkeypatch, tmp_path):
    repository = Repository(monkeypatch, tmp_path, {"config.json": b"{}", **dict.fromkeys(weights, b"")})
    folder, *_ = locate("org/model", None, False)
    with pytest.raises(InputError, match=says):
        weight_files(folder, "org/model")
    assert not [name for name in repository.fetched if name.endswith((".safetensors", ".bin"))]


def test_a_folder_with_a_model_in_it_names_the_model(tmp_path):
    """The output directory of a training run is the folder above the model that it made."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"run is not a model directory: it has no config\.json; .*run/model is one$"):
        read_config(tmp_path / "run", "run", False)


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
        ('{"model_type": "llama", "transformers_weights": "o.safetensors"}', r"weights are in 'o.safetensors'.*Rename"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((InputError, ConfigurationError), match=message) as raised:
        read_config(tmp_path, "it", False)
    assert len(str(raised.value)) < 500


def test_a_config_that_is_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"model_type": "llam\xe9"}')
    with pytest.raises(InputError, match=r"config\.json is damaged: not UTF-8 \(byte 0xe9 at offset 20\)"):
        read_config(tmp_path, "it", False)


def test_shards_of_a_distributed_checkpoint_are_refused(own_checkpoint):
    (own_checkpoint / "shard-00001-model-00001-of-00001.safetensors").touch()
    with pytest.raises(InputError, match=r"holds shards of a distributed checkpoint"):
        load_model(str(own_checkpoint))


def test_a_snapshot_of_the_hub_is_links(own_checkpoint, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(own_checkpoint.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load_model(str(snapshot)).tokenizer is not None


def test_an_adapter_is_not_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is an adapter, not a model; merge it .* hand over the model that PEFT has loaded"):
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


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\xff" * 64])
def test_damaged_weights_are_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged \(.*\); get the file again"):
        weight_files(tmp_path, "it")


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": null}}'),
        '{"weight_map": {"a": "weights.bin"}}',
    ],
)
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


@pytest.mark.parametrize("shard", ["../other.safetensors", "/tmp/other.safetensors", "a/../../b.safetensors"])
def test_shards_outside_of_the_directory_are_refused(tmp_path, shard):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": shard}}))
    with pytest.raises(InputError, match="outside of the checkpoint"):
        weight_files(folder, "it")


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
