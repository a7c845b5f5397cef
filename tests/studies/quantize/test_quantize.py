"""The quantisation doctor on planted models: who carries the gap, what cures it, and what is said where there is none."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from tests.architectures.zoo import model_of
from tests.models.adapted import with_adapters
from tests.studies.quantize.planted import TOKENS, bigram, rows
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.float_grids import FORMATS
from sinklab.models.loading import wrap_model
from sinklab.results.intervals import Interval, mean_over_items
from sinklab.results.table import COLUMNS
from sinklab.studies.quantize.cures import best_cure, cost_of, find_spikes
from sinklab.studies.quantize.found import CureFound
from sinklab.studies.quantize.measurement import judged
from sinklab.studies.quantize.quantize import quantize
from sinklab.studies.quantize.texts import distinct, divided, two_sets
from sinklab.studies.quantize.twin import Range, Scheme, Treatment, Twin, parse_schemes

CALIBRATION = 8
SPIKE = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """The result for a model whose BOS neuron is a spike at the sink, written to a folder."""
    out = tmp_path_factory.mktemp("quantize") / "spiked"
    return quantize(bigram(spike=1024), inputs=rows(48), calibration=CALIBRATION, schemes=["w8a8", "w8a16"], out=out)


def by_name(entries, key):
    return {entry[key]: entry for entry in entries}


def test_the_planted_spike_is_named_with_its_channel_and_the_sink(spiked):
    summary = spiked.summary
    assert summary["sinks"] == [0]
    sites = by_name(summary["sites"], "site")
    assert len(sites) == 7  # of the block that carries the gap
    blocks = by_name(summary["blocks"], "block")
    assert blocks["model.layers.0"]["low"] > 4
    assert (blocks["model.layers.0"]["texts"], sites[SPIKE]["texts"]) == (40, 40)
    assert blocks["model.layers.1"] | {"gap": 0, "low": 0, "high": 0} == {
        "block": "model.layers.1", "layer": 1, "gap": 0, "low": 0, "high": 0, "texts": 16,
    }  # fmt: skip
    worst = sites.pop(SPIKE)
    assert worst["low"] > 4
    assert (worst["layer"], worst["channel"], worst["positions"], worst["at_sink"]) == (0, 0, [0], True)
    assert worst["range_ratio"] == pytest.approx(1024, rel=1e-3)
    # What the other maps read are ones and zeros, which lie on any grid: their gaps are those of rounding scales.
    assert max(abs(site["gap"]) for site in sites.values()) < 1e-4
    assert worst["tokens"] == ["position 0 “0”"]
    assert summary["text"].endswith(f" of it at {SPIKE}; a scale for each token cures it.")


def test_cures_of_a_planted_spike_cure_it_and_cost_what_they_cost(spiked):
    cures = by_name(spiked.summary["cures"], "cure")
    # Once the sink is folded the spike is still in its state, and it is not by a jump of the norm that it is seen here.
    assert cures.pop("folded")["left"]["low"] > 4
    assert set(cures) == {"per token", "sinks whole", "channels whole"}
    for name in cures:
        assert cures[name]["left"]["high"] < 1e-3, name
        assert cures[name]["gain"]["low"] > 4, name
    assert cures["sinks whole"]["share_whole"] == cures["sinks whole"]["activations_whole"] == pytest.approx(1 / 24)
    assert cures["sinks whole"]["extra_bytes"] == 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, head_dim, 16 bits
    assert cures["channels whole"]["share_whole"] == pytest.approx(TOKENS / (14 * TOKENS**2))
    assert cures["channels whole"]["extra_bytes"] == 2 * TOKENS
    assert spiked.summary["recommended"] == "per token"


def test_an_interrupted_run_goes_on_with_the_losses_that_it_has(spiked, tmp_path, monkeypatch):
    """Ended between two sites: what was measured before is not measured again, and the result is that of one run."""
    losses, measured = Twin.losses, []

    def watched(self, samples, treatment, *rest, **more):
        if len(measured) == 8:
            raise KeyboardInterrupt
        measured.append(treatment)
        return losses(self, samples, treatment, *rest, **more)

    monkeypatch.setattr(Twin, "losses", watched)
    asked = {"inputs": rows(48), "calibration": CALIBRATION, "schemes": ["w8a8", "w8a16"], "out": tmp_path / "out"}
    with pytest.raises(KeyboardInterrupt) as ended:
        quantize(bigram(spike=1024), **asked)
    assert "the same command goes on from there" in ended.value.__notes__[0]
    measured.extend(["never again"])
    again = quantize(bigram(spike=1024), **asked)
    whole = [*measured]
    measured.clear()
    monkeypatch.setattr(Twin, "losses", lambda *given, **more: (measured.append(0), losses(*given, **more))[1])
    quantize(bigram(spike=1024), **{**asked, "out": None})
    assert len(whole) - 1 == len(measured)
    assert again.summary == spiked.summary


def test_what_ran_is_said_and_checked(spiked):
    schemes = spiked.summary["schemes"]
    assert [(entry["scheme"], entry["per_token"]) for entry in schemes] == [("w8a8", False), ("w8a8", True), ("w8a16", False)]
    assert [entry["products"] for entry in schemes] == [
        "int8 products (torch._int_mm)",
        "int8 products (torch._int_mm)",
        "int8 weights widened for products of floats",
    ]
    assert 0 <= spiked.summary["integer_check"] <= 1
    simulated = quantize(
        bigram(spike=1024), inputs=rows(48), calibration=CALIBRATION, schemes=["w8a8"], products="simulated"
    ).summary
    assert simulated["integer_check"] is None
    assert simulated["schemes"][0]["products"] == "simulated in float32"
    # No code of this model lies near a tie, so both differ by float32 rounding of the logits alone.
    assert simulated["schemes"][0]["loss"] == pytest.approx(schemes[0]["loss"], abs=1e-4)


def test_the_same_model_without_the_spike_needs_no_cure():
    summary = quantize(bigram(), inputs=rows(48), calibration=CALIBRATION, schemes=["w8a8"]).summary
    rare = f"A cost in fewer than one text in {summary['texts'] // 3} may not show in these {summary['texts']}."
    assert summary["text"] == "W8A8 costs no more than 0.01 nats: no cure is needed."
    assert rare in summary["warnings"]
    assert summary["sites"] == summary["cures"] == []
    assert summary["largest_spike"] is None


def test_a_spike_that_is_no_sink_is_not_called_one():
    summary = quantize(bigram(spike=1024, sink=False), inputs=rows(32), calibration=CALIBRATION, schemes=["w8a8"]).summary
    assert summary["sinks"] == []
    assert by_name(summary["sites"], "site")[SPIKE]["at_sink"] is False
    cures = by_name(summary["cures"], "cure")
    assert cures["spike tokens whole"]["positions"] == [0]
    assert "sinks whole" not in cures


def test_a_spike_at_a_third_of_the_positions_is_not_at_most_tokens():
    texts = rows(24)
    texts.arguments["input_ids"][:, 3::3] = 0
    summary = quantize(
        bigram(spike=1024, sink=False), inputs=texts, calibration=CALIBRATION, schemes=["w8a8"], products="simulated"
    ).summary
    worst = by_name(summary["sites"], "site")[SPIKE]
    assert (worst["everywhere"], worst["positions"]) == (True, [])
    assert worst["range_ratio"] > 1000


@pytest.mark.parametrize(("bits", "least"), [(2, 4), (3, 4), (4, 4), (5, 4), (6, 4), (7, 8), (8, 16), (16, 16)])
def test_a_spike_takes_two_bits_of_the_median_channel_however_few_there_are(bits, least):
    """Where the grid itself has 16 values or fewer, channels that are all alike are none."""
    inputs, twin = rows(2), Twin(bigram().model)

    def channels(worst):
        high = torch.linspace(0.5, 1.5, TOKENS)
        high[3] = worst * high[torch.arange(TOKENS) != 3].median()
        ranges = {key: Range(torch.zeros(TOKENS), high) for key in twin.sites}
        found = find_spikes(twin, inputs, ranges, bits)
        return {(spike.large, spike.channels) for spike in found.values()}

    assert channels(0.9 * least) == {(False, ())}
    assert channels(1.1 * least) == {(True, (3,))}


def test_a_range_that_no_channel_is_left_to_give_is_that_of_all():
    twin = Twin(bigram().model)
    site = twin.sites[SPIKE]
    ranges = {SPIKE: Range(-torch.arange(4.0), torch.arange(4.0))}
    scheme = Scheme(8, 2)
    whole = Treatment(scheme=scheme, ranges=ranges).grid(site)
    of_none = Treatment(scheme=scheme, ranges=ranges, channels={SPIKE: (0, 1, 2, 3)}).grid(site)
    of_three = Treatment(scheme=scheme, ranges=ranges, channels={SPIKE: (3,)}).grid(site)
    assert torch.equal(of_none.scale, whole.scale)
    assert float(of_three.scale) < float(whole.scale)


def test_the_folder_has_page_and_table(spiked, capsys):
    assert {path.name for path in spiked.folder.iterdir()} == {"summary.json", "table.parquet", "run.json", "report.html"}
    spiked.show()
    shown = capsys.readouterr().out
    assert spiked.summary["text"] in " ".join(shown.split())
    for name in ("W8A8 per token", SPIKE, "channels whole", "int8 products (torch._int_mm)", "report.html"):
        assert name in shown
    assert list(spiked.table.columns) == list(COLUMNS)
    left = spiked.table.query("metric == 'quantization_gap_left' and intervention == 'w8a8, sinks whole'")["value"].item()
    assert left == by_name(spiked.summary["cures"], "cure")["sinks whole"]["left"]["mean"]
    of_blocks = spiked.table.query("metric == 'quantization_site_gap' and module == 'model.layers.0'")
    assert of_blocks["value"].item() == spiked.summary["blocks"][0]["gap"]
    assert json.loads((spiked.folder / "run.json").read_text())["calibration_sha256"]


# --- samples ------------------------------------------------------------------------------------------------------------------


def runs_of(tokens, length=16):
    return {tuple(row[start : start + length]) for row in tokens.tolist() for start in range(len(row) - length + 1)}


def test_calibration_and_measured_texts_have_no_run_in_common(monkeypatch):
    pool = rows(60).tokens
    pool[20:40] = pool[:20]  # the corpus gives the same texts again

    calibration, measured = two_sets(lambda count: Samples.of_tokens(pool[:count]), 10, 20)
    assert (len(calibration), len(measured)) == (10, 20)
    assert not runs_of(calibration.tokens) & runs_of(measured.tokens)
    with pytest.raises(
        InputError, match=r"gives \d+ samples of which no two have 16 tokens in a row in common, and 45 are wanted"
    ):
        two_sets(lambda count: Samples.of_tokens(pool[:count]), 10, 35)
    with pytest.raises(InputError, match=r"no two have 7 tokens in a row in common, and 45 are wanted"):
        two_sets(lambda count: Samples.of_tokens(pool[:count, :8]), 10, 35)


def test_padding_on_the_left_is_refused_and_on_the_right_leaves_the_sink_where_it_is():
    """Padded on the left, the spike of BOS stood at place 5 and its sink at place 0, where padding was kept whole."""
    tokens, padding = rows(24).tokens, torch.ones(24, 5, dtype=torch.int64)

    def padded(*parts: torch.Tensor) -> Samples:
        real = torch.cat([torch.full_like(part, int(part is tokens)) for part in parts], 1)
        ids = torch.cat(parts, 1)
        return Samples({"input_ids": ids, "attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)})

    settings = {"calibration": CALIBRATION, "schemes": ["w8a8"], "products": "simulated"}
    with pytest.raises(InputError, match="24 of the 24 samples of `inputs` are padded on the left, and tokens are"):
        quantize(bigram(spike=1024), inputs=padded(padding, tokens), **settings)
    summary = quantize(bigram(spike=1024), inputs=padded(tokens, padding), **settings).summary
    assert summary["sinks"] == [0]
    assert by_name(summary["sites"], "site")[SPIKE]["at_sink"]
    assert by_name(summary["cures"], "cure")["sinks whole"]["left"]["high"] < 1e-3


def test_padding_is_in_no_range_and_carries_no_spike():
    """Texts without the token of the spike, padded with it: the ranges are those of the texts alone."""
    twin, tokens = Twin(bigram(spike=1024).model), rows(12).tokens[:, 1:]
    assert not (tokens == 0).any()
    mask = torch.cat([torch.ones_like(tokens), torch.zeros(12, 5, dtype=torch.int64)], 1)
    padded = Samples({"input_ids": torch.cat([tokens, torch.zeros(12, 5, dtype=torch.int64)], 1), "attention_mask": mask})
    alone, found = twin.ranges(Samples.of_tokens(tokens)), twin.ranges(padded)
    for key, range_ in found.items():
        torch.testing.assert_close(range_.sizes, alone[key].sizes, rtol=1e-5, atol=1e-6)
    assert not any(spike.large for spike in find_spikes(twin, padded, found, 8).values())
    assert {site.rows for site in twin.sites.values()} == {tokens.shape[1]}
    counted = twin.ranges(Samples.of_tokens(padded.tokens))  # without a mask it is a token like others
    assert max(float((counted[key].sizes / alone[key].sizes.clamp(min=1e-6)).max()) for key in alone) > 100


SMALL_PAIRS = {
    "t5": transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    ),
    "switch_transformers": transformers.SwitchTransformersConfig(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=3,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0, pad_token_id=0,
    ),
    "nllb_moe": transformers.NllbMoeConfig(
        vocab_size=50, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, num_experts=3, encoder_sparse_step=2,
        decoder_sparse_step=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("lengths", [((3, 9), (7, 4), (9, 6)), ((3, 5), (9, 9), (6, 4))], ids=["two lengths", "one length"])
@pytest.mark.parametrize("name", SMALL_PAIRS)
def test_padding_of_either_side_of_an_encoder_decoder_is_in_no_range_and_no_product(name, lengths):
    """Pairs padded together are the pairs alone, also where both sides are as long and cross-attention reads the source."""
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(SMALL_PAIRS[name]).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    twin, longest = Twin(model), [max(side) for side in zip(*lengths, strict=True)]
    alone, padded = [], {name: [] for name in ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")}
    for pair in lengths:
        tokens = [torch.randint(3, 50, (1, length)) for length in pair]
        alone.append(
            Samples(dict(zip(("input_ids", "decoder_input_ids"), tokens, strict=True)), kind="pairs", targets=tokens[1])
        )
        for side, ids, most in zip(("", "decoder_"), tokens, longest, strict=True):
            missing = (0, most - ids.shape[1])
            padded[f"{side}input_ids"].append(torch.nn.functional.pad(ids, missing, value=1))
            padded[f"{side}attention_mask"].append(torch.nn.functional.pad(torch.ones_like(ids), missing))
    together = {name: torch.cat(rows) for name, rows in padded.items()}
    samples = Samples(together, kind="pairs", targets=together["decoder_input_ids"])
    found = twin.ranges(samples)
    products = {key: site.products for key, site in twin.sites.items()}
    each = []
    for one in alone:
        each.append((twin.ranges(one), {key: site.products for key, site in twin.sites.items()}))
    for key, range_ in found.items():  # an expert to which nothing of a text is routed has no range of it
        own = [ranges[key] for ranges, _ in each if key in ranges]
        torch.testing.assert_close(range_.low, torch.stack([one.low for one in own]).amin(0))
        torch.testing.assert_close(range_.high, torch.stack([one.high for one in own]).amax(0))
        assert products[key] == pytest.approx(sum(counted[key] for _, counted in each) / len(each))


@pytest.mark.parametrize(("family", "tolerance"), [("qwen3_next", 2e-4), ("deepseek_v3", 1e-5)])
def test_padding_is_in_no_range_and_no_product_where_a_map_reads_all_tokens_in_one_row(family, tolerance):
    """Shared experts read the tokens of all samples one behind the other; maps of latent attention have one more axis."""
    twin, lengths = Twin(model_of(family).eval()), (3, 9, 6, 9)
    generator, largest = torch.Generator().manual_seed(0), twin.model.config.vocab_size
    texts = [torch.randint(3, largest, (1, length), generator=generator) for length in lengths]
    padded = [torch.nn.functional.pad(text, (0, max(lengths) - text.shape[1]), value=1) for text in texts]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    found = twin.ranges(Samples({"input_ids": torch.cat(padded), "attention_mask": mask}))
    products = {key: site.products for key, site in twin.sites.items()}
    each = []
    for text in texts:
        each.append((twin.ranges(Samples.of_tokens(text)), {key: site.products for key, site in twin.sites.items()}))
    for key, range_ in found.items():
        low, high = (torch.stack([getattr(ranges[key], end) for ranges, _ in each]) for end in ("low", "high"))
        # In float32 whatever the model is in, a delta rule adds up in another order where rows are longer.
        torch.testing.assert_close(range_.low, low.amin(0), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(range_.high, high.amax(0), atol=tolerance, rtol=tolerance)
        assert products[key] == pytest.approx(sum(counted[key] for _, counted in each) / len(each))


def test_tokens_behind_masks_count_and_pictures_are_compared_whole():
    tokens = rows(3).tokens
    tokens[1] = tokens[0]
    targets = torch.full_like(tokens, -100)
    masked = tokens.clone()
    for place in (3, 11, 19):
        targets[0, place], masked[0, place] = tokens[0, place], TOKENS - 1
    assert distinct(Samples({"input_ids": masked}, targets=targets)) == [0, 2]
    pictures = torch.rand(3, 3, 4, 4)
    pictures[2] = pictures[0]
    assert distinct(Samples({"pixel_values": pictures}, kind="image")) == [0, 1]
    with pytest.raises(InputError, match="of the 5 samples of `inputs` 3 have all numbers in common with one before them"):
        divided(Samples({"pixel_values": pictures[[0, 1, 2, 0, 1]]}, kind="image"), 1)
    with pytest.raises(InputError, match="of the 8 samples of `inputs` 1 have 16 tokens in a row"):
        divided(Samples.of_tokens(rows(7).tokens[[0, 1, 2, 3, 4, 5, 6, 0]]), 2)


# --- rules --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.5, 0.2, 0.8), "gap"),
        ((0.005, 0.002, 0.008), "none"),
        ((0.02, -0.01, 0.05), "not measurable"),
        ((-1, -2, -0.5), "none"),
    ],
)
def test_verdicts_look_at_intervals(interval, verdict):
    assert judged(Interval(*interval), 0.01) == verdict


def test_the_cheapest_cure_that_cures_is_chosen_and_else_the_one_nearest_to_the_loss_as_it_is():
    def cure(name, mean, high, gain_low, share=0.0, held=0):
        return CureFound(
            cure=name, label=name, left=Interval(mean, -high, high), gain=Interval(1, gain_low, 2), share_whole=share,
            activations_whole=0.0, extra_bytes=held, positions=[],
        )  # fmt: skip

    dear, cheap, lucky = cure("dear", 0.0, 0.005, 1, share=0.1), cure("cheap", 0.001, 0.009, 1), cure("lucky", -0.5, 0.002, 1)
    partial, useless = cure("partial", 0.2, 0.3, 0.5), cure("useless", -0.1, 0.001, -0.1)
    assert best_cure([dear, lucky, cheap, partial, useless], 0.01).cure == "cheap"
    assert best_cure([partial, useless], 0.01).cure == "partial"
    # A loss that falls by 0.25 is a change that is larger than a rise by 0.2, among cures that are shown to cure nothing.
    falls, free = cure("falls", -0.25, 0.3, 0.5, share=0.1, held=9), cure("free", 0.2, 0.3, 0.5)
    assert best_cure([falls, partial, useless], 0.01).cure == "partial"
    assert best_cure([cure("as far off", -0.2, 0.3, 0.5, share=0.1), free], 0.01).cure == "free"
    assert best_cure([useless], 0.01) is None


@pytest.mark.parametrize(("texts", "least", "most"), [(16, 0.3, 0.6), (64, 0.0, 0.06)])
def test_a_cost_of_few_texts_is_seen_where_the_sentence_says_so(texts, least, most):
    """One text in twenty costs 1 nat and the others nothing: 64 texts see it, and 16 often do not."""
    generator = np.random.default_rng(0)
    costs = generator.normal(0.0, 0.002, (200, texts)) + (generator.random((200, texts)) < 0.05)
    missed = np.mean([judged(mean_over_items(values), 0.01) == "none" for values in costs])
    assert least <= missed <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_share_counts_tied_weights_once(dtype):
    config = bigram().model.config.to_dict() | {"tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval().to(dtype)
    twin = Twin(model)
    assert twin.model.lm_head.weight is twin.model.model.embed_tokens.weight
    assert twin.model.lm_head.weight.dtype == torch.float32
    assert twin.share == pytest.approx(14 * TOKENS / (15 * TOKENS + 5))  # 14 maps, one table, five norms


def test_maps_that_the_samples_do_not_reach_stay_as_they_are():
    """As those of a tower of pictures, of which texts run none."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=64),
        vision_config=CLIPVisionConfig(**sizes, image_size=16, patch_size=4),
        image_token_id=63,
    )
    loaded = wrap_model(LlavaForConditionalGeneration(config))
    result = quantize(loaded, corpus="random_tokens", samples=4, seq_len=8)
    left_out = "does not run model.vision_tower.encoder.layers.0.self_attn.k_proj and 11 more"
    assert any(left_out in warning for warning in result.summary["warnings"])
    maps = 2 * (4 * 32 * 32 + 3 * 32 * 48)  # of the layers that read text
    assert result.summary["quantized_share"] == pytest.approx(maps / loaded.num_parameters)
    assert result.summary["float_bytes"] == 2 * maps
    assert not result.table["module"].dropna().str.contains("vision_tower").any()
    twin = Twin(loaded.model)
    left = twin.keep(twin.ranges(Samples.of_tokens(torch.arange(8)[None])))
    assert len(left) == 12
    assert all(type(twin.model.get_submodule(name)) is torch.nn.Linear for name in left)


