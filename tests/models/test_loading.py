""""""

import copy
import hashlib
import json
import shutil
import threading
import types

import pytest
import torch
import transformers
from tests.conftest import make_sinklm, make_tokenizer
from tests.models.adapted import Adapted
from torch import nn

from sinklab import SinkCache, measure, show
from sinklab.attention.anatomy import unwrapped
from sinklab.attention.modules import out_of_peft
from sinklab.errors import ConfigurationError, InputError, UnknownNameError, UnsupportedModelError
from sinklab.models.embedded import embedded_names, embedded_path
from sinklab.models.language_model import SinkLM
from sinklab.models.loading import hash_weights, load_model, num_parameters, wrap_model

SMALL = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
TINY = {
    "llama": transformers.LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=1),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_layer=2, n_head=2, n_embd=32, n_positions=64),
    "bert": transformers.BertConfig(**SMALL, intermediate_size=48),
    "t5": transformers.T5Config(vocab_size=64, num_layers=2, num_heads=2, d_model=32, d_kv=16, d_ff=48),
    "vit": transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32
    ),
    "gpt_oss": transformers.GptOssConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1
    ),
}
CLASSES = [
    ("llama", "LlamaForCausalLM"),
    ("llama", "LlamaModel"),
    ("gpt2", "GPT2LMHeadModel"),
    ("bert", "BertForMaskedLM"),
    ("bert", "BertForSequenceClassification"),
    ("t5", "T5ForConditionalGeneration"),
    ("vit", "ViTForImageClassification"),
    ("gpt_oss", "GptOssForCausalLM"),
]


def save_tiny(kind: str, cls: str, folder) -> torch.nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, cls)(TINY[kind])
    for parameter in model.parameters():  # some classes leave parameters as they were in memory
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def same_weights(left, right) -> bool:
    first, second = left.state_dict(), right.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(("kind", "cls"), CLASSES)
def test_the_checkpoint_says_which_class_it_is_and_every_weight_comes_back(kind, cls, tmp_path):
    model = save_tiny(kind, cls, tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded.model).__name__ == cls
    assert same_weights(loaded.model, model)
    assert not loaded.model.training
    assert loaded.tokenizer is None
    assert loaded.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert loaded.operation == ("softmax with sink logit" if kind == "gpt_oss" else "softmax")
    assert loaded.encoder.vocab_size == (0 if kind == "vit" else 64)


def test_without_architectures_a_decoder_is_loaded_with_its_head(tmp_path):
    model = save_tiny("llama", "LlamaForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert same_weights(load_model(str(tmp_path)).model, model)


def test_what_is_known_of_a_sinklm(checkpoint):
    loaded = load_model(str(checkpoint))
    assert isinstance(loaded.model, SinkLM)
    assert loaded.name == str(checkpoint)
    assert loaded.source == checkpoint
    assert loaded.operation == "softmax"
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    assert loaded.revision == f"sha256-{digest[:16]}"
    assert (loaded.device.type, loaded.dtype) == ("cpu", torch.float32)
    encoder = loaded.encoder
    assert (encoder.vocab_size, encoder.bos_token_id, encoder.special_ids) == (len(loaded.tokenizer), 0, {0, 1})
    assert encoder.adds_bos
    assert loaded.tokenizer.decode(encoder.encode("return self")) == "return self"


def test_shards_are_one_checkpoint(tmp_path):
    model = make_sinklm()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = load_model(str(tmp_path))
    assert same_weights(loaded.model, model)
    listing = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in shards)
    assert loaded.revision == f"sha256-{hashlib.sha256(listing.encode()).hexdigest()[:16]}"
    shards[1].unlink()
    with pytest.raises(InputError, match=rf"1 of {len(shards)} weight files are missing, first {shards[1].name}"):
        load_model(str(tmp_path))


