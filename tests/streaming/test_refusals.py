"""What a bounded cache refuses: before the first token, by name, and saying what to do instead."""

import warnings

import pytest
import torch
import transformers
from tests.architectures.zoo import ENCODER_DECODERS, ZOO, build, enliven, shape
from tests.conftest import TINY
from tests.models.adapted import Adapted
from tests.streaming.decoders import (
    REFUSED,
    SINKS,
    TOLERANCE,
    WINDOW,
    Gapped,
    build_decoder,
    decoder,
    gap,
    one_by_one,
    read,
    small,
    text,
)

from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.attach import attach
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.limits import length_known
from sinklab.streaming.reader import open_reader
from sinklab.streaming.stream import Stream
from sinklab.streaming.traits import read_rotations

SIZES = {name: TINY[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}


# --- models ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_decoders(family):
    """Of the class's bare constructor and of generate(), before anything is generated."""
    model = build(ZOO[family], "eager")
    with pytest.raises(UnsupportedModelError, match=REFUSED[family]) as refusal:
        small(model)
    assert type(model).__name__ in str(refusal.value)
    said = []
    model.register_forward_hook(lambda *_: said.append(1))
    with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
        model.generate(text(5), past_key_values=small(), max_new_tokens=2)
    assert len(said) <= 1  # reading the rotations at most


def rotary(**fields):
    return build_decoder("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, **fields)


MODELS = {
    "not causal": (
        lambda: small(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, is_causal=False)).eval()),
        "LlamaForCausalLM sees later tokens",
    ),
    "encoder": (
        lambda: small(transformers.BertForMaskedLM(transformers.BertConfig(**TINY)).eval()),
        "BertForMaskedLM sees later tokens, as encoders do",
    ),
    "rotary encoder": (
        lambda: small(transformers.ModernBertModel(transformers.ModernBertConfig(**TINY, pad_token_id=0)).eval()),
        "ModernBertModel sees later tokens, as encoders do",
    ),
    "no cache": (
        lambda: small(
            transformers.CLIPModel(transformers.CLIPConfig(text_config=dict(TINY), vision_config={"num_hidden_layers": 1}))
        ),
        "CLIPModel takes no cache of keys and values, so it does not read a text",
    ),
    "scaled queries": (
        lambda: small(build(ZOO["llama4"], layer_types=["full_attention"] * 2, attn_temperature_tuning=True)),
        "scales queries by the number of tokens seen",
    ),
    "narrow windows": (
        lambda: small(build_decoder("mistral", "eager", sliding_window=SINKS + WINDOW)),
        r"layers that see 11 tokens; the policy holds 12.* add up to 11 or less",
    ),
    "own, narrow": (
        lambda: small(SinkLM(SinkLMConfig(**TINY, window=8)).eval()),
        "layers that see 8 tokens; the policy holds 12",
    ),
    **{
        f"own, {scheme}": (lambda scheme=scheme: small(SinkLM(SinkLMConfig(**TINY, position={"name": scheme})).eval()), said)
        for schemes, said in (
            (("learned", "sinusoid"), "adds positions to its hidden states"),
            (
                ("alibi", "relative", "bucket_index"),
                "SinkLM adds a bias that counts the keys .* The policy 'recompute' encodes",
            ),
        )
        for scheme in schemes
    },
    "falcon with alibi": (
        lambda: small(build(ZOO["falcon"], "eager", alibi=True)),
        "FalconForCausalLM adds a bias that counts the keys",
    ),
    "frequencies end": (
        lambda: SinkCache(rotary(), num_sinks=2, window=64),
        "keeps its frequencies up to position 64, and the policy holds 67 tokens",
    ),
    **{
        f"rotations of {family}": (lambda family=family: read_rotations(build(ZOO[family], "eager")), ZOO[family].model)
        for family in ("deepseek_v32", "gpt2")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    make, said = MODELS[name]
    with pytest.raises(UnsupportedModelError, match=said):
        make()


def test_no_room_for_positions():
    with pytest.raises(
        ConfigurationError, match=r"positions up to .* are too few: the policy holds 12 tokens and a chunk has 128"
    ):
        small(rotary(), rebase_at=20)
    SinkCache(build_decoder("mistral", "eager", sliding_window=SINKS + WINDOW), num_sinks=SINKS, window=WINDOW - 1)


class Held(torch.nn.Module):
    """As sentence-transformers holds a model."""

    def __init__(self, model=None):
        super().__init__()
        self.transformers_model = model

    @property
    def config(self):
        return self.transformers_model.config


def test_a_model_inside_another_object_is_taken_out_where_that_is_known_and_else_refused():
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval()
    assert small(torch.nn.DataParallel(llama)).model is llama
    assert Stream(torch.nn.DataParallel(llama)).model is open_reader(torch.compile(llama), "sink_window").model is llama
    bert = Held(transformers.BertModel(transformers.BertConfig(**TINY)).eval())
    with pytest.raises(UnsupportedModelError, match="BertModel sees later tokens"):
        small(bert)
    with pytest.raises(UnsupportedModelError, match="BertModel predicts no next token"):
        Stream(bert)
    for make in (small, Stream, lambda model: open_reader(model, "recompute"), small().bind):
        with pytest.raises(InputError, match="Sequential is no model of transformers; give the model that is inside it"):
            make(torch.nn.Sequential(llama))
    prompted = Adapted(llama, prompt=True)  # as PEFT's prompt and prefix tuning
    with pytest.raises(UnsupportedModelError, match="puts a learned prompt in front of every text"):
        small(prompted)


@pytest.mark.parametrize("entry", ENCODER_DECODERS, ids=lambda entry: entry.id)
def test_encoder_decoders(entry):
    model = build(entry)
    with pytest.raises(UnsupportedModelError, match="is an encoder-decoder, whose decoder does not read a text by itself"):
        open_reader(model, "sink_window")
    with pytest.raises(UnsupportedModelError, match="is an encoder-decoder, which writes no longer than its source asks for"):
        small(model)


def mapped(operation: str = "elu_kernel", **fields) -> SinkLM:
    torch.manual_seed(0)
    model = SinkLM(SinkLMConfig(**{**shape(head_dim=8), "operation": {"name": operation}, **fields})).eval()
    enliven(model, seed=7)
    return model


def test_maps_of_rotated_keys():
    """A function of each coordinate makes scores those of positions, which depend on where a cache counts them from."""
    attached = attach(build_decoder("llama"), "elu_kernel")
    said = r"scores of positions themselves .* operation 'elu_kernel' maps queries and keys after they are rotated.*'recompute'"
    for model in (mapped(), attached):
        for refused in (small, lambda model: open_reader(model, "window")):
            with pytest.raises(UnsupportedModelError, match=said):
                refused(model)
        open_reader(model, {"name": "recompute", "window": 8})
    with pytest.raises(UnsupportedModelError, match="values without positions and layer 1 has not: a token alone gives itself"):
        small(mapped("mlp_kernel"))
    with pytest.raises(UnsupportedModelError, match="operation 'mlp_kernel' maps queries"):
        small(mapped("mlp_kernel", num_hidden_layers=1))


@pytest.mark.parametrize(
    ("operation", "position"), [("elu_kernel", "no_position"), ("mlp_kernel", "no_position"), ("qk_norm", "rotary")]
)
def test_maps_that_go_with_positions(operation, position):
    """Of keys that are not rotated any map will do, and of rotated ones those that keep what a rotation keeps."""
    model = mapped(operation, position={"name": position})
    tight = small(model, chunk=4, rebase_at=SINKS + WINDOW + 6)
    assert gap(read(model, text(60), tight), one_by_one(model, text(60), small(model))) < TOLERANCE


@pytest.mark.parametrize("name", ["softmax", "softmax_plus_one", "sigmoid", "key_bias", "gated", "relu"])
def test_own_models_that_work(name):
    torch.manual_seed(0)
    model = SinkLM(SinkLMConfig(**TINY, operation={"name": name})).eval()
    tokens = text(30)
    with torch.no_grad():
        assert gap(model(input_ids=tokens[:, :12]).logits, read(model, tokens[:, :12])) < 1e-4
    assert gap(one_by_one(model, tokens), read(model, tokens, pieces=[19, 1, 10])) < 1e-4


# --- settings and use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": 64.0}, "window must be a whole number, got 64.0"),
        ({"chunk": 0}, "chunk 0 must be 1 or more"),
        ({"chunk": "4"}, "chunk must be a whole number, got '4'"),
    ],
)
def test_sizes(settings, said):
    with pytest.raises(ConfigurationError, match=said):
        SinkCache(**settings)


