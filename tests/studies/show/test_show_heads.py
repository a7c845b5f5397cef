"""The page of heads: what it says equals the model's own attention, it stays small, and every way to it leads there."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest
import torch
from tests.conftest import TEXT, make_sinklm, make_tokenizer, mask_of_documents

import sinklab
from sinklab.attention.maps import AttentionMaps
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, InputError, SessionError
from sinklab.models.loading import wrap_model
from sinklab.probes.entropy import Entropy
from sinklab.report.heads import BUDGET, Received, Shown, head_view
from sinklab.report.maps import Maps


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(make_sinklm(), make_tokenizer(), name="toy")


@pytest.fixture(scope="module")
def view(loaded):
    return sinklab.show(loaded, TEXT[:60], threshold=0.05)


def data_of(view) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', view.html, re.S)[1])


def own_columns(model, tokens):
    """Mean weight of each key over the queries that see it, ``(layers, heads, keys)``, from the weights of the model itself."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(input_ids=tokens, output_attentions=True).attentions, 1)[0]
    model.set_attn_implementation("sdpa")
    return (weights.sum(-2) / torch.arange(tokens.shape[1], 0, -1)).numpy()


def test_sinks_are_those_of_the_models_own_weights(loaded, view):
    tokens = loaded.tokenizer(TEXT[:60], return_tensors="pt").input_ids
    mean = own_columns(loaded.model, tokens)
    queries = tokens.shape[1]
    early = mean[..., : queries - queries // 2 + (queries % 2 == 0)]  # keys that half of the queries see
    expected = {int(key) for key in np.flatnonzero((early > 0.05).any((0, 1)))}
    assert {sink["position"] for sink in view.sinks} <= expected
    assert len(view.sinks) == min(8, len(expected)) > 0
    first = next(sink for sink in view.sinks if sink["position"] == 0)
    assert first["token"] == "<bos>"
    # Column sums are reduced in float32 over some forty rows: a few units of its rounding, 2**-24 each.
    assert first["mean_weight"] == pytest.approx(mean[..., 0].mean(), abs=1e-5)
    assert {(layer, head) for layer, head, _ in first["heads"]} == set(zip(*np.nonzero(mean[..., 0] > 0.05), strict=True))


def test_weights_that_are_large_everywhere_are_no_sink():
    """A sigmoid of scores near 0 gives every key half, which is a small share of its row; one key of a high score is a sink."""
    torch.manual_seed(0)
    model = make_sinklm(operation={"name": "sigmoid"})
    loaded = wrap_model(model, make_tokenizer(), name="sigmoid")
    view = sinklab.show(loaded, TEXT[:60])
    assert view.sinks == []
    assert "no head gives any position more than 0.3 of its attention" in view.finding

    def only_first(module, inputs, output):
        output = torch.full_like(output, -3.0)
        output[:, 0] = 3.0
        return output

    attention = model.layers[0].self_attn
    attention.k_proj.register_forward_hook(only_first)
    attention.q_proj.register_forward_hook(lambda module, inputs, output: torch.full_like(output, 3.0))
    (sink,) = seen = sinklab.show(loaded, TEXT[:60]).sinks
    assert re.fullmatch(r"position 0 \(“.*”\): mean weight 0\.\d\d, of \d+ heads?, most \d\.\d\d of \d\.\d", repr(seen))
    assert (sink["position"], {layer for layer, _, _ in sink["heads"]}) == (0, {0})
    assert all(weight > 0.9 for _, _, weight in sink["heads"])


def test_a_null_score_is_named_and_what_rectifying_leaves_is_none():
    """Softpick has a null mass of about a half, and nothing that could be looked at in place of a key."""
    torch.manual_seed(0)
    loaded = wrap_model(make_sinklm(operation={"name": "softpick"}), make_tokenizer(), name="softpick")
    assert sinklab.show(loaded, TEXT[:60]).sinks == []
    model = make_sinklm(operation={"name": "sink_logit", "initial": 6.0})
    (sink,) = sinklab.show(wrap_model(model, make_tokenizer(), name="logit"), TEXT[:60]).sinks
    assert (sink["name"], sink["position"]) == ("the null score", None)


def test_under_a_window_no_position_is_seen_by_half_of_the_queries():
    """Every key of a window of 8 is seen by 8 queries of 61, the first as well as the last: none is seen by half of them."""
    narrow = wrap_model(make_sinklm(window=8), make_tokenizer(), name="narrow")
    view = sinklab.show(narrow, TEXT[:60], threshold=0.0)
    assert view.sinks == []
    assert view.finding == "On this text no position is seen by half of the queries, so none can be a sink."


def test_a_tie_with_the_threshold_is_no_sink_on_the_page_either():
    """Ten float32 weights of 1/10 add up to a little more than 1: a mean of 0.3 that rounding lifts is not above 0.3."""
    weights = np.zeros((1, 2, 1, 4), np.float32)
    weights[0, :, 0, 0] = [np.nextafter(np.float32(0.3), np.float32(1)), 0.301]
    assert (weights[0, :, 0, 0] > 0.3).all()
    seen = np.full((1, 2, 4), 4, np.float32)
    known = Received(["0", "1"], weights, seen, np.full((1, 2), 4), np.full((1, 2, 1), np.nan))
    view = head_view([(0, "0", ""), (1, "1", "")], about=Shown(model="toy"), operation="softmax", received=known)
    (sink,) = view.sinks
    assert [layer for layer, _, _ in sink["heads"]] == [1]


def test_the_page_has_tokens_heads_and_maps(loaded, view):
    data = data_of(view)
    ids = loaded.tokenizer(TEXT[:60]).input_ids
    assert data["tokens"] == [[loaded.tokenizer.decode([one]) for one in ids]]
    assert [len(data["grid"]), data["heads"], data["maps"]["tile"]] == [2, 2, 1]
    assert data["maps"]["rows"] == len(ids)
    assert html.escape(view.finding, quote=False) in view.html.replace("&#34;", '"')


def test_saving(view, tmp_path):
    path = view.save(tmp_path / "heads.html")
    assert path.read_text(encoding="utf-8") == view.html
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(InputError, match="no page of sinklab"):
        view.save(tmp_path / "mine.html")


def test_a_long_text_is_cut_and_says_so(loaded):
    view = sinklab.show(loaded, TEXT * 4, seq_len=100)
    assert len(data_of(view)["tokens"][0]) == 100
    assert re.search(r"Only the first 99 of the [\d,]+ tokens of the text were read", view.html)
    assert data_of(view)["maps"]["tile"] == 2


def test_a_session_shows_what_it_measured(loaded):
    tokens = loaded.tokenizer(TEXT[:60], return_tensors="pt").input_ids
    with torch.no_grad(), attend(loaded.model, [Entropy(), AttentionMaps()]) as session:
        loaded.model(input_ids=tokens)
    data = data_of(session.show(loaded.tokenizer))
    (entropy,) = (entry for entry in data["headNumbers"] if entry["label"] == "Entropy")
    table = session.table().query("metric == 'entropy' and head.notna()").sort_values(["layer", "head"])
    # The page rounds to five digits.
    np.testing.assert_allclose(np.ravel(entropy["values"]), table["value"].to_numpy(float), rtol=1e-4)
    assert data["maps"] is not None


def test_a_session_without_maps_shows_numbers(loaded):
    with torch.no_grad(), attend(loaded.model, [Entropy()]) as session:
        loaded.model(input_ids=torch.arange(8)[None])
    data = data_of(session.show())
    assert data["maps"] is None
    assert "Entropy" in [entry["label"] for entry in data["headNumbers"]]
    with torch.no_grad(), attend(loaded.model) as session:
        loaded.model(input_ids=torch.arange(8)[None])
    with pytest.raises(InputError, match="no probe of this session gives a number per head"):
        session.show()


@pytest.mark.parametrize(("layers", "heads", "length"), [(32, 32, 4096), (64, 96, 16), (2, 2, 20_000)])
def test_a_page_stays_small(layers, heads, length):
    """Attention that no compression helps with: 512 KiB hold whatever the model and the length."""
    generator = np.random.default_rng(0)
    tiles = min(64, length)
    maps = Maps(
        generator.integers(0, 256, (1, layers, heads, tiles, tiles), dtype=np.uint8),
        np.ones((1, layers, heads, tiles, tiles), dtype=np.uint8),
        np.zeros((1, layers, heads, 2), dtype=np.float32),
        [["tröt'&\"<" * 3] * length],
        [f"m{layer}" for layer in range(layers)],
        length,
    )
    received = generator.random((1, layers, heads, length), dtype=np.float32)
    seen = np.broadcast_to(np.arange(length, 0, -1, dtype=np.float32), (1, layers, length))
    queries = np.full((1, layers), length, dtype=np.float32)
    known = Received(maps.modules, received, seen, queries, np.zeros((1, layers, heads), dtype=np.float32))
    sites = [(layer, f"m{layer}", "") for layer in range(layers)]
    view = head_view(sites, about=Shown(model="large"), operation="softmax", received=known, maps=maps)
    assert len(view._repr_html_().encode()) < BUDGET == 512 * 1024
    assert data_of(view)["maps"] is not None or layers * heads > 1024


def test_refusals(loaded):
    with pytest.raises(ConfigurationError, match="`threshold` 1 must be in"):
        sinklab.show(loaded, "x", threshold=1)
    with pytest.raises(ConfigurationError, match="`seq_len` must be at least 2"):
        sinklab.show(loaded, "x", seq_len=1)
    with pytest.raises(InputError, match="makes no token of ''"):
        sinklab.show(loaded, "")


def test_pictures_are_shown_with_what_their_patches_receive():
    pytest.importorskip("PIL")
    from PIL import Image
    from transformers import ViTConfig, ViTModel
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTModel(ViTConfig(image_size=32, patch_size=8, **size))
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    picture = Image.fromarray(np.arange(48 * 40 * 3, dtype=np.uint8).reshape(48, 40, 3))
    view = sinklab.show(model, picture, processor=processor, threshold=0.01)
    data = data_of(view)
    assert data["pictures"]["grid"] == [4, 4]
    assert data["pictures"]["names"] == data["tokens"][0]
    received = np.array(data["pictures"]["received"][0]) / 1e4
    # Every query sees every key: the columns of a head add up to one, but for 17 roundings of 0.5e-4.
    np.testing.assert_allclose(received.sum(-1), 1.0, atol=17 * 0.5e-4)
    assert "[CLS]" in [sink["name"] for sink in view.sinks]
    with pytest.raises(InputError, match="there is no picture 'no such file'"):
        sinklab.show(model, "no such file", processor=processor)


def test_sinks_of_an_encoder_decoder_are_those_of_its_parts():
    """A position of the source is not that of the target, and a layer's number is not one module's."""
    parts = ("encoder", "decoder", "cross-attention")
    sites = [(0, "e", parts[0]), (1, "d", parts[1]), (0, "c", parts[2])]
    weights = np.zeros((1, 3, 2, 4), np.float32)
    weights[0, 0, 0, 1] = 0.6
    weights[0, 1, :, 1] = 0.5, 0.75
    weights[0, 2, 0, 1], weights[0, 2, 1, 0] = 0.4, 0.35
    every = np.full((1, 3), 4, np.float32)
    seen, null = np.full((1, 3, 4), 4, np.float32), np.full((1, 3, 2), np.nan, np.float32)
    known = Received(["e", "d", "c"], weights, seen, every, null)
    codes = np.zeros((1, 3, 2, 4, 4), np.uint8)
    texts = [[f"s{i}" for i in range(4)]], [[f"t{i}" for i in range(4)]]
    maps = Maps(codes, codes + 1, np.zeros((1, 3, 2, 2), np.float32), texts[0], ["e", "d", "c"], 4, texts[1])
    view = head_view(sites, about=Shown(model="toy", kind="pairs"), operation="softmax", received=known, maps=maps)
    assert [(sink["name"], sink["position"], sink["token"], sink["part"]) for sink in view.sinks] == [
        ("position 1 of the decoder", 1, "t1", "decoder"),
        ("position 1 of the encoder", 1, "s1", "encoder"),
        ("position 1 of cross-attention", 1, "s1", "cross-attention"),
        ("position 0 of cross-attention", 0, "s0", "cross-attention"),
    ]
    assert [[head[:2] for head in sink["heads"]] for sink in view.sinks] == [[(1, 1), (1, 0)], [(0, 0)], [(0, 0)], [(0, 1)]]
    assert [sink["mean_weight"] for sink in view.sinks] == pytest.approx([0.625, 0.3, 0.2, 0.175])
    assert "2 of 2 heads give position 1 of the decoder (“t1”)" in view.finding
    first = data_of(view)["sinks"][0]
    assert (first["name"], first["position"]) == ("position 1 of the decoder", None)
    assert first["rates"] == [[0, 0], [50, 75], [0, 0]]


def test_source_and_target_are_shown_apart():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, **special)
    )
    tokenizer = make_tokenizer()
    data = data_of(sinklab.show(model, "import os", tokenizer=tokenizer, target="def read"))
    assert [row["label"] for row in data["grid"]] == ["enc 0", "dec 0", "cross 0"]
    # T5 has no token to begin a source with; a target begins with the padding token, and what is predicted last is not read.
    assert "".join(data["tokens"][0]).removeprefix("<bos>") == "import os"
    target = tokenizer("def read", add_special_tokens=False).input_ids
    assert data["targets"][0] == ["<bos>", *(tokenizer.decode([one]) for one in target[:-1])]
    said = f"In texts of {len(target)} tokens a head that looks at all keys alike"
    assert said in sinklab.show(model, "import os", tokenizer=tokenizer, target="def read").html
    halves = sinklab.show(model, "import os", tokenizer=tokenizer)
    assert "two halves of the text" in halves.html
    with pytest.raises(ConfigurationError, match="`target` is for an encoder–decoder, and SinkLM is none"):
        sinklab.show(wrap_model(make_sinklm(), tokenizer), "x", target="y")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_shown(loaded, side):
    """Texts of 9, 5 and 7 tokens in one batch have the columns, maps and tokens that they have one by one."""
    texts = [torch.arange(10, 10 + length) for length in (9, 5, 7)]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_side=side)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True, padding_side=side)
    together, alone = AttentionMaps(tiles=5, length=9), [AttentionMaps(tiles=5, length=9) for _ in texts]
    with torch.no_grad(), attend(loaded.model, [together]) as session:
        loaded.model(input_ids=tokens, attention_mask=mask)
    for text, probe in zip(texts, alone, strict=True):
        with torch.no_grad(), attend(loaded.model, [probe]):
            loaded.model(input_ids=text[None])
    arrays, columns = together.arrays(), together.columns()
    for sample, (text, probe) in enumerate(zip(texts, alone, strict=True)):
        expected, own = probe.arrays()["weights"][0], columns["received"][sample]
        rows, keys = expected.shape[2:]
        # A map is stored in 255 steps, of which rounding may take one.
        found = arrays["weights"][sample].astype(int)
        assert abs(found[:, :, :rows, :keys] - expected).max() <= 1
        assert not found[:, :, rows:].any()
        assert not found[..., keys:].any()
        np.testing.assert_allclose(own[..., : len(text)], probe.columns()["received"][0], atol=1e-6)
        assert np.isnan(own[..., len(text) :]).all()
    view = session.show(loaded.tokenizer, threshold=0.05)
    assert [len(row) for row in data_of(view)["tokens"]] == [9, 5, 7]
    assert 0 in {sink["position"] for sink in view.sinks}


def test_several_documents_in_a_row_have_no_map(loaded):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    said = "a row holds several documents, whose positions an attention map cannot tell apart"
    mask = mask_of_documents(positions)
    with pytest.raises(SessionError, match=said), torch.no_grad(), attend(loaded.model, [AttentionMaps()]):
        loaded.model(input_ids=positions + 10, position_ids=positions, attention_mask=mask, use_cache=False)