def test_on_a_cpu_auto_is_float32_whatever_the_checkpoint(tmp_path):
    model = make_sinklm().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_model(str(tmp_path), device="cpu").dtype == torch.float32
    assert load_model(str(tmp_path), device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(str(tmp_path), device="cpu", dtype="float64").dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device")
def test_on_an_accelerator_auto_is_the_checkpoints_dtype(tmp_path):
    make_sinklm().to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert (loaded.device.type, loaded.dtype) == ("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "gpu"}, ConfigurationError, "no device 'gpu'; `device` is auto, cpu, cuda"),
        ({"dtype": "float16", "device": "cpu"}, ConfigurationError, "use `dtype` float32 or bfloat16"),
        (
            {"dtype": "int8"},
            ConfigurationError,
            "no dtype 'int8' for a model; `dtype` is auto, float64, float32, bfloat16, float16",
        ),
        ({"revision": "main"}, ConfigurationError, "`revision` main is for hub repositories"),
        ({"attn_implementation": "sinklab_sigmoit"}, UnknownNameError, "Did you mean 'sigmoid'"),
        ({"attn_implementation": "fast"}, ConfigurationError, "cannot use attention 'fast'"),
    ],
)
def test_an_option_that_cannot_take_effect_raises(checkpoint, options, error, message):
    with pytest.raises(error, match=message):
        load_model(str(checkpoint), **options)


def test_weights_of_another_model_are_not_filled_up_with_random_numbers(own_checkpoint):
    config = json.loads((own_checkpoint / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (own_checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=r"lacks 9 of the tensors of SinkLM, first layers\.2\..*Is config.json that of another"
    ):
        load_model(str(own_checkpoint))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_numbers_name_the_tensor(own_checkpoint, value):
    model = load_model(str(own_checkpoint)).model
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight[3, 4:6] = value
    model.save_pretrained(own_checkpoint)
    with pytest.raises(InputError, match=r"NaN or infinite weights: 2 of 1024 numbers in layers\.1\.self_attn\.k_proj\.weight"):
        load_model(str(own_checkpoint))


def test_a_damaged_tokenizer_is_named(own_checkpoint):
    (own_checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"the tokenizer of .* cannot be loaded"):
        load_model(str(own_checkpoint))


def test_special_ids_without_a_tokenizer_come_from_the_config(own_checkpoint):
    for path in own_checkpoint.glob("tokenizer*"):
        path.unlink()
    encoder = load_model(str(own_checkpoint)).encoder
    assert (encoder.tokenizer, encoder.vocab_size, encoder.bos_token_id, encoder.special_ids) == (None, 300, 0, {0, 1})


def test_the_first_token_of_bert_counts_as_bos(tmp_path):
    save_tiny("bert", "BertForMaskedLM", tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    encoder = load_model(str(tmp_path)).encoder
    assert encoder.bos_token_id == encoder.tokenizer.convert_tokens_to_ids("[CLS]")
    assert encoder.adds_bos
    assert encoder.special_ids == set(encoder.tokenizer.convert_tokens_to_ids(words[:5]))
    assert encoder.closing_ids == (encoder.tokenizer.convert_tokens_to_ids("[SEP]"),)
    assert encoder.bos_name == "[CLS] and [SEP]"


def test_padding_rows_of_the_embedding_are_not_tokens(tmp_path, tokenizer):
    make_sinklm(vocab_size=384).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).encoder.vocab_size == len(tokenizer) < 384


REMOTE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(r"{marker}").touch()
class OwnConfig(LlamaConfig):
    model_type = "own_code"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_checkpoint_runs_only_when_asked(tmp_path, monkeypatch):
    marker, folder = tmp_path / "it_ran", tmp_path / "own_code"
    save_tiny("llama", "LlamaForCausalLM", folder)
    (folder / "own.py").write_text(REMOTE.format(marker=marker))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_code", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"brings its own model code .* add `trust_remote_code`"):
        load_model(str(folder))
    assert not marker.exists()
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    loaded = load_model(str(folder), trust_remote_code=True)
    assert marker.exists()
    assert type(loaded.model).__name__ == "OwnModel"


def test_an_architecture_that_transformers_does_not_know(own_checkpoint):
    config = json.loads((own_checkpoint / "config.json").read_text())
    (own_checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "perceiver_of_2031"}))
    with pytest.raises(UnsupportedModelError, match=r"knows no model type 'perceiver_of_2031'"):
        load_model(str(own_checkpoint))