def test_no_model():
    with warnings.catch_warnings():  # of the hook that is called after a failure too
        warnings.simplefilter("error")
        bound = small(decoder("llama"))
        with pytest.raises(ConfigurationError, match=r"does not know its model, which only generate\(\) can tell it"):
            read(decoder("llama"), text(3), SinkCache())
        assert gap(read(decoder("llama"), text(9), bound), read(decoder("llama"), text(9))) == 0


def test_another_model():
    mine, other = decoder("llama"), decoder("qwen2")
    cache = small(mine)
    for use in (
        lambda: read(other, text(3), cache),  # it never had a cache like this
        lambda: small(other) and read(other, text(3), cache),
        lambda: other.generate(text(3), past_key_values=cache, max_new_tokens=2, pad_token_id=0),
        lambda: cache.bind(other),
    ):
        with pytest.raises(ConfigurationError, match="LlamaForCausalLM"):
            use()
    assert cache.get_seq_length() == 0
    assert gap(read(mine, text(9), cache), read(mine, text(9))) == 0
    with pytest.raises(ConfigurationError, match="belongs to a model that is gone"):
        read(mine, text(3), small(build_decoder("llama")))


def test_another_batch_size():
    model, cache = decoder("llama"), small(decoder("llama"))
    read(model, text(9, rows=2), cache)
    with pytest.raises(ConfigurationError, match=r"holds 2 rows and is given 3; reset\(\) it"):
        read(model, text(9, rows=3), cache)
    cache.reset()
    assert gap(read(model, text(9, rows=3), cache), read(model, text(9, rows=3))) == 0


