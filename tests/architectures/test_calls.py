"""Looking changes no bit, and every attention call is counted once, under the qualified name of the module that made it."""

import pytest

from sinklab.attention.session import attend

from .harness import STEPS, Recorder, assert_identical, decode, every_backend, every_decoding_backend, forward
from .zoo import ZOO, Entry, batch_of, build, grouped, model_of


@every_backend
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_sessions_are_bit_identical(entry: Entry, backend: str, padded: bool) -> None:
    model = model_of(entry.id, backend)
    batch = batch_of(entry, padded)
    before = forward(model, batch)
    for probes in ([], [Recorder()]):
        with attend(model, probes=probes, verify=True) as session:
            assert_identical(forward(model, batch), before)
        assert sum(session.calls.values()) == entry.calls
        assert {site.module.partition("#")[0] for site in session.sites} == set(session.calls)
        # SigLIP pools its patches with torch's own MultiheadAttention, which no table reaches.
        assert session.off_seam == (["vision_model.head.attention"] if entry.id == "siglip" else [])
    assert_identical(forward(model, batch), before)


@every_decoding_backend
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_cached_decoding_is_bit_identical(entry: Entry, backend: str, padded: bool) -> None:
    model = model_of(entry.id, backend)
    before = decode(model, entry, padded)
    with attend(model, probes=[Recorder()], verify=True) as session:
        during = decode(model, entry, padded)
    assert_identical(during, before)
    assert_identical(decode(model, entry, padded), before)
    # The encoder runs once; every other layer runs again at each step.
    again = sum(not name.startswith(("encoder.", "model.encoder.")) for name in session.calls)
    assert sum(session.calls.values()) == entry.calls + STEPS * again


SIDES = [f"model.{side}.layers.{layer}" for side in ("encoder", "decoder") for layer in (0, 1)]
BART = [
    f"{layer}.{name}" for layer in SIDES for name in ("self_attn", "encoder_attn") if name == "self_attn" or "decoder" in layer
]
NAMES = {
    "llama": {"model.layers.0.self_attn": 1, "model.layers.1.self_attn": 1},
    # Three linear-attention layers, then one that attends: the number of the layer is not the number of the call.
    "qwen3_next": {"model.layers.3.self_attn": 1},
    "bamba": {"model.layers.1.self_attn": 1},
    "albert": {"encoder.albert_layer_groups.0.albert_layers.0.attention": 4},
    "distilbert": {"transformer.layer.0.attention": 1, "transformer.layer.1.attention": 1},
    "swin": {f"encoder.layers.{stage}.blocks.{block}.attention": 1 for stage in (0, 1) for block in (0, 1)},
    "t5": {
        "encoder.block.0.layer.0.SelfAttention": 1,
        "encoder.block.1.layer.0.SelfAttention": 1,
        "decoder.block.0.layer.0.SelfAttention": 1,
        "decoder.block.0.layer.1.EncDecAttention": 1,
        "decoder.block.1.layer.0.SelfAttention": 1,
        "decoder.block.1.layer.1.EncDecAttention": 1,
    },
    "bart": dict.fromkeys(BART, 1),
    "whisper": dict.fromkeys(BART, 1),
    "clip": {
        f"{tower}.layers.{layer}.self_attn": 1 for tower in ("text_model.encoder", "vision_model.encoder") for layer in (0, 1)
    },
}


@pytest.mark.parametrize("family", sorted(NAMES))
def test_names_are_those_of_the_modules(family: str) -> None:
    model = model_of(family, ZOO[family].backends[-1])
    with attend(model, probes=[Recorder()], verify=True) as session:
        forward(model, batch_of(ZOO[family]))
    assert dict(session.calls) == NAMES[family]
    # A module that stands for several layers has a row for each of them.
    rows = [name if turn == 0 else f"{name}#{turn}" for name, turns in NAMES[family].items() for turn in range(turns)]
    assert sorted(session.table()["module"]) == sorted(rows)
    assert (session.table()["count"] == 1).all()
    # Cross-attention is numbered by itself.
    cross = [name for name in rows if "EncDec" in name or "encoder_attn" in name]
    alone = [name for name in rows if name not in cross]
    for kind, names in (("self", alone), ("cross", cross)):
        sites = [site for site in session.sites if site.kind == kind]
        assert [site.layer for site in sites] == list(range(len(names)))
        assert [site.module for site in sites] == names or family == "clip"  # whose towers run in an order of their own


def test_linear_attention_is_listed() -> None:
    config = grouped(head_dim=8, num_local_experts=2, layer_types=["full_attention", "linear_attention"])
    entry = Entry("minimax", "decoder", "MiniMaxForCausalLM", config, 1)
    model = build(entry)
    with attend(model, probes=[], verify=True) as session:
        forward(model, batch_of(entry))
    assert dict(session.calls) == {"model.layers.0.self_attn": 1}
    assert session.off_seam == ["model.layers.1.self_attn"]