def test_a_model_in_memory_is_wrapped_and_hashed(checkpoint, tokenizer):
    model = make_sinklm()
    wrapped, again = wrap_model(model.train(), tokenizer, name="mine"), wrap_model(make_sinklm(), tokenizer)
    assert wrapped.model is model
    assert not model.training
    assert (wrapped.name, wrapped.source, wrapped.operation) == ("mine", None, "softmax")
    assert wrapped.encoder == load_model(str(checkpoint)).encoder or wrapped.encoder.vocab_size == len(tokenizer)
    assert wrapped.revision == again.revision
    with torch.no_grad():
        model.norm.weight[0] += 1
    assert wrap_model(model).revision != again.revision
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(InputError, match=r"mine has NaN .* norm\.weight"):
        wrap_model(model, name="mine")


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_model_is_taken_out_of_what_wraps_it(wrap):
    model = make_sinklm()
    assert wrap_model(wrap(model)).model is model
    table = measure(wrap(model), probes=["null_mass"], corpus="random_tokens", samples=2, seq_len=8, bos="none").table
    assert set(table["module"].dropna()) <= {name for name, _ in model.named_modules()}


class Sentences(nn.Sequential):
    """As sentence-transformers holds a model: with its config and its tokenizer, and something behind it."""

    def __init__(self, model, tokenizer):
        super().__init__(nn.ModuleDict({"model": model}), nn.Identity())
        self.tokenizer = tokenizer

    @property
    def config(self):
        return self.transformers_model.config

    @property
    def transformers_model(self):
        return self[0]["model"]


def test_a_model_of_sentence_transformers_is_taken_out_with_its_tokenizer():
    loaded = load_model("embedded:softmax")
    sentences = Sentences(loaded.model, loaded.tokenizer)
    wrapped = wrap_model(nn.DataParallel(sentences))
    assert wrapped.model is unwrapped(sentences) is loaded.model
    assert wrapped.tokenizer is loaded.tokenizer
    assert wrapped.revision == wrap_model(loaded.model).revision
    other = load_model("embedded:sigmoid").tokenizer
    assert wrap_model(sentences, other).tokenizer is other
    settings = {"probes": ["sink_rate"], "samples": 2, "seq_len": 16}
    tables = [measure(model, **settings).table["value"] for model in (sentences, loaded)]
    assert (tables[0] == tables[1]).all()
    assert show(sentences, "import os\n").sinks == show(loaded, "import os\n").sinks


def test_a_module_that_keeps_the_config_of_the_model_inside_it_is_refused():
    module = nn.Module()
    module.encoder = make_sinklm()
    module.config = module.encoder.config
    with pytest.raises(InputError, match=r"Module is no model of transformers: it has no get_input_embeddings\(\); give the"):
        wrap_model(module)


def test_a_model_with_adapters_is_taken_out_of_what_holds_them_and_one_with_a_prompt_is_not():
    model, tokens = make_sinklm(), torch.arange(24)[None]
    adapted, prompted = Adapted(model, prompt=False), Adapted(model, prompt=True)
    assert unwrapped(nn.DataParallel(adapted)) is wrap_model(adapted).model is out_of_peft(adapted) is model
    assert out_of_peft(prompted) is unwrapped(prompted) is prompted
    table = measure(adapted, probes=["null_mass"], corpus="random_tokens", samples=2, seq_len=8, bos="none").table
    assert set(table["module"].dropna()) <= {name for name, _ in model.named_modules()}
    with torch.no_grad():
        whole = adapted(input_ids=tokens).logits
        held = adapted(input_ids=tokens, past_key_values=SinkCache(adapted, num_sinks=2, window=30)).logits
    torch.testing.assert_close(held, whole)