def test_gradients_and_attention_without_a_mask():
    model = build_decoder("llama")
    cache = small(model)
    with pytest.raises(ConfigurationError, match=r"has no gradient; run under torch\.no_grad\(\)"):
        model(input_ids=text(3), past_key_values=cache)
    for name in ("flex_attention", "flash_attention_2"):
        model.config._attn_implementation = name
        with pytest.raises(UnsupportedModelError, match=rf"attention '{name}' takes no 4-D mask.*attn_implementation=\"sdpa\""):
            read(model, text(5), cache)
    model.set_attn_implementation("sdpa")
    assert cache.get_seq_length() == 0
    assert gap(read(model, text(9), cache), read(model, text(9))) == 0


@torch.no_grad()
def test_gradient_checkpointing():
    """Its layers drop the cache in training mode; in evaluation mode they do not."""
    model, cache = build_decoder("llama"), small()
    old = "gradient_checkpointing_enable"  # before transformers 5.23
    getattr(model, "activation_checkpointing_enable" if hasattr(model, "activation_checkpointing_enable") else old)()
    model.train()
    with pytest.raises(ConfigurationError, match=r"withholds the cache from its layers; call model\.eval\(\)"):
        model.generate(text(5), past_key_values=cache, max_new_tokens=2, use_cache=True)
    model.eval()
    assert gap(read(model, text(9), small(model)), read(build_decoder("llama"), text(9))) == 0


