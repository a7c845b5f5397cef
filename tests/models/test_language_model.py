"""SinkLM and the parts of its blocks, against their formulae."""

import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.conftest import TINY, make_sinklm, make_tokenizer
from tests.models.small_models import EXACT, SIGMOID, TOKENS, logits_of, make
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, pipeline

from sinklab.attention.operation import HeadShape, State
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError
from sinklab.models.block import NORMS, FeedForward
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations

every_operation = pytest.mark.parametrize("operation", [None, SIGMOID], ids=["softmax", "sigmoid"])


def test_the_default_architecture_is_llama():
    shape = TINY | {"num_key_value_heads": 2}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**shape, rms_norm_eps=1e-5, tie_word_embeddings=True)).eval()
    for parameter in llama.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = SinkLM(SinkLMConfig(**shape)).eval()
    state = {name.removeprefix("model."): tensor for name, tensor in llama.state_dict().items()}
    model.load_state_dict(state)
    with torch.no_grad():
        expected = llama(input_ids=TOKENS, labels=TOKENS)
        found = model(input_ids=TOKENS, labels=TOKENS)
    # float32, sums of at most 48 products in another order: 48 · 2^-24 of the largest logit, a few times over two layers.
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5 * float(expected.logits.abs().max()))
    torch.testing.assert_close(found.loss, expected.loss)


# --- the operation -----------------------------------------------------------------------------------------------------------


@every_operation
def test_a_checkpoint_comes_back_with_its_operation(operation, tmp_path):
    model = make_sinklm(operation)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(again, SinkLM)
    assert again.config.operation == (operation or {"name": "softmax"})
    assert again.config._attn_implementation == f"sinklab_{again.config.operation['name']}"
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention", "sinklab_softmax"])
def test_another_attention_than_the_operations_is_refused(implementation, tmp_path):
    message = f"attention '{implementation}' does not compute the operation of this SinkLM, 'sigmoid'; leave"
    model = make_sinklm(SIGMOID)
    with pytest.raises(ConfigurationError, match=message):
        model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == "sinklab_sigmoid"
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        SinkLM.from_pretrained(tmp_path, attn_implementation=implementation)
    with pytest.raises(ConfigurationError, match="'sinklab_sigmoid' does not compute the operation of this SinkLM, 'softmax'"):
        make_sinklm().set_attn_implementation("sinklab_sigmoid")


def test_two_models_of_one_config_keep_their_attention():
    config = SinkLMConfig(**TINY)
    first, second = SinkLM(config), SinkLM(config)
    first.set_attn_implementation("eager")
    assert (first.config._attn_implementation, second.config._attn_implementation) == ("eager", "sinklab_softmax")
    assert config._attn_implementation is None


def test_a_bias_that_an_attention_cannot_take_is_refused():
    with pytest.raises(ConfigurationError, match="'flex_attention' cannot add the bias of position scheme 'alibi'"):
        make(position={"name": "alibi"}).set_attn_implementation("flex_attention")


@pytest.mark.slow
def test_flex_attention_sees_window_and_prefix():
    for fields in ({"window": 3}, {"prefix": 4}, {}):
        model = make(**fields).float()
        expected = logits_of(model)
        model.set_attn_implementation("flex_attention")
        # float32: a few hundred roundings of 6e-8 at logits of up to ten.
        torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-4)


@dataclass(frozen=True, kw_only=True)
class Learning(Softmax):
    """Softmax with a parameter that it does not use, and one that it draws."""

    name: ClassVar[str] = "learning"
    needs_layer_input: ClassVar[bool] = True

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        return {"constant": torch.full((shape.num_heads,), -3.0), "drawn": torch.randn(shape.hidden_size)}

    def gain(self, state: State) -> Tensor:
        LAYER_INPUTS.append(state["layer_input"])
        return 1 + 0 * state["drawn"].sum()


LAYER_INPUTS: list[Tensor] = []


def test_a_softmax_checkpoint_under_another_operation(monkeypatch, tmp_path):
    monkeypatch.setitem(operations._objects, "learning", Learning)
    trained = make()
    trained.save_pretrained(tmp_path)
    model, report = SinkLM.from_pretrained(
        tmp_path, operation={"name": "learning"}, dtype=torch.float64, output_loading_info=True
    )
    states = [layer.self_attn.operation_state for layer in model.layers]
    assert {name.rpartition(".")[2] for name in report["missing_keys"]} == {"constant", "drawn"}
    assert all((state.constant == -3.0).all() and 0.5 < float(state.drawn.detach().std()) < 1.5 for state in states)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in trained.state_dict().items())
    LAYER_INPUTS.clear()
    torch.testing.assert_close(logits_of(model), logits_of(trained), **EXACT)
    expected = model.layers[0].input_layernorm(model.embed_tokens(TOKENS))
    assert any(torch.equal(given, expected) for given in LAYER_INPUTS)