def test_a_path_names_a_model(checkpoint):
    assert load_model(checkpoint).name == str(checkpoint)
    table = measure(checkpoint, probes=["null_mass"], corpus="random_tokens", samples=2, seq_len=8, bos="none").table
    assert set(table["model"]) == {str(checkpoint)}
    assert show(checkpoint, "import os").sinks is not None


def test_models_are_loaded_in_threads(checkpoint):
    """transformers' own loading is not safe in threads: tied weights are missing from then on."""
    expected, found = load_model(str(checkpoint)).revision, []

    def load():
        for _ in range(5):
            found.append(hash_weights(load_model(str(checkpoint)).model))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15
    assert len(set(found)) == 1
    assert expected.startswith("sha256-")


def test_packed_weights_are_counted_as_what_they_stand_for():
    """Two in a byte, as bitsandbytes has them, and eight in an integer that is no parameter, as GPTQ and AWQ have them."""
    model = make_sinklm()
    whole = sum(one.numel() for one in model.parameters())
    assert wrap_model(model, make_tokenizer()).num_parameters == num_parameters(model) == whole
    down, up = (getattr(model.layers[0].mlp, name) for name in ("down_proj", "up_proj"))
    halved = nn.Parameter(torch.zeros(down.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    halved.quant_state = types.SimpleNamespace(shape=down.weight.shape)
    down.weight, size = halved, up.weight.numel()
    del up.weight
    up.register_buffer("qweight", torch.zeros(size // 8, dtype=torch.int32))
    assert num_parameters(model) == whole


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_maps_that_torch_has_packed_have_an_identity_and_are_measured():
    """``quantize_dynamic`` packs weight and bias into one object, which is no tensor."""
    plain = make_sinklm()
    packed = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {nn.Linear}, dtype=torch.qint8)
    other = torch.ao.quantization.quantize_dynamic(make_sinklm({"name": "sink_logit"}), {nn.Linear}, dtype=torch.qint8)
    loaded = wrap_model(packed, make_tokenizer())
    assert loaded.revision == wrap_model(copy.deepcopy(packed), make_tokenizer()).revision
    assert len({loaded.revision, hash_weights(plain), hash_weights(other)}) == 3
    untied = plain.lm_head.weight.numel()  # packed by itself, it is no longer that of the embedding
    assert loaded.num_parameters == wrap_model(plain, make_tokenizer()).num_parameters + untied
    with torch.no_grad():
        packed.layers[0].mlp.down_proj.set_weight_bias(
            torch.quantize_per_tensor(plain.layers[0].mlp.down_proj.weight * 2, 0.01, 0, torch.qint8), None
        )
    assert hash_weights(packed) != loaded.revision
    table = measure(loaded, corpus="random_tokens", probes=["sink_rate"], seq_len=16, samples=2).table
    assert table["value"].notna().any()


OPERATIONS = ("sigmoid", "softmax")
EMBEDDED = [f"embedded:{operation}{seed}" for operation in OPERATIONS for seed in ("", "-1", "-2")]


def training(name: str) -> dict:
    return json.loads((embedded_path(name) / "training.json").read_text(encoding="utf-8"))


def test_both_operations_are_shipped_from_three_seeds():
    assert embedded_names() == EMBEDDED
    assert [training(name)["recipe"]["seed"] for name in EMBEDDED] == [0, 1, 2] * 2


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_weights_are_those_of_the_training_log(name):
    content = (embedded_path(name) / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == training(name)["safetensors_sha256"]
    assert len(content) <= 12e6
    assert load_model(name).revision == f"sha256-{training(name)['safetensors_sha256'][:16]}"


@pytest.mark.parametrize("name", EMBEDDED)
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
    last = {name: training(name)["log"][-1]["sink_rate_gu2024"] for name in EMBEDDED}
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
        assert embedded_names() == EMBEDDED  # what is listed is the package's

    def test_a_missing_one_says_how_it_is_made(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SINKLAB_EMBEDDED", str(tmp_path))
        with pytest.raises(UnknownNameError) as refused:
            embedded_path("embedded:softmax-3")
        assert "`make embedded SEEDS=3`" in str(refused.value)
        assert f"{tmp_path} has none from seed 3" in str(refused.value)