@torch.no_grad()
def test_several_documents_in_a_row():
    """Positions are the cache's own, so it would read them as one text. Those of padding say nothing, and a row may go on."""
    model, tokens = decoder("llama"), text(9, rows=2)
    for size in ((2, 1, 9, 9), (2, 4)):
        with pytest.raises(ConfigurationError, match="needs a 2-D attention_mask that covers the 9 new tokens"):
            model(input_ids=tokens, attention_mask=torch.ones(size), past_key_values=small(model), use_cache=True)
    again = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    said = r"position_ids that start anew inside a row: several documents .*Give every document a row of its own"
    for given in (again, again.expand(2, -1), again.expand(3, 2, -1)):
        cache = small(model)
        with pytest.raises(ConfigurationError, match=said):
            model(input_ids=tokens, position_ids=given, past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 0
    with pytest.raises(ConfigurationError, match="given cu_seq_lens_q: several documents"):
        model(input_ids=tokens, cu_seq_lens_q=torch.tensor([0, 5, 9]), past_key_values=small(model), use_cache=True)
    for packed in ({"position_ids": again}, {"seq_idx": again > 4}):
        with pytest.raises(ConfigurationError, match="several documents"):
            Stream(model, policy={"name": "sink_window", "window": 8}).feed({"input_ids": tokens[:1], **packed})
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    expected = model(input_ids=tokens, attention_mask=mask, past_key_values=small(model), use_cache=True).logits
    for filler in (0, 1, 9):
        given = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
        cache = small(model)
        for part, until in (slice(0, 7), 7), (slice(7, 9), 9):
            logits = model(
                input_ids=tokens[:, part], attention_mask=mask[:, :until], position_ids=given[:, part], past_key_values=cache
            ).logits
            valid = mask[:, part].bool()
            assert gap(logits[valid], expected[:, part][valid]) < 1e-5


def test_more_than_the_model_was_trained_on():
    """In Python as on the command line, in the name of the caller's line, and not of sizes that fit."""
    model = decoder("llama")  # trained on 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SinkCache(model, num_sinks=4, window=59)
        open_reader(model, {"name": "recompute", "window": 63})
        open_reader(model, "full")
        Stream(model)
        with length_known():
            SinkCache(model, num_sinks=4, window=60)
    wide = "LlamaForCausalLM: the policy holds 65 tokens and the model was trained on 64"
    span = r"LlamaForCausalLM: the policy holds 49 tokens over 96 positions and the model was trained on 64"
    for use, said in (
        (lambda: SinkCache(model, num_sinks=4, window=60), wide),
        (lambda: model.generate(text(3), past_key_values=SinkCache(window=60), max_new_tokens=1, pad_token_id=0), wide),
        (lambda: open_reader(model, {"name": "recompute", "window": 64}), wide),
        (lambda: Stream(model, policy={"name": "blocks", "num_sinks": 5, "block": 30}), wide),
        (lambda: open_reader(model, Gapped(span=96)), span),
    ):
        with pytest.warns(UserWarning, match=said) as caught:
            use()
        (mine,) = (warning for warning in caught if "was trained on" in str(warning.message))
        assert mine.filename == __file__


@torch.no_grad()
@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states", "labels"])
def test_more_than_a_chunk_at_once(name):
    model = build_decoder("llama", "eager")
    tokens, cache = text(6), small(model, chunk=4)
    arguments = {name: tokens if name == "labels" else True}
    if name == "labels":  # the head takes them itself, of all the logits
        loss = model(input_ids=tokens, past_key_values=cache, use_cache=True, **arguments).loss
        assert gap(loss, model(input_ids=tokens, use_cache=False, **arguments).loss) < 1e-5
        return
    said = f"{name} cannot be had of 6 tokens at once.*in chunks of 4"
    with pytest.raises(ConfigurationError, match=said):
        model(input_ids=tokens, past_key_values=cache, use_cache=True, **arguments)
    assert cache.get_seq_length() == 0
    weights = model(input_ids=tokens[:, :4], past_key_values=cache, use_cache=True, output_attentions=True).attentions
    assert gap(weights[0].sum(-1), torch.ones(2, 4, 4)) < 1e-5
    setattr(model.config, name, True)  # where the config asks
    with pytest.raises(ConfigurationError, match=said):
        read(model, tokens, small(model, chunk=4))


def test_another_text_without_reset():
    model, cache = decoder("llama"), small()
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(text(20), past_key_values=cache, **settings)
    with pytest.raises(ConfigurationError, match=r"no token to read: the cache has been given 24 already.*reset\(\) the cache"):
        model.generate(text(8, seed=4), past_key_values=cache, **settings)
    cache.reset()
    again = model.generate(text(8, seed=4), past_key_values=cache, **settings)
    assert (again == model.generate(text(8, seed=4), past_key_values=small(), **settings)).all()


# --- images ----------------------------------------------------------------------------------------------------------------


def llava(words):
    eyes = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=4)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**words), vision_config=eyes, image_token_id=39, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


