"""The comparison of cache policies: the recommendation on made-up losses, equal sizes, integers, a small model end to end."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.architectures.zoo import ZOO, build
from tests.conftest import TEXT, make_sinklm

from sinklab.corpora import resolve_corpus
from sinklab.errors import ConfigurationError, InputError, UnknownNameError, UnsupportedModelError
from sinklab.models.loading import load_model, wrap_model
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies as policy_registry
from sinklab.results.table import COLUMNS, read_table
from sinklab.streaming.perplexity import estimate, losses
from sinklab.streaming.reader import open_reader
from sinklab.studies.cache.cache import compare_policies
from sinklab.studies.cache.comparison import _curve, _Measured, _recomputed, _scored
from sinklab.studies.cache.found import Difference, QuantizedEntry, must_stay_whole, quantized_rows, show_quantized
from sinklab.studies.cache.plan import checked_budgets, checked_names, long_texts, plan_policies, scored_from
from sinklab.studies.cache.recommendation import recommend
from sinklab.studies.cache.rounding import _largest, quantized_caches


def made_up(offsets: dict[int, float], spread: float = 0.001) -> dict[int, torch.Tensor]:
    """Losses ``(8, 100)`` by number of sinks: a text's own loss, the offset, and noise that differs between numbers."""
    generator = torch.Generator().manual_seed(0)
    texts = 2 + torch.rand(8, 1, generator=generator)
    return {key: texts + value + spread * torch.randn(8, 100, generator=generator) for key, value in offsets.items()}


class TestRecommendation:
    def test_the_fewest_sinks_that_are_as_good_as_the_best(self):
        sizes = made_up({0: 0.3, 1: 0.01, 2: 0.0, 4: 0.005})
        found = recommend({64: sizes})
        assert (found.needed, found.num_sinks, found.window) == ("yes", 1, 63)
        assert found.loss.mean == pytest.approx(sizes[1].mean().item())
        # The difference is paired: its interval is that of the noise, 0.001 / sqrt(100), not of the texts.
        assert found.gain.mean == pytest.approx(0.29, abs=1e-3)
        assert found.gain.high - found.gain.low < 1e-3 < found.loss.high - found.loss.low
        assert recommend({64: made_up({0: 0.3, 1: 0.1, 4: 0.0, 8: 0.0})}).num_sinks == 4  # where fewer are worse

    def test_no_sinks_needed(self):
        found = recommend({64: made_up({0: 0.0, 1: -0.01, 4: 0.05})})
        assert (found.needed, found.num_sinks, found.window) == ("no", 0, 64)
        assert found.sentence.startswith("No sinks needed: a window of 64 tokens; 1 sink would gain 0.010 [")

    @pytest.mark.parametrize(("texts", "rare"), [(64, 21), (8, 2)])
    def test_no_sinks_needed_says_which_costs_the_texts_may_miss(self, texts, rare):
        """One text in 30 loses 3 nats without sinks, 0.1 on average: of 64 such texts none is among them in 11 % of draws."""
        sizes = {0: torch.full((texts, 100), 2.0), 4: torch.full((texts, 100), 2.0)}
        found = recommend({64: sizes})
        assert (found.needed, found.notes) == (
            "no",
            (f"A cost in fewer than one text in {rare} may not show in these {texts}.",),
        )
        sizes[0][0] += 3
        found = recommend({64: sizes})
        assert (found.needed, found.notes) == ("undecided", ())

    def test_undecided_when_the_interval_holds_the_margin(self):
        found = recommend({64: made_up({0: 0.03, 1: 0.0}, spread=0.5)})
        assert found.needed == "undecided"
        assert found.gain.low < 0.02 < found.gain.high
        assert found.sentence.startswith("Whether sinks are needed is undecided on this text")

    @pytest.mark.parametrize(("cost", "window"), [(0.03, 31), (0.08, 63)])
    def test_the_smaller_cache_unless_it_costs_more_than_the_margin(self, cost, window):
        small = made_up({0: 0.3 + cost, 1: cost})
        assert recommend({32: small, 64: made_up({0: 0.3, 1: 0.0})}).window == window

    def test_a_smaller_cache_must_have_the_same_verdict(self):
        """Without sinks 32 tokens lose only 0.045, below the margin; but there sinks are worth that, and of 64 nothing."""
        found = recommend({32: made_up({0: 0.045, 4: 0.0}), 64: made_up({0: 0.0, 4: 0.0})})
        assert (found.needed, found.num_sinks, found.window) == ("no", 0, 64)
        assert found.gain.high < 0.02
        alike = recommend({32: made_up({0: 0.045, 4: 0.045}), 64: made_up({0: 0.0, 4: 0.0})})
        assert (alike.needed, alike.num_sinks, alike.window) == ("no", 0, 32)

    def test_says_of_caches_beyond_the_trained_length_that_they_are(self):
        sizes = {64: made_up({0: 0.3, 1: 0.0}), 256: made_up({0: 0.3, 1: 0.0})}
        beyond = recommend(sizes, trained_length=256)
        assert beyond.window == 63  # the choice between numbers of sinks was made at the largest size
        assert beyond.notes == (
            "This rests on caches that take 257 positions, and the model was trained on 256: measure smaller ones.",
        )
        for trained in (None, 257):
            assert recommend(sizes, trained_length=trained).notes == ()


