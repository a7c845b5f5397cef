"""attach(): any operation on a foreign model; its parameters train, save and load; refusals say why."""

import copy
import json
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import transformers
from tests.conftest import make_sinklm
from tests.models.adapted import Adapted, Mixed, with_adapters
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.seam import register_operation
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.attach import attach, save_model
from sinklab.models.loading import load_model
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations

ATTACHABLE = [name for name in operations if name != "sink_token"]


@pytest.mark.parametrize("name", ATTACHABLE)
def test_every_operation_trains_and_comes_back(name, tmp_path):
    """Gradients reach every parameter at random values, a session accounts for the outputs, a checkpoint keeps all of it."""
    model = randomize(attach(llama(), name))
    model(TOKENS, labels=TOKENS).loss.backward()
    assert not [key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    with attend(model.eval(), verify=True) as session, torch.no_grad():
        logits = model(TOKENS).logits
    assert session.checks["calls_verified"] == 2
    save_model(model, tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.operation == name
    with torch.no_grad():
        assert torch.equal(loaded.model(TOKENS).logits, logits)


def opt() -> transformers.OPTForCausalLM:
    """Without a buffer that `model.to` rounds and `from_pretrained` does not, as the frequencies of rotary positions are."""
    config = transformers.OPTConfig(
        vocab_size=50, hidden_size=32, ffn_dim=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, eos_token_id=2, bos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore:attach. operation .*gates start")
@pytest.mark.parametrize("name", ATTACHABLE)
@pytest.mark.parametrize("ours", [False, True], ids=["attached", "ours"])
def test_parameters_have_the_dtype_of_the_model(name, ours, tmp_path):
    """However it comes about: cast, loaded, or attached to what is in that dtype."""
    wide = randomize(make_sinklm(operation={"name": name}) if ours else attach(opt(), name))
    save_model(wide, tmp_path)
    loaded, cast = load_model(str(tmp_path), dtype="bfloat16").model, wide.to(torch.bfloat16)
    models = [loaded, cast] if ours else [loaded, cast, attach(opt().to(torch.bfloat16), name)]
    for model in models:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    if not ours:
        with torch.no_grad():
            assert torch.equal(loaded(TOKENS).logits, cast(TOKENS).logits)


@pytest.mark.parametrize("make", [lambda: attach(llama(), "sigmoid"), make_sinklm], ids=["attached", "ours"])
def test_a_pickled_model_brings_its_operation_to_a_process_that_does_not_know_it(make, monkeypatch):
    model = make().eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
    data, name = pickle.dumps(model), model.config._attn_implementation
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):  # as they are in a new process
        monkeypatch.delitem(table._global_mapping, name)
    arrived = pickle.loads(data)
    with torch.no_grad():
        assert torch.equal(arrived(TOKENS).logits, logits)
    with attend(arrived) as session, torch.no_grad():
        arrived(TOKENS)
    assert session.operation == name.removeprefix("sinklab_")


def readers_of_other_things():
    """Models of pictures, of sound, and of both sides of a text, with what they read: none runs on token ids alone."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    eyes, words = {**sizes, "image_size": 16, "patch_size": 4}, {**sizes, "vocab_size": 40, "max_position_embeddings": 32}
    tokens, pixels = torch.tensor([[1, *[39] * 16, 5, 2]]), torch.randn(1, 3, 16, 16)
    ears = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16}
    yield transformers.ViTForImageClassification(transformers.ViTConfig(**eyes)), {"pixel_values": pixels}
    config = transformers.CLIPConfig(text_config={**words, "eos_token_id": 2}, vision_config=eyes, projection_dim=16)
    yield transformers.CLIPModel(config), {"input_ids": tokens, "pixel_values": pixels}
    config = transformers.Wav2Vec2Config(**sizes, **ears, num_conv_pos_embedding_groups=4)
    yield transformers.Wav2Vec2Model(config), {"input_values": torch.randn(1, 3000)}
    vision = transformers.CLIPVisionConfig(**eyes)
    config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**words), vision_config=vision, image_token_id=39)
    yield transformers.LlavaForConditionalGeneration(config), {"input_ids": tokens, "pixel_values": pixels}


@pytest.mark.parametrize("number", range(4))
def test_models_that_read_other_things_than_tokens_come_back_without_an_example(number, tmp_path):
    """Their checkpoints keep the shapes of the heads; ViT and LLaVA are kept under the names of an older class."""
    model, inputs = list(readers_of_other_things())[number]
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=r"pass example=\{…\} with"):
        attach(copy.deepcopy(model), "gated")
    randomize(attach(model.eval(), "gated", example=inputs))
    save_model(model, tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.operation == "gated"
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(**inputs).to_tuple()[0], model(**inputs).to_tuple()[0])
    assert len(loaded.model.config.sinklab["heads"]) == 1  # all modules have one shape, which stands there once


def test_shapes_of_heads_in_a_config(tmp_path):
    """A checkpoint from before they were kept is asked for them by a forward; those that are none are refused."""
    model = randomize(attach(llama(), "gated")).eval()
    save_model(model, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    shapes = config["sinklab"].pop("heads")
    path.write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(load_model(str(tmp_path)).model(TOKENS).logits, model(TOKENS).logits)
    for wrong, said in (
        ([{**shapes[0], "hidden_size": 8}], r"operation_state\.weight is of shape .* in the weights and .* by config\.json"),
        ({"modules": []}, r"sinklab\.heads holds no shapes of heads"),
    ):
        config["sinklab"]["heads"] = wrong
        path.write_text(json.dumps(config))
        with pytest.raises(InputError, match=said):
            load_model(str(tmp_path))


@pytest.fixture
def gated_sink(monkeypatch):
    """An operation with everything: a learned null score, a null value, an output bias and a gate on the layer's input."""

    @dataclass(frozen=True, kw_only=True)
    class GatedSink(Softmax):
        name: ClassVar[str] = "gated_sink"
        needs_layer_input: ClassVar[bool] = True
        initial: float = 0.5

        def parameters(self, shape):
            return {
                "logit": torch.full((shape.num_heads,), self.initial),
                "value": torch.zeros(shape.num_heads, shape.value_dim),
                "bias": torch.zeros(shape.num_heads, shape.value_dim),
                "gate": torch.zeros(shape.num_heads, shape.hidden_size),
            }

        def null_scores(self, queries, scaling, state):
            return state["logit"][None, :, None]

        def null_value(self, state):
            return state["value"]

        def output_bias(self, state):
            return state["bias"]

        def gain(self, state):
            opened = torch.nn.functional.linear(state["layer_input"], state["gate"].to(state["layer_input"].dtype))
            return torch.sigmoid(opened).transpose(1, 2)[..., None]

    monkeypatch.setitem(operations._objects, "gated_sink", GatedSink)
    monkeypatch.setattr(type(operations), "_require", lambda self, name: None)
    return GatedSink


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


TOKENS = torch.arange(24).view(2, 12) % 50


def randomize(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".operation_state." in name:
                parameter.normal_()
    return model


def test_softmax_attached_changes_nothing():
    model = llama()
    before = model(TOKENS).logits
    attach(model, "softmax")
    # The same arithmetic in another kernel: two layers of float32 sums.
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=0, atol=1e-5)


def test_round_trip(gated_sink, tmp_path):
    model = randomize(attach(llama(), {"name": "gated_sink", "initial": -1.0}))
    save_model(model, tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"))
    assert loaded.operation == "gated_sink"
    with torch.no_grad():
        assert torch.equal(loaded.model(TOKENS).logits, model(TOKENS).logits)
    assert loaded.model.model.layers[0].self_attn.operation.initial == -1.0


def test_a_checkpoint_without_the_parameters(gated_sink, tmp_path):
    model = attach(llama(), "gated_sink")
    config = model.config
    plain = llama()
    plain.config.sinklab = config.sinklab
    plain.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"says that its attention is 'gated_sink' and lacks 8 of its parameters, first model"):
        load_model(str(tmp_path))


def test_a_name_alone_is_not_saved(tmp_path):
    model = llama()
    model.set_attn_implementation(register_operation(Sigmoid()))
    with pytest.raises(ConfigurationError, match="by name alone, which a checkpoint does not keep"):
        save_model(model, tmp_path)


def test_a_part_with_an_operation_is_saved_by_itself(gated_sink, tmp_path):
    """Before, the whole was saved without a word, and came back as softmax."""
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 50, "eos_token_id": 1, "bos_token_id": 0}
    vision = {**tower, "image_size": 4, "patch_size": 2}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
    model.set_attn_implementation({"text_config": register_operation(Sigmoid())})
    with pytest.raises(ConfigurationError, match=r"runs 'sinklab_sigmoid', in text_model, by name alone, which a checkpoint"):
        save_model(model, tmp_path / "named")
    model.set_attn_implementation("sdpa")
    randomize(attach(model.text_model, gated_sink()))
    with pytest.raises(ConfigurationError, match=r"'gated_sink' is attached to text_model alone, .*model.text_model, …"):
        save_model(model, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    save_model(model.text_model, tmp_path / "part")
    again = load_model(str(tmp_path / "part")).model
    assert torch.equal(again(TOKENS).last_hidden_state, model.text_model(TOKENS).last_hidden_state)


def test_a_sibling_of_the_same_config_is_untouched():
    model = llama()
    sibling = transformers.LlamaForCausalLM(model.config).eval()
    before = sibling(TOKENS).logits
    attach(model, "sigmoid")
    assert torch.equal(sibling(TOKENS).logits, before)
    assert not torch.equal(model(TOKENS).logits, before)


def test_encoder_decoder_gets_every_attention(gated_sink):
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    model = randomize(attach(transformers.BartForConditionalGeneration(config), "gated_sink").eval())
    owners = {name.rpartition(".operation_state")[0] for name, _ in model.named_parameters() if "operation_state" in name}
    assert len(owners) == 3
    with attend(model, verify=True) as session, torch.no_grad():
        model(input_ids=TOKENS, decoder_input_ids=TOKENS)
    assert session.checks["calls_verified"] == 3


def test_no_graph_is_kept_alive(gated_sink):
    model = attach(llama(), "gated_sink")
    model(TOKENS)
    assert model.model.layers[0].self_attn.operation_state.passing.layer_input is None


def test_a_copy_has_hooks_of_its_own_and_a_model_pickles(gated_sink):
    model = randomize(attach(llama(), "gated_sink"))
    expected = model(TOKENS).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS).logits, expected)
    model.model.layers[0].self_attn.operation_state.passing.layer_input = "untouched"
    twin(TOKENS)
    assert model.model.layers[0].self_attn.operation_state.passing.layer_input == "untouched"
    average = torch.optim.swa_utils.AveragedModel(twin)
    assert torch.equal(average(TOKENS).logits, expected)