# --- initialisation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initialization", "std", "outward"),
    [
        ("depth_scaled", 0.02, {"o_proj": 0.01, "down_proj": 0.01}),
        ("normal", 0.02, {}),
        ("released", (0.4 / 256) ** 0.5, {"down_proj": 512**-0.5 / 2}),
    ],
)
def test_initialisation(initialization, std, outward):
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = SinkLM(SinkLMConfig(**shape, initialization=initialization, tie_word_embeddings=False))
    names = ("embed_tokens", "q_proj", "o_proj", "up_proj", "down_proj", "lm_head")
    for name, wanted in (dict.fromkeys(names, std) | outward).items():
        for key, parameter in model.named_parameters():
            if name in key:
                # The deviation of n normal numbers is off by 1 / sqrt(2n), here 1/360; four times that.
                assert float(parameter.detach().std()) == pytest.approx(wanted, rel=0.012), key


# --- a transformers model -----------------------------------------------------------------------------------------------------


@every_operation
def test_compiles_with_labels_in_one_graph(operation):
    torch._dynamo.reset()  # what earlier tests compiled of the same code counts towards a limit
    model = make_sinklm(operation)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert compiled(input_ids=TOKENS, labels=TOKENS).loss.item() == pytest.approx(
        model(input_ids=TOKENS, labels=TOKENS).loss.item(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"window": 3}, {}),
        ({"prefix": 3}, {"attention_mask": torch.ones_like(TOKENS)}),
        ({"operation": {"name": "fronted"}, "window": 3, "norm_placement": "sandwich"}, {}),
    ],
    ids=["window", "prefix", "front"],
)
def test_compiles_with_every_mask(fields, arguments, fronted):
    model = make(**fields)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits_of(compiled, **arguments), logits_of(model, **arguments), **EXACT)


def test_the_loss_is_the_mean_over_next_tokens(caplog):
    model = make_sinklm()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        output = model(input_ids=TOKENS, labels=TOKENS)
        summed = model(input_ids=TOKENS, labels=TOKENS, num_items_in_batch=torch.tensor(44)).loss
    expected = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(summed, expected / 2)
    assert "loss_type" not in caplog.text


@pytest.mark.parametrize("front", [False, True])
def test_the_prefix_has_no_loss(front, fronted):
    model = make(prefix=4, **({"operation": {"name": "fronted"}} if front else {}))
    assert not model.accepts_loss_kwargs
    with torch.no_grad():
        output = model(input_ids=TOKENS, labels=TOKENS)
        # Targets are tokens 4 to 11 (0-based), predicted by the logits of the token before each.
        expected = nn.functional.cross_entropy(output.logits[:, 3:-1].flatten(0, 1), TOKENS[:, 4:].flatten())
        torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=0)


def test_generation_with_and_without_cache_agree():
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    for model in (make(operation=SIGMOID), make(window=4), make(prefix=3, position={"name": "alibi"})):
        expected = model.generate(TOKENS, use_cache=False, **settings)
        assert torch.equal(model.generate(TOKENS, **settings), expected)
        assert torch.equal(model.generate(TOKENS, cache_implementation="static", **settings), expected)


def test_generation_behind_padding():
    model = make(position={"name": "learned"}, window=5)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    padded = nn.functional.pad(TOKENS, (3, 0), value=1)
    mask = nn.functional.pad(torch.ones_like(TOKENS), (3, 0))
    found = model.generate(padded, attention_mask=mask, **settings)
    assert torch.equal(found[:, 3:], model.generate(TOKENS, **settings))
    with_prefix = make(prefix=3)
    expected = with_prefix.generate(TOKENS, **settings)
    for cache in (None, "static"):
        found = with_prefix.generate(padded, attention_mask=mask, cache_implementation=cache, **settings)
        assert torch.equal(found[:, 3:], expected)
    beams = model.generate(padded, attention_mask=mask, num_beams=3, **settings)
    assert torch.equal(beams[:, 3:], model.generate(TOKENS, num_beams=3, **settings))


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = make(position={"name": "relative"}, operation=SIGMOID).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, **EXACT)


def test_outputs_asked_for():
    model = make()
    with torch.no_grad():
        output = model(input_ids=TOKENS, output_hidden_states=True, output_attentions=True)
        indexed = model(input_ids=TOKENS, logits_to_keep=torch.tensor([0, 5]), return_dict=False)[0]
    assert [tuple(states.shape) for states in output.hidden_states] == [(2, 12, 32)] * 3
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    torch.testing.assert_close(indexed, output.logits[:, [0, 5]], **EXACT)
    for weights in output.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 12, dtype=torch.float64))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigurationError, match="attention 'sdpa' keeps no weights"):
        model(input_ids=TOKENS, output_attentions=True)


