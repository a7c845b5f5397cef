"""GGUF files: the weights that llama.cpp would see, unpacked; and one line for every file that cannot be read as a whole."""

import importlib.util
import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from tests.conftest import make_tokenizer
from tests.models.test_checkpoint import Repository
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import load_model, measure
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.checkpoint import hash_files
from sinklab.models.gguf_file import local_gguf, read_gguf

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
Q8_0, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
HEADS = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rope_theta=5e4, initializer_range=0.3, bos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def packed(name: str, weight: np.ndarray) -> tuple[str, np.ndarray]:
    """Name and values as llama.cpp has them: rows of queries and keys in pairs, for its rotation of neighbours."""
    for part, heads in HEADS.items():
        if part in name:
            weight = weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name, weight


def write(path, model=None, *, architecture="llama", kind=F32, tokenizer=True, also=None, without=(), **fields):
    """A GGUF file of a Llama, matrices of a type."""
    model, writer = model or llama(), gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in fields.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key.replace("__", "."), value)
    if tokenizer:
        words = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
        writer.add_token_merges([" ".join(merge) for merge in words["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    for key, tensor in {**model.state_dict(), **(also or {})}.items():
        name, weight = packed(key, tensor.numpy())
        own = kind if weight.ndim == 2 else F32
        if key not in without:
            writer.add_tensor(name, gguf.quantize(weight, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "plain.gguf")


def test_every_weight_and_token_comes_back(file):
    loaded, model = load_model(file), llama()
    found = loaded.model.state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in model.state_dict().items())
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    text = "import os\n\n\ndef join(a, b):"
    assert loaded.tokenizer(text, add_special_tokens=False) == make_tokenizer()(text, add_special_tokens=False)
    assert (loaded.revision, loaded.encoder.bos_token_id, loaded.encoder.vocab_size) == (hash_files([file]), 0, 300)
    assert getattr(loaded.model.config, "quantization_config", None) is None


@pytest.mark.parametrize(("dtype", "of"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_packed_weights_are_unpacked_to_the_dtype_asked_for(dtype, of, tmp_path):
    path, model = write(tmp_path / "packed.gguf", kind=Q8_0), llama()
    found = load_model(path, dtype=dtype).model.state_dict()
    assert {tensor.dtype for tensor in found.values()} == {of}
    for key in ("model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight"):
        unpacked = gguf.dequantize(gguf.quantize(model.state_dict()[key].numpy(), Q8_0), Q8_0)
        assert torch.equal(found[key], torch.from_numpy(unpacked).to(of))
    assert not torch.equal(found["lm_head.weight"].float(), model.state_dict()["lm_head.weight"])


def test_the_record_says_what_the_numbers_were_unpacked_from(tmp_path):
    path = write(tmp_path / "packed.gguf", kind=Q8_0)
    measure(str(path), probes=["entropy"], samples=2, seq_len=16, out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (digest,) = subprocess.check_output(["sha256sum", str(path)], text=True).split()[:1]
    assert record["gguf"] == {"file": "packed.gguf", "quantisation": "Q8_0", "types": {"Q8_0": 16, "F32": 5}, "sha256": digest}
    assert record["dtype"] == "float32"


def test_a_directory_means_its_only_file_and_safetensors_before_it(file, tmp_path):
    (tmp_path / "model.gguf").write_bytes(file.read_bytes())
    assert local_gguf(tmp_path) == tmp_path / "model.gguf"
    assert load_model(tmp_path).gguf["file"] == "model.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(InputError, match=r"holds 2 GGUF files; name the one that is meant, such as .*model\.gguf"):
        load_model(tmp_path)
    llama().save_pretrained(tmp_path)
    assert load_model(tmp_path).gguf is None


def test_a_file_of_a_repository_is_fetched_alone(file, tmp_path, monkeypatch):
    repository = Repository(monkeypatch, tmp_path, {"q4/a.gguf": file.read_bytes(), "b.gguf": b"", "config.json": b"{}"})
    loaded = load_model("org/model/q4/a.gguf", revision="main")
    assert (loaded.revision, loaded.gguf["file"], repository.fetched) == ("c0ffee", "a.gguf", ["q4/a.gguf"])
    with pytest.raises(InputError, match=r"repository org/model has no c\.gguf; it holds b\.gguf"):
        load_model("org/model/c.gguf")
    with pytest.raises(InputError, match=r"holds 1 GGUF files and no model\.safetensors; name one: org/model/b\.gguf"):
        load_model("org/model")


def test_without_a_tokenizer_there_is_none(tmp_path):
    loaded = load_model(write(tmp_path / "bare.gguf", tokenizer=False))
    assert loaded.tokenizer is None
    assert loaded.encoder.vocab_size == 300


def damaged(path, change):
    data = path.read_bytes()
    (path.parent / "damaged.gguf").write_bytes(change(data))
    return path.parent / "damaged.gguf"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: b"", "truncated or damaged: its header has no end"),
        (lambda data: data[:100], "truncated or damaged: its header has no end"),
        (lambda data: data[:-4], r"is truncated: it has [\d,]+ of [\d,]+ bytes; get the file again"),
        (lambda data: data[:8] + b"\xff" * 16 + data[24:], "truncated or damaged"),
        (lambda data: b"PK\x03\x04" + data[4:], r"no GGUF file that can be read: it begins with b'PK"),
        (lambda data: data[:4] + b"\x01" + data[5:], "it is of version 1, not 2 or 3"),
    ],
)
def test_a_broken_file_gets_one_line(file, change, says):
    with pytest.raises(InputError, match=says):
        load_model(damaged(file, change))


@pytest.mark.parametrize("number", [24, 99])
def test_a_type_that_nobody_unpacks(file, number):
    """24 are whole numbers of 8 bits, 99 is none yet."""

    def change(data):
        entry = b"token_embd.weight" + (2).to_bytes(4, "little") + (64).to_bytes(8, "little") + (300).to_bytes(8, "little")
        assert entry in data
        at = data.index(entry) + len(entry)
        return data[:at] + number.to_bytes(4, "little") + data[at + 4 :]

    with pytest.raises(UnsupportedModelError, match=rf"token_embd\.weight as type {number}, which gguf [\d.]+ cannot unpack"):
        read_gguf(damaged(file, change))


@pytest.mark.parametrize(
    ("made", "error", "says"),
    [
        ({"architecture": "nonsense"}, UnsupportedModelError, "architecture 'nonsense', which the package gguf does not know"),
        ({"architecture": "plamo"}, UnsupportedModelError, r"transformers [\d.]+ cannot read this GGUF file: .*plamo"),
        ({"split__count": 3}, InputError, "is one of 3 parts; join them with: llama-gguf-split --merge"),
        ({"llama__rope__scaling__type": "yarn"}, UnsupportedModelError, r"scales positions \(yarn\)"),
        ({"also": {"rope_freqs.weight": torch.ones(8)}}, UnsupportedModelError, r"holds [\d,]+ numbers, and transformers"),
        ({"without": ["model.layers.1.mlp.up_proj.weight"]}, InputError, r"lacks 1 of the tensors .* model\.layers\.1"),
    ],
)
def test_a_model_that_would_be_another_one(made, error, says, tmp_path):
    with pytest.raises(error, match=says):
        load_model(write(tmp_path / "other.gguf", **made))


def test_without_the_package(file, tmp_path, monkeypatch):
    repository = Repository(monkeypatch, tmp_path, {"a.gguf": file.read_bytes()})
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    for name in (file, "org/model/a.gguf"):
        with pytest.raises(ConfigurationError, match=r"package gguf, which is not installed: pip install 'sinklab\[gguf\]'"):
            load_model(name)
    assert repository.fetched == []


def test_a_command_refuses_a_broken_file_before_it_imports_torch(file):
    broken = damaged(file, lambda data: data[:-4])
    program = "import sys\nsys.modules['torch'] = None\nfrom sinklab.cli.app import app\napp(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", program, "audit", str(broken)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{broken} is truncated: it has" in done.stderr