def test_a_map_on_floating_point_formats_is_the_product_of_both_on_them():
    twin, samples = Twin(bigram(spike=1024).model, integer=True), rows(6)
    ranges, seen, schemes = twin.ranges(samples), {}, parse_schemes(["fp8", "nvfp4", "mxfp4", "wmxfp4a16", "w4afp8"])
    assert [(one.name, one.weights, one.activations) for one in schemes] == [
        ("fp8", 8, 8), ("nvfp4", 4, 4), ("mxfp4", 4, 4), ("wmxfp4a16", 4, 16), ("w4afp8", 4, 8),
    ]  # fmt: skip
    twin.watch(samples, lambda site, values: seen.setdefault(site.name, values))
    (name, values), site = next(iter(seen.items())), next(iter(twin.sites.values()))
    for scheme in schemes[:3]:
        twin.apply(Treatment(scheme=scheme, ranges=ranges))
        own, kind = twin.model.get_submodule(name), FORMATS[scheme.name]
        largest = torch.maximum(ranges[name].low.abs().max(), ranges[name].high.abs().max())
        expected = kind(values, largest) @ kind(own.matrix).T + (0 if own.bias is None else own.bias)
        torch.testing.assert_close(own(values), expected, rtol=1e-4, atol=1e-4)
        blocks = {"fp8": 0, "mxfp4": 1 / 32, "nvfp4": 1 / 16}[scheme.name] * site.width * site.outputs
        assert twin.weight_bytes(site, scheme) == pytest.approx(site.width * site.outputs * kind.bits / 8 + blocks, abs=4)