def test_refusals():
    with pytest.raises(ConfigurationError, match="the operation of a SinkLM is a field of its config"):
        attach(make_sinklm(), "sigmoid")
    with pytest.raises(ConfigurationError, match="already has operation 'sigmoid'"):
        attach(attach(llama(), "sigmoid"), "softmax")
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match="computes attention in its own code"):
        attach(bloom, "sigmoid")
    with pytest.raises(UnsupportedModelError, match="puts learned tokens in front, which only SinkLM does by itself"):
        attach(llama(), "sink_token")
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM has no attention; no operation can be attached"):
        attach(mamba, "sigmoid")


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), torch.nn.DataParallel])
def test_what_torch_puts_round_a_model(wrap, gated_sink, tmp_path):
    """Before, ``attach`` ended in a KeyError or an AttributeError, and so did ``save_model``."""
    model = llama()
    wrapped = wrap(model)
    assert attach(wrapped, gated_sink()) is wrapped
    randomize(model)
    save_model(wrapped, tmp_path)
    assert torch.equal(load_model(str(tmp_path)).model(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("wrap", [lambda model: Adapted(model, prompt=False), lambda model: model, Mixed])
def test_a_model_with_adapters_is_no_ordinary_checkpoint(wrap, tmp_path):
    model, _ = with_adapters(llama(), "model.layers.1.self_attn.o_proj")
    with pytest.raises(
        ConfigurationError, match=r"adapters of PEFT, first model\.layers\.1\.self_attn\.o_proj, which .* merge_and"
    ):
        save_model(wrap(model), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_parameterised_operation_by_name_alone(gated_sink):
    model = llama()
    model.set_attn_implementation(register_operation(gated_sink()))
    with pytest.raises(
        ConfigurationError, match=r"has learned parameters, which LlamaAttention does not carry; attach it first"
    ):
        model(TOKENS)


@pytest.mark.parametrize(
    ("operation", "says"), [({"name": "gated", "floor": 0.5}, r"near 0\.75"), ("gated_heads", r"at 0\.5: .*; double=true")]
)
def test_a_gate_that_starts_half_closed_is_said(operation, says):
    with pytest.warns(UserWarning, match=says):
        attach(llama(), operation)


def test_an_open_gate_and_a_loaded_one_are_not(tmp_path, recwarn):
    before = llama()(TOKENS).logits
    for operation in ({"name": "gated", "double": True}, {"name": "gated_heads", "double": True}):
        torch.testing.assert_close(attach(llama(), operation)(TOKENS).logits, before)
    opened = attach(llama(), {"name": "gated", "initial_bias": 4.0})  # 0.98, and a map that does not start at 0
    assert torch.nn.functional.cosine_similarity(before.flatten(), opened(TOKENS).logits.flatten(), dim=0) > 0.99
    attach(llama(), "sink_logit")
    assert not [warning for warning in recwarn if "attach" in str(warning.message)]
    with pytest.warns(UserWarning, match="gates start"):
        save_model(attach(llama(), "gated"), tmp_path)
    recwarn.clear()
    load_model(str(tmp_path))
    assert not [warning for warning in recwarn if "attach" in str(warning.message)]


def test_the_tokenizer_goes_with_the_model(checkpoint, tmp_path):
    loaded = load_model(str(checkpoint))
    save_model(loaded, tmp_path / "ours")
    save_model(loaded.model, tmp_path / "model", loaded.tokenizer)
    save_model(llama(), tmp_path / "memory")
    for name, kept in (("ours", True), ("model", True), ("memory", False)):
        tokenizer = load_model(str(tmp_path / name)).tokenizer
        assert (tokenizer is not None) == kept
        if kept:
            assert tokenizer("def main():")["input_ids"] == loaded.tokenizer("def main():")["input_ids"]
