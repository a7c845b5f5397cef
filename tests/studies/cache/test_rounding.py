"""Caches of integers, measured: what is compared with what, which tokens are whole, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.architectures.zoo import ZOO, build

from sinklab import load_model
from sinklab.errors import ConfigurationError
from sinklab.models.loading import wrap_model
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.perplexity import estimate, losses
from sinklab.streaming.reader import open_reader
from sinklab.studies.cache.cache import compare_policies
from sinklab.studies.cache.found import Difference, QuantizedEntry, quantized_rows
from sinklab.studies.cache.rounding import _largest, quantized_caches
from sinklab.studies.cache.show import must_stay_whole, show_quantized

ROWS = torch.randint(4, 40, (4, 160), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    return wrap_model(build(ZOO["llama"], "sdpa").eval())


@pytest.fixture(scope="module")
def entries(loaded):
    return quantized_caches(loaded, ROWS, ["int8", "int4"], 32)


def test_every_set_of_whole_tokens_is_compared_with_the_same_cache_unrounded(loaded, entries):
    model = loaded.model
    for entry in entries:
        rows = ROWS if entry.window else ROWS[:, :64]  # as many as the model was made for
        window = entry.window or 64
        pinned = tuple(entry.positions)
        policy = Pinned(pinned=pinned, window=window) if pinned else SinkWindow(num_sinks=0, window=window)
        chunk = rows.shape[1] // 8
        rounded = losses(model, rows, policy, chunk=chunk, quantized=entry.quantized)
        expected = estimate(rounded - losses(model, rows, policy, chunk=chunk)).mean
        # Unrounded, what is pinned changes only the order of float32 sums: some 1e-6 of a loss of 4.
        assert entry.gap.mean == pytest.approx(expected, abs=1e-5)
        assert entry.gap.low < entry.gap.mean < entry.gap.high
        assert entry.tokens == rows.shape[1]


def test_sets_of_the_same_tokens_are_one_row_and_the_last_row_is_bounded(entries):
    kinds = [entry.quantized for entry in entries]
    assert kinds == ["int8", "int4"] * (len(entries) // 2)
    assert [entry.window for entry in entries] == [None] * (len(entries) - 2) + [32, 32]
    held = [tuple(entry.positions) for entry in entries if entry.window is None and entry.quantized == "int8"]
    assert len(set(held)) == len(held)
    assert {(), (0, 1, 2, 3)} <= set(held)


def test_integers_of_eight_bits_are_nearer_than_those_of_four_and_take_more_bytes(entries):
    for eight, four in zip(entries[::2], entries[1::2], strict=True):
        assert abs(eight.gap.mean) < 0.01
        assert four.bytes_ratio < eight.bytes_ratio < 1


def test_rows_of_the_table_say_what_is_held_and_what_is_whole(entries):
    gaps = [row for row in quantized_rows(entries, len(ROWS)) if row["metric"].name == "cache_quantization_gap"]
    assert [row["value"] for row in gaps] == [entry.gap.mean for entry in entries]
    assert len({row["policy"] for row in gaps}) == len(gaps)
    assert gaps[-1]["policy"].startswith("int4, window of 32, whole: ")
    assert [row["count"] for row in gaps] == [ROWS[:, : entry.tokens].numel() - len(ROWS) for entry in entries]  # predicted


def test_a_planted_activation_is_found_where_it_stands():
    model = build(ZOO["llama"], "sdpa").eval()
    rows = ROWS.clone()
    rows[:, 5] = 3
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = 0.0
        model.get_input_embeddings().weight[3, 3] = 1e4
    assert _largest(model, rows) == (5,)


def test_what_cannot_be_rounded_is_refused_in_a_line():
    loaded = load_model("embedded:softmax")
    with pytest.raises(ConfigurationError, match="`quantized` 'int3' is none of int8, int4"):
        compare_policies(loaded, quantized=["int8", "int3"])
    with pytest.raises(ConfigurationError, match="`quantized` is for policies whose tokens stay in their slots; 'recompute'"):
        open_reader(loaded.model, "recompute", quantized="int8")


def test_a_window_of_the_trained_length_is_compared_with_itself(loaded):
    """The texts with all tokens held are cut to that length, and those under the window are not."""
    (*_, bounded) = quantized_caches(loaded, ROWS, ["int8"], 64)
    assert (bounded.window, bounded.tokens) == (64, 160)


def test_a_model_that_cannot_have_integers_is_refused_before_anything_is_compared(tmp_path):
    model = wrap_model(build(ZOO["bloom"], "eager").eval())
    said = []
    model.model.register_forward_hook(lambda *_: said.append(1))
    with pytest.raises(ConfigurationError, match="`quantized` is for keys in slots; BloomForCausalLM"):
        compare_policies(
            model, corpus="random_tokens", policies=["window", "sink_window"], windows=[8], sinks=[0, 1], tokens=40,
            documents=2, quantized=["int8"], out=tmp_path / "out",
        )  # fmt: skip
    assert len(said) <= 2  # loading and reading the positions at most


def test_which_tokens_must_stay_whole_is_said():
    def entry(kind, whole, positions, low, high, window=None):
        return QuantizedEntry(kind, whole, positions, window, 512, Difference((low + high) / 2, low, high), 0.5)

    measured = [
        entry("int8", "nothing", [], -0.002, 0.005),
        entry("int4", "nothing", [], -0.111, 0.004),  # a loss that falls is a change, too
        entry("int4", "the first 4 tokens", [0, 1, 2, 3], -0.01, 0.012),
        entry("int4", "the sinks found", [0], -0.016, 0.006),
        entry("int4", "the sinks found", [0], -0.5, 0.5, window=128),  # of another question
        entry("int2", "nothing", [], 0.1, 0.2),
    ]
    eight, four, two = (must_stay_whole(measured, kind) for kind in ("int8", "int4", "int2"))
    assert eight == "int8: no token must stay in full precision; the loss changes by 0.0050 nats at most."
    assert four == "int4: keep position 0 (the sinks found) in full precision; the loss changes by 0.0160 nats at most."
    assert two.startswith("int2: none are shown whose full precision keeps the change below 0.02 nats")
    rare = "A cost in fewer than one text in 2 may not show in these 8."
    assert [block.text for block in list(show_quantized(measured, 8))[1:]] == [eight, four, two, rare]
    # Alone in a bounded cache, or where nothing is shown to be harmless, there is no such verdict.
    bounded = dataclasses.replace(measured[0], window=128)
    assert list(show_quantized([bounded, measured[-1]], 8))[-1].text.endswith("read more texts.")


@pytest.fixture(scope="module")
def sliding():
    torch.manual_seed(0)
    model = build(ZOO["mistral"], "sdpa").eval()
    model.config.sliding_window = 24
    return wrap_model(model)


def test_of_a_model_with_a_window_no_more_is_held_than_all_layers_see(sliding):
    """24 slots are 19 tokens, four that are pinned besides, and the one at hand; the bounded row has what its sinks leave."""
    entries = quantized_caches(sliding, ROWS, ["int8"], 23)
    sinks = entries[-1].positions
    assert [entry.tokens for entry in entries] == [19] * (len(entries) - 1) + [160]
    assert [entry.window for entry in entries] == [None] * (len(entries) - 1) + [23 - len(sinks)]
    first = next(entry for entry in entries if entry.positions == [0, 1, 2, 3])
    held, rows = Pinned(pinned=(0, 1, 2, 3), window=19), ROWS[:, :19]
    rounded = losses(sliding.model, rows, held, chunk=2, quantized="int8")
    # With nothing evicted the cache in full precision is dense attention.
    assert first.gap.mean == pytest.approx(estimate(rounded - losses(sliding.model, rows, "full")).mean, abs=1e-5)