def test_nothing_outside_of_blocks_is_touched_and_the_model_stays_as_it_is():
    loaded = bigram(spike=1024)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    twin = Twin(loaded.model)
    assert len(twin.sites) == 14
    assert twin.share == pytest.approx(14 / (14 + 2), rel=0.01)
    samples = rows(6)
    ranges = twin.ranges(samples)
    clean = twin.losses(samples, None)
    rough = twin.losses(samples, Treatment(scheme=Scheme(2, 2), ranges=ranges))
    assert float((rough - clean).abs().max()) > 0.01
    assert torch.equal(twin.losses(samples, None), clean)
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    assert twin.model.lm_head.weight is loaded.model.lm_head.weight  # not held twice
    half = bigram().model.bfloat16()
    assert {parameter.dtype for parameter in Twin(half).model.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert cost_of(twin, Treatment(scheme=Scheme(8, 8), ranges=ranges), 24, None) == (
        cost_of(twin, Treatment(scheme=Scheme(8, 8), ranges=ranges, per_token=True), 24, None)
    )


# --- errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        (["w8a8", "int8"], r"`schemes` 'int8' is none of w and a with 2 to 8 bits each"),
        (["w1a8"], r"'w1a8' is none of"),
        (["w8a12"], r"'w8a12' is none of"),
        (["w16a16"], r"'w16a16' quantises nothing"),
        ([], r"`schemes` is empty"),
    ],
)
def test_schemes_that_are_none(schemes, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_schemes(schemes)


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_before_the_first_site_are_not_run_again_and_nothing_changes(shared):
    """Bit by bit, also where a block runs twice and so is not to be replayed."""
    loaded, samples = bigram(spike=1024), rows(6)
    if shared:  # as in ALBERT
        loaded.model.model.layers[1] = loaded.model.model.layers[0]
    twin = Twin(loaded.model)
    ranges = twin.ranges(samples)
    alone = [Treatment(scheme=Scheme(4, 4), ranges=ranges, sites=frozenset({key})) for key in twin.sites]
    expected = torch.stack([twin.losses(samples, treatment) for treatment in alone])
    run, forward = [], twin.model.model.layers[0].mlp.forward
    twin.model.model.layers[0].mlp.forward = lambda hidden: (run.append(1), forward(hidden))[1]
    assert torch.equal(twin.losses_of(samples, alone).nan_to_num(), expected.nan_to_num())
    inside = sum(site.layer == 0 for site in twin.sites.values())
    # Recorded once; the proof that nothing passes the blocks by runs the last one alone.
    assert len(run) == (2 * (len(alone) + 2) if shared else 1 + inside)
    assert "forward" not in vars(twin.model.model.layers[0])


def test_a_model_that_is_quantised_already_is_refused():
    loaded = bigram()
    loaded.model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ConfigurationError, match=r"quantised already \(gptq\); give the checkpoint that it was made from"):
        quantize(loaded, inputs=rows(12), calibration=4)
    packed = bigram()
    layer = packed.model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigurationError, match=r"quantised already: model\.layers\.0\.mlp\.down_proj\.weight is torch\.int8"):
        Twin(packed.model)