# --- what is compared --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [16, 63, 128])
@pytest.mark.parametrize("name", list(policy_registry))
def test_every_policy_is_given_the_same_size(name, budget):
    left_out = []
    plan = list(plan_policies([name], [budget], (0, 1, 4), left_out))
    assert plan
    assert left_out == []
    for policy, size in plan:
        assert policy.name == name
        assert (policy.max_held(2**31) == budget + 1) if policy.bounded else (size is None)


def test_settings_that_were_given_hold_and_the_rest_makes_the_size():
    specs = ["sink_window:num_sinks=2", "window:window=32", "blocks:num_sinks=1"]
    names, left_out = checked_names(specs), []
    plan = list(plan_policies(names, [32, 64], (0, 1), left_out))
    assert [(policy.describe(), budget) for policy, budget in plan] == [
        ("2+30", 32),
        ("2+62", 64),
        ("0+32", 32),
        ("1+2×16", 32),
        ("1+2×32", 64),
    ]
    assert left_out == []  # a size that was given is compared at that one, if it is among them


# --- a small model -----------------------------------------------------------------------------------------------------------

SMALL = {"corpus": "random_tokens", "tokens": 120, "documents": 3, "windows": [16, 32], "sinks": (0, 1, 4)}
NAMES = ["full", "window", "sink_window"]


@pytest.fixture(scope="module")
def model():
    model = make_sinklm()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(8)  # small random weights attend evenly, and all policies would be alike
    return wrap_model(model)


@pytest.fixture(scope="module")
def result(model, tmp_path_factory):
    return compare_policies(model, policies=NAMES, **SMALL, out=tmp_path_factory.mktemp("cache") / "out")


