"""A model spread over memory and disk: the numbers of one device, and what cannot be spread is refused before it is loaded."""

import importlib.util
import json

import accelerate
import pandas as pd
import pytest
import torch
import transformers

import sinklab
from sinklab.attention.modules import held, input_device
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.loading import hash_weights, load_model, wrap_model
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.stream import Stream
from sinklab.streaming.traits import fingerprint
from sinklab.studies.cache.cache import compare_policies

MAP = {
    "model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
    "model.rotary_emb": "cpu", "lm_head": "disk",
}  # fmt: skip
"""Half of the model, its embedding first of all, on the disk."""

HALF = {"device_map": "auto", "max_memory": "cpu=80KB"}

SAMPLES = {"corpus": "random_tokens", "samples": 3, "seq_len": 12}
COORDINATES = ["probe", "metric", "module", "layer", "head", "query_position", "key_position", "corpus", "bos", "count"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Directory of a Llama with grouped queries and tied embeddings."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("spread") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def own_model(folder, **options) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def offloaded(folder, kind: str, tmp_path) -> transformers.PreTrainedModel:
    """The same model as a user has it who spread it with transformers or accelerate."""
    if kind == "disk":
        return own_model(folder, device_map=MAP, offload_folder=tmp_path)
    return accelerate.cpu_offload(own_model(folder), execution_device=torch.device("cpu"))


def same_numbers(one: pd.DataFrame, other: pd.DataFrame) -> None:
    """Bit for bit: an offloaded weight is the same number, and it is computed with by the same kernel."""
    pd.testing.assert_frame_equal(one[COORDINATES], other[COORDINATES])
    assert one["value"].equals(other["value"])


PROBES = ["sink_rate", "head_output", "massive_activation"]
"""One that needs keys, one that needs weights of the model, one that needs hidden states."""


@pytest.fixture(scope="module")
def measured(llama):
    return sinklab.measure(str(llama), probes=PROBES, device="cpu", **SAMPLES)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_users_own_offloaded_model_has_the_numbers_of_one_device(kind, llama, measured, tmp_path):
    model = offloaded(llama, kind, tmp_path)
    assert model.device.type == "meta"  # so that inputs must not go there
    result = sinklab.measure(model, probes=PROBES, **SAMPLES)
    same_numbers(measured.table, result.table)
    assert "output_norm" in set(result.table["metric"])  # taken with weights that are on the disk
    assert result.record["model"]["revision"] == wrap_model(own_model(llama)).revision


def test_an_audit_of_a_device_map_that_is_worked_out(llama, tmp_path):
    one, spread = (
        sinklab.audit(
            str(llama), **place, cache=False, corpus="random_tokens", samples=2, seq_len=8, out=tmp_path / f"audit{number}"
        )
        for number, place in enumerate(({"device": "cpu"}, {**HALF, "offload_folder": tmp_path / "disk"}))
    )
    same_numbers(one.table, spread.table)
    assert one.summary == spread.summary
    facts, spread = (json.loads((tmp_path / f"audit{number}" / "run.json").read_text())["model"] for number in (0, 1))
    assert facts["placement"] == "cpu"
    assert set(spread.pop("placement").values()) == {"cpu", "disk"}
    assert (facts["revision"], facts["parameters"]) == (spread["revision"], spread["parameters"])


def test_a_cache_policy_and_a_saved_state_of_an_offloaded_model(llama, tmp_path):
    """Policies turn keys and compare logits before they are used; the fingerprint of a saved stream reads weights."""
    settings = {
        "corpus": "random_tokens",
        "policies": ["sink_window"],
        "windows": [8],
        "sinks": [2],
        "tokens": 24,
        "documents": 1,
    }
    one, spread = (compare_policies(model, **settings) for model in (own_model(llama), offloaded(llama, "disk", tmp_path)))
    loss = [result.table.query("metric == 'loss'")["value"].tolist() for result in (one, spread)]
    assert loss[0] == loss[1]
    assert loss[0]
    assert fingerprint(own_model(llama)) == fingerprint(offloaded(llama, "disk", tmp_path))


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_bounded_cache_of_an_offloaded_model(kind, llama, tmp_path):
    """generate() and a stream give the tokens of one device, the prompt being longer than the cache."""
    prompt = (torch.arange(30) * 7 + 5).remainder(300)[None]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for model in (own_model(llama), offloaded(llama, kind, tmp_path)):
        cache = SinkCache(num_sinks=2, window=9)  # it finds its model
        generated = model.generate(prompt, past_key_values=cache, **settings)[0, 30:].tolist()
        source = Stream(model, policy=cache.policy, stop_ids=(), temperature=0.7, seed=1).feed(prompt[0])
        found.append((generated, [token.id for token in source.generate(12)], cache.bytes_held()))
        assert all(layer.keys.device == torch.device("cpu") for layer in cache.layers)
    assert found[0] == found[1]


def test_a_weight_wherever_it_is(llama, tmp_path):
    whole = own_model(llama)
    for kind in ("disk", "memory"):
        model = offloaded(llama, kind, tmp_path)
        assert all(torch.equal(held(model, name), tensor) for name, tensor in whole.state_dict().items())
        assert hash_weights(model) == hash_weights(whole)
        assert input_device(model) == torch.device("cpu")
    nowhere = transformers.LlamaForCausalLM(whole.config).to("meta")
    with pytest.raises(InputError, match=r"no weights: lm_head\.weight is on the meta device, and nothing says where"):
        hash_weights(nowhere)
    with pytest.raises(InputError, match="no weights"):
        input_device(nowhere)


def test_what_replaces_weights_needs_them_at_hand(llama, tmp_path):
    with pytest.raises(
        UnsupportedModelError, match="is spread over memory, disk or processes, and quantize needs every weight"
    ):
        sinklab.quantize(offloaded(llama, "disk", tmp_path), corpus="random_tokens")


def test_nan_in_a_weight_on_the_disk_is_found(llama, tmp_path):
    model = own_model(llama)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    message = r"NaN or infinite weights: 1 of 1536 numbers in model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(InputError, match=message):
        load_model(str(tmp_path / "broken"), **HALF, offload_folder=tmp_path / "disk")
    with pytest.raises(InputError, match=message):
        wrap_model(own_model(tmp_path / "broken", device_map=MAP))


REFUSED = {
    "device": ({"device": "cpu", "device_map": "auto"}, "`device` and `device_map` each say where the model goes; give one"),
    "alone": ({"offload_folder": "x"}, "`offload_folder` is about a model that is spread; give `device_map` too"),
    "memory": ({"device_map": "auto", "max_memory": "cpu=lots"}, "cannot be loaded as LlamaForCausalLM: .*lots"),
    "where": ({"device_map": "auto", "max_memory": "moon=1GB"}, "Device moon is not recognized"),
    "strategy": ({"device_map": "cuda:0"}, "no `device_map` 'cuda:0'; it is auto, balanced, .* give it to wrap_model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_line_says_what_cannot_be(case, llama):
    options, message = REFUSED[case]
    with pytest.raises((ConfigurationError, InputError), match=message) as error:
        load_model(str(llama), **options)
    assert "\n" not in str(error.value)


def test_without_accelerate(llama, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "accelerate" else find(name, *rest))
    with pytest.raises(
        ConfigurationError, match="`device_map` needs accelerate, which is not installed: pip install accelerate"
    ):
        load_model(str(llama), device_map="auto")


def test_weights_that_the_disk_must_hold_in_another_form_need_a_folder(tmp_path):
    """Experts of Mixtral are put together while they are read, so the checkpoint cannot serve as the place on the disk."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "mixtral")
    place = {"device_map": "auto", "max_memory": "cpu=8KB"}
    with pytest.raises(ConfigurationError, match="in another form than the checkpoint's; give a directory for them with `off"):
        load_model(str(tmp_path / "mixtral"), **place)
    loaded = load_model(str(tmp_path / "mixtral"), **place, offload_folder=tmp_path / "disk")
    assert hash_weights(loaded.model) == hash_weights(model)


def test_an_attached_operation_goes_to_one_device(llama, tmp_path):
    model = own_model(llama)
    sinklab.attach(model, "gated")
    model.save_pretrained(tmp_path / "gated")
    with pytest.raises(
        UnsupportedModelError, match="has an operation attached, which goes to one device; load it with `device`"
    ):
        load_model(str(tmp_path / "gated"), device_map="auto")