def test_a_model_on_several_devices_is_refused():
    model = bigram().model
    model.lm_head.to("meta")
    with pytest.raises(ConfigurationError, match=r"spread over cpu, meta, and codes are made of weights on one device"):
        Twin(model)


def test_models_with_adapters_are_refused():
    """Before, the maps of the adapters were quantised too, each as a map of its own."""
    model, merged = with_adapters(bigram().model, "model.layers.0.mlp.down_proj")
    with pytest.raises(
        UnsupportedModelError, match=r"mlp\.down_proj is a LowRank of PEFT, not a plain nn\.Linear; .*merge_and_unload"
    ):
        Twin(model)
    assert Twin(merged).sites


def test_models_without_linear_maps_or_a_loss_are_refused():
    config = BertConfig(
        vocab_size=TOKENS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="BertModel has no loss"):
        quantize(BertModel(config).eval(), inputs=rows(12), calibration=4)
    model = bigram().model
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no linear map inside a block"):
        Twin(model)


def test_pictures_without_classes_are_measured_on_the_models_own_answers():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval()
    pictures = torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        answers = model(pixel_values=pictures).logits.argmax(-1)
    names = ("[CLS]", "patch 0,0", "patch 0,1", "patch 1,0", "patch 1,1")
    labelled, own = (
        quantize(
            model, inputs=Samples({"pixel_values": pictures}, "image", targets, names), calibration=3, schemes=["w8a8"]
        ).summary
        for targets in (answers, None)
    )
    assert (labelled["loss_of"], own["loss_of"]) == ("class", "class, the model's own answer")
    assert own["schemes"] == labelled["schemes"]
    assert own["tokens"] == 5
    assert own["kind"] == "image"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimal_effect": -0.1}, r"`minimal_effect` -0\.1 must be 0 or more"),
        ({"products": "float"}, r"`products` 'float' must be integer or simulated"),
        ({"threshold": 1.0}, r"`threshold` 1\.0 must be in \[0, 1\)"),
        ({"calibration": 0}, r"`calibration` must be at least 1 and `samples` at least 4, got 0 and 12"),
        ({"calibration": 9}, r"got 9 and 3"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigurationError, match=message):
        quantize(bigram(), inputs=rows(12), **{"calibration": 4, **options})