class TestComparison:
    def test_every_entry_says_what_it_is(self, result):
        entries = result.summary["policies"]
        assert [(entry["policy"], entry["num_sinks"], entry["window"], entry["held"]) for entry in entries] == [
            ("full", None, None, 120),
            ("window", 0, 16, 17),
            ("sink_window", 1, 15, 17),
            ("sink_window", 4, 12, 17),
            ("window", 0, 32, 33),
            ("sink_window", 1, 31, 33),
            ("sink_window", 4, 28, 33),
        ]
        assert all(entry["tokens_per_second"] > 0 for entry in entries)
        # Keys and values: 2 layers of 2 heads of 16 in float32; of the sinks their first form too.
        assert [entry["bytes_held"] for entry in entries[:4]] == [512 * 120, 512 * 17, 512 * 17 + 256, 512 * 17 + 4 * 256]

    def test_losses_are_those_of_the_policies(self, result, model):
        rows = resolve_corpus("random_tokens").sample(model.encoder, seq_len=120, samples=3, seed=0, bos=False)
        first = result.summary["scored_from"]
        assert first == 60  # the model is said to be trained on 128 tokens: half of the text is scored
        plain = losses(model.model, rows, {"name": "window", "window": 16})
        one = losses(model.model, rows, {"name": "sink_window", "num_sinks": 1, "window": 15})
        entry = result.summary["policies"][2]
        found = estimate(one[:, first - 1 :])
        assert (entry["loss"], entry["loss_low"], entry["loss_high"]) == pytest.approx((found.mean, found.low, found.high))
        difference = estimate((one - plain)[:, first - 1 :])
        assert entry["against_window"]["mean"] == pytest.approx(difference.mean, abs=1e-6)
        assert entry["against_window"]["low"] == pytest.approx(difference.low, abs=1e-6)
        assert entry["scored_tokens"] == 3 * 60
        # The points of the curve are means over stretches of all the tokens.
        sizes = [stop - start for start, stop in result.summary["positions"]]
        mean = sum(size * value for size, value in zip(sizes, entry["loss_by_position"], strict=True)) / sum(sizes)
        assert mean == pytest.approx(one.mean().item(), abs=1e-5)

    def test_recomputation_is_scored_at_some_tokens_as_if_all_were_read(self, model):
        rows = resolve_corpus("random_tokens").sample(model.encoder, seq_len=120, samples=2, seed=0, bos=False)
        policy = policy_registry["recompute"](window=16)
        encoded = []
        seen = model.model.register_forward_pre_hook(
            lambda module, arguments, keywords: encoded.append(keywords["input_ids"].numel()), with_kwargs=True
        )
        found = _recomputed(model.model, rows, policy, _scored(model.model, rows, policy, 60))
        seen.remove()
        scored = (~found.isnan()).sum()
        assert sum(encoded) == scored * 17  # a window of 16 tokens and itself for every scored token, and nothing besides
        known = ~found.isnan()
        # Points of the curve are 5 tokens wide; 12 of them begin at token 60 or later, and their last 4 tokens are scored.
        assert scored == known.sum() == 2 * 12 * 4
        torch.testing.assert_close(found[known], losses(model.model, rows, policy)[known], atol=1e-4, rtol=0)

    def test_a_sampled_curve_is_coarse_points_with_errors_and_none_below_zero(self):
        window = torch.full((2, 24), 3.0)
        window[:, 12:] = 0.1
        sampled = torch.full((2, 24), torch.nan)
        sampled[:, 3:12:4] = window[:, 3:12:4] + torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])
        sampled[:, 15::4] = window[:, 15::4] - 0.2
        points = [(start, start + 4) for start in range(1, 25, 4)]
        policy = policy_registry["recompute"](window=4)
        curve = _curve(_Measured(policy, 4, sampled), window, 1, points)
        assert curve.means == [None, pytest.approx(3.2), None, None, None, None]  # the last three are at -0.1: not drawn
        assert curve.counts == [0, 6, 0, 0, 0, 0]
        # Student's t over six differences around 0.2: 2.5706 times their standard error.
        assert curve.errors[1] == pytest.approx(2.5706 * 0.0894427 / 6**0.5, rel=1e-4)

    def test_rows_of_the_long_table(self, result):
        table = read_table(result.folder / "table.parquet")
        assert list(table.columns) == list(COLUMNS)
        loss = table[(table["metric"] == "loss") & (table["policy"] == "sink_window 1+15")]
        assert loss["value"].item() == result.summary["policies"][2]["loss"]
        assert (loss["count"].item(), loss["unit"].item(), loss["corpus"].item()) == (180, "nats", "random_tokens")
        assert table.loc[table["metric"] == "loss_by_position", "query_position"].max() < 119
        assert set(table["metric"]) == {
            "loss", "loss_by_position", "decoding_tokens_per_second", "bytes_held"
        }  # fmt: skip

    def test_a_policy_that_the_model_cannot_have_is_left_out_with_its_reason(self):
        model = wrap_model(make_model_with_learned_positions())
        summary = compare_policies(model, policies=["full", "sink_window"], **SMALL).summary
        assert [entry["policy"] for entry in summary["policies"]] == ["full"]
        assert "adds positions to its hidden states" in summary["left_out"][0]["reason"]
        longer = {**SMALL, "tokens": 129}  # one more than the table of positions has
        with pytest.raises(UnsupportedModelError, match="needs positions past the 128 that in memory was made for"):
            compare_policies(model, policies=["full"], **longer)
        with pytest.raises(UnsupportedModelError, match=r"no policy can be had with in memory; sink_window: .*adds positions"):
            compare_policies(model, policies=["sink_window"], **SMALL)


def test_every_token_that_is_scored_is_predicted_without_something_that_was_evicted(model):
    """The shortest text: one token is scored, the only one whose loss differs from that of dense attention."""
    rows = torch.randint(4, 40, (2, 19), generator=torch.Generator().manual_seed(0))
    first = scored_from(model, rows.shape[1], 16)
    assert first == rows.shape[1] - 1
    same = losses(model.model, rows, "window:window=16") - losses(model.model, rows, "full")
    assert same[:, : first - 1].abs().max() < 1e-5 < same[:, first - 1].abs().min()


def test_what_is_read_anew_is_completed_by_the_window_whatever_else_is_compared(model):
    """Without sinks blocks pin no token either, and see others than a window does."""
    sizes = {"corpus": "random_tokens", "windows": [16], "sinks": (0,), "tokens": 120, "documents": 2}
    read = []
    for names in (["window", "recompute"], ["window", "recompute", "blocks"]):
        entries = compare_policies(model, policies=names, **sizes).summary["policies"]
        read.append(next(entry for entry in entries if entry["policy"] == "recompute"))
    assert read[0]["loss"] == read[1]["loss"]
    assert read[0]["against_window"] == read[1]["against_window"]