@torch.no_grad()
def test_images():
    """Positions in three dimensions would be replaced; and an image cannot be divided among chunks."""
    tokens = text(30, rows=1).clamp(max=35)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    eyes = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    special = {"image_token_id": 39, "video_token_id": 38, "vision_start_token_id": 37, "vision_end_token_id": 36}
    config = transformers.Qwen2VLConfig(text_config={**TINY, "rope_parameters": rope}, vision_config=eyes, **special)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    seen = {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(UnsupportedModelError, match="is given pixel_values and has positions or a mask of its own"):
        read(model, tokens, small(model), **seen)
    wide = SinkCache(model, num_sinks=SINKS, window=60)
    assert gap(read(model, tokens, wide), model(input_ids=tokens, use_cache=False).logits) < 1e-4
    model = llava(TINY)
    tokens[:, 5:21] = 39
    seen = {"pixel_values": torch.randn(1, 3, 16, 16)}
    dense = model(input_ids=tokens, use_cache=False, **seen).logits
    assert gap(read(model, tokens, SinkCache(model, num_sinks=SINKS, window=60), **seen), dense) < 1e-4
    with pytest.raises(ConfigurationError, match=r"pixel_values cannot be divided, and 30 tokens .* with a larger chunk"):
        read(model, tokens, small(model, chunk=8), **seen)


@torch.no_grad()
def test_images_that_generate_has_encoded():
    """generate() lets a model encode its images first, and gives the forward what came of them, in place of the images."""
    tokens = text(30, rows=1).clamp(max=35)
    tokens[:, 5:9] = 39
    special = {"image_token_id": 39, "boi_token_index": 38, "eoi_token_index": 37, "mm_tokens_per_image": 4}
    words = {**TINY, "head_dim": 8}
    config = transformers.Gemma3Config(
        text_config={**words, "sliding_window": 64}, vision_config={**SIZES, "image_size": 16, "patch_size": 4}, **special
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    seen = {"pixel_values": torch.randn(1, 3, 16, 16), "token_type_ids": (tokens == 39).long()}
    with pytest.raises(UnsupportedModelError, match=r"(of image|pixel_values) and has positions or a mask of its own"):
        model.generate(tokens, past_key_values=SinkCache(num_sinks=SINKS, window=40), max_new_tokens=2, **seen)
    model = llava(words)
    tokens[:, 5:21] = 39
    seen = {"pixel_values": seen["pixel_values"], "max_new_tokens": 2, "do_sample": False}
    whole = SinkCache(num_sinks=SINKS, window=40)
    assert (model.generate(tokens, past_key_values=whole, **seen) == model.generate(tokens, **seen)).all()
    with pytest.raises(ConfigurationError, match="cannot be divided, and 30 tokens"):
        model.generate(tokens, past_key_values=SinkCache(num_sinks=SINKS, window=40, chunk=8), **seen)