def test_bfloat16_stays_bfloat16():
    for fields in ({}, {"position": {"name": "alibi"}, "norm": "layer_norm"}, {"norm_placement": "sandwich"}):
        model = make(**fields).bfloat16()
        assert logits_of(model).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert make(**fields).float()(input_ids=TOKENS, labels=TOKENS).loss.isfinite()


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"window": 4, "position": {"name": "alibi"}}, {}),
        ({"prefix": 3, "head_merge": "add"}, {"attention_mask": torch.ones_like(TOKENS)}),
        ({"norm_placement": "post", "position": {"name": "relative"}}, {"position_ids": torch.arange(12)[None] + 5}),
        ({"operation": {"name": "fronted"}, "window": 4}, {}),
    ],
    ids=["window", "prefix", "shifted", "front"],
)
@pytest.mark.parametrize("implementation", [None, "eager", "sdpa"])
def test_a_session_sees_and_verifies_every_axis(fields, arguments, implementation, fronted):
    model = make(**fields)
    if implementation is not None and model.config.operation["name"] == "softmax":
        model.set_attn_implementation(implementation)
    before = logits_of(model, **arguments)
    with attend(model) as session:
        during = logits_of(model, **arguments)
    assert torch.equal(before, during)
    assert session.checks["calls_verified"] == 2


def test_a_pipeline_of_transformers_takes_the_model():
    """Which puts a ``prefix`` that it finds in the config in front of every prompt, as a text."""
    model, tokenizer = make_sinklm(), make_tokenizer()
    prompt = tokenizer("the cat", return_tensors="pt")["input_ids"]
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=-1)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (given,) = pipe("the cat", max_new_tokens=5, do_sample=False, eos_token_id=-1)
    assert given["generated_text"] == tokenizer.decode(expected[0], skip_special_tokens=True)


def test_a_config_takes_the_prefix_under_either_name():
    saved = make_sinklm().config.to_dict()
    assert saved["prefix_length"] == 0
    assert "prefix" not in saved
    before = {name: value for name, value in saved.items() if name != "prefix_length"}
    for given in ({**before, "prefix": 3}, {**saved, "prefix_length": 3}):
        config = SinkLMConfig(**given)
        assert (config.prefix_length, config.architecture.prefix, hasattr(config, "prefix")) == (3, 3, False)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("pre", lambda x: x + 10 * (x + 1) + 100 * (x + 10 * (x + 1) + 2)),
        ("post", lambda x: 101 * (11 * x + 2) + 4),
        ("sandwich", lambda x: (h := x + 10 * (x + 1) + 2) + 100 * (h + 3) + 4),
    ],
)
def test_placement_of_norms(placement, expected, monkeypatch):
    """Attention is ×10, the feed-forward ×100, and every norm adds its number; what is left is the wiring."""
    layer = make(norm_placement=placement, position={"name": "no_position"}).layers[0]
    numbers = {
        "input_layernorm": 1,
        "post_attention_layernorm": 2,
        "pre_feedforward_layernorm": 3,
        "post_feedforward_layernorm": 4,
    }
    monkeypatch.setattr(layer.self_attn, "forward", lambda states, **_: (10 * states, None))
    monkeypatch.setattr(layer.mlp, "forward", lambda states: 100 * states)
    for name, number in numbers.items():
        if hasattr(layer, name):
            monkeypatch.setattr(getattr(layer, name), "forward", lambda states, number=number: states + number)
    x = torch.full((1, 1, 32), 7.0, dtype=torch.float64)
    assert torch.equal(layer(x)[0], expected(x))


def test_post_norm_has_no_final_norm():
    assert not any(name.startswith("norm.") for name in make(norm_placement="post").state_dict())


def test_added_heads_share_one_map():
    """The sum of the heads through one map is their concatenation through copies of it."""
    added, concatenated = make(head_merge="add"), make()
    state = added.state_dict()
    for name in [name for name in state if name.endswith("o_proj.weight")]:
        state[name] = state[name].repeat(1, 4)
    concatenated.load_state_dict(state)
    torch.testing.assert_close(logits_of(added), logits_of(concatenated), **EXACT)


def test_norms_by_their_formulae():
    x = torch.tensor([[1.0, -2.0, 3.0, 0.0]], dtype=torch.float64)
    norms = {name: cls(4, 1e-5).double() for name, cls in NORMS.items()}
    torch.testing.assert_close(norms["rms_norm"](x), x / (14 / 4 + 1e-5) ** 0.5)
    torch.testing.assert_close(norms["layer_norm"](x), (x - 0.5) / (13 / 4 + 1e-5) ** 0.5)


@pytest.mark.parametrize("name", NORMS)
def test_norms_round_once_in_half_precision(name):
    x = 30 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = NORMS[name](32, 1e-5)
    exact = norm(x.float())
    # A last rounding to 8 bits.
    torch.testing.assert_close(norm.bfloat16()(x).float(), exact, rtol=2.0**-7, atol=2.0**-7)


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("plain", "gated", "act"),
    [("relu", "reglu", torch.relu), ("gelu", "geglu", nn.GELU()), ("swish", "swiglu", nn.SiLU())],
    ids=["relu", "gelu", "swish"],
)
def test_formulae(plain, gated, act):
    layer = FeedForward(plain, 8, 16)
    assert torch.equal(layer(X), layer.down_proj(act(layer.up_proj(X))))
    layer = FeedForward(gated, 8, 16)
    assert torch.equal(layer(X), layer.down_proj(act(layer.gate_proj(X)) * layer.up_proj(X)))