def make_model_with_learned_positions():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300, n_positions=128, bos_token_id=0)).eval()


# --- texts and bad input -----------------------------------------------------------------------------------------------------


class TestTexts:
    def test_a_file_is_cut_into_pieces_that_share_nothing(self, checkpoint, tmp_path):
        (tmp_path / "text.txt").write_text(TEXT)
        loaded = load_model(str(checkpoint))
        text = resolve_corpus(str(tmp_path / "text.txt"))
        rows = long_texts(text, loaded.encoder, tokens=101, documents=3, seed=0, bos=True)
        assert rows[:, 0].tolist() == [0, 0, 0]
        assert rows[:, 1:].flatten().tolist() == loaded.encoder.encode(TEXT)[:300]

    def test_texts_of_a_folder_are_drawn_from_all_its_files_in_turn(self, checkpoint, tmp_path):
        for name, text in (("a", TEXT), ("b", TEXT[::-1])):
            (tmp_path / f"{name}.txt").write_text(text)
        loaded, folder = load_model(str(checkpoint)), resolve_corpus(str(tmp_path))
        first, second = (loaded.encoder.encode(body) for body in folder.bodies())
        rows = long_texts(folder, loaded.encoder, tokens=100, documents=3, seed=0, bos=False)
        assert rows.tolist() == [first[:100], second[:100], first[100:200]]

    def test_too_short(self, checkpoint, tmp_path):
        (tmp_path / "text.txt").write_text("a few words\n")
        with pytest.raises(InputError, match=r"too short: its longest text has \d+ tokens and 199 are wanted; lower `tokens`"):
            compare_policies(str(checkpoint), corpus=str(tmp_path / "text.txt"), tokens=200, windows=[16])


class TestBadInput:
    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            (
                {"windows": [200]},
                InputError,
                "a window of 200 tokens covers the 120 tokens of a text, so nothing is ever evicted",
            ),
            ({"windows": [118]}, InputError, "choose a smaller `windows` or more `tokens` than 120"),
            ({"windows": [4]}, ConfigurationError, "a window of 4 tokens has no room for 4 sinks and one recent token"),
            ({"sinks": ()}, ConfigurationError, r"`sinks` \[\] must be numbers of tokens"),
            ({"sinks": (-1,)}, ConfigurationError, r"`sinks` \[-1\] must be numbers of tokens"),
            ({"policies": ["sink_windw"]}, UnknownNameError, "no policy is called 'sink_windw'. Did you mean 'sink_window'"),
            ({"tokens": 1}, ConfigurationError, "`tokens` must be at least 2"),
            ({"documents": 0}, ConfigurationError, "`documents` at least 1"),
            ({"corpus": "python_source"}, InputError, "no tokenizer, so it cannot read text; use `corpus` random_tokens"),
        ],
    )
    def test_refused_before_anything_is_read(self, model, changed, error, message):
        with pytest.raises(error, match=message):
            compare_policies(model, **{**SMALL, "policies": NAMES, **changed})


class TestDefaultSizes:
    @pytest.mark.parametrize(("slide", "sizes"), [(2, [9, 19]), (1, [32, 64]), (0, [32, 64])])
    def test_are_no_larger_than_what_the_narrowest_layer_sees(self, slide, sizes):
        """A layer that sees 20 tokens, the query's own among them, has 19 left for a cache; the trained length is 128.

        Where some of the layers slide, they keep their window.
        """
        kinds = ["full_attention"] * (2 - slide) + ["sliding_attention"] * slide
        model = build(ZOO["gemma3"], sliding_window=20, layer_types=kinds, max_position_embeddings=128)
        loaded = wrap_model(model)
        assert checked_budgets(loaded, None, (0, 1, 4)) == sizes
        found = compare_policies(
            loaded, policies=["window", "sink_window"], corpus="random_tokens", tokens=96, documents=2, sinks=(0, 1)
        )
        assert found.summary["left_out"] == []
        assert not found.summary["recommendation"].startswith("No recommendation")


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


def test_a_model_that_cannot_have_integers_is_refused_before_anything_is_compared(tmp_path):
    model = wrap_model(build(ZOO["bloom"], "eager").eval())
    said = []
    model.model.register_forward_hook(lambda *_: said.append(1))
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM adds a bias that counts the keys"):
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
