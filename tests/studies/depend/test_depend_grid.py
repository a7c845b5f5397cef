"""The grid of depend(): planted dependences and their indices, cells that cannot be, what is stored, and the sentences."""

from __future__ import annotations

import copy
import functools
import json

import numpy as np
import pytest
import torch
from tests.conftest import make_sinklm, make_tokenizer
from tests.studies.depend.induction import InductionReader

from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError
from sinklab.models.loading import wrap_model
from sinklab.policies.full import Full
from sinklab.policies.window import Window
from sinklab.registry import tasks
from sinklab.results.intervals import Interval, function_over_items, mean_over_items
from sinklab.results.table import read_run
from sinklab.streaming.reader import open_reader
from sinklab.studies.depend import runner
from sinklab.studies.depend.conditions import Condition, counts_of, make_plan
from sinklab.studies.depend.contenders import make_contenders
from sinklab.studies.depend.depend import depend
from sinklab.studies.depend.dependence import Dependence, measure_dependence
from sinklab.studies.depend.evicted import SinkEvicted
from sinklab.studies.depend.judge import judge
from sinklab.studies.depend.outcome import dependence_sentence
from sinklab.studies.depend.words import index_text

GRID = {"bos": ["none", "one", "two"], "cache_bits": [8, 4], "window": 120, "sinks": (4,), "items": 12}
NEEDLE = "needle:distances=[],length=1.5"


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(make_sinklm(), tokenizer=make_tokenizer())


@pytest.fixture
def planted(loaded, monkeypatch):
    """The outcome of the needle task with a reader of known behaviour."""

    def outcome(options, **arguments):
        monkeypatch.setattr(runner, "open_reader", functools.partial(InductionReader, **options))
        return depend(loaded, [NEEDLE], **{**GRID, **arguments}).summary["tasks"][0]

    return outcome


def pair_of(outcome, bos=1, policy="4+116", bits=32):
    (pair,) = (pair for pair in outcome["grid"] if (pair["bos"], pair["policy"], pair["bits"]) == (bos, policy, bits))
    return pair


class TestPlanted:
    def test_a_score_that_needs_the_sink(self, planted):
        """A guess is right for one digit of ten: hidden, the score is at chance, and the whole of it goes, in every pair."""
        outcome = planted({"needs_sink": True})
        assert outcome["verdict"] == "yes"
        assert len(outcome["grid"]) == 6
        for pair in outcome["grid"][:3] + outcome["grid"][4:]:
            assert pair["visible"]["score"]["mean"] == 1.0
            assert pair["hidden"]["score"]["mean"] < 0.3
            assert pair["dependence"]["low"] > 0.7
            assert pair["dependence"]["high"] <= 1.0
        # All that the full cache loses is the sink: the fact is still there.
        assert pair_of(outcome, policy="full")["hidden"]["read"] == "full, first 4 evicted"
        assert pair_of(outcome, policy="full")["dependence"]["low"] > 0.7
        assert "of the score above chance (0.1) goes with the sink." in outcome["dependence_sentence"]

    def test_a_score_that_does_not(self, planted):
        """Without a difference in any item the interval is the rule of three, 3 / 12 of what is above chance, 0.9."""
        outcome = planted({})
        for pair in outcome["grid"]:
            assert pair["dependence"] == {"mean": 0.0, "low": -3 / 12 / 0.9, "high": pytest.approx(3 / 12 / 0.9)}
            assert pair["visible"]["lost"]["mean"] == pair["hidden"]["lost"]["mean"] == 0.0
        assert outcome["grid"][0]["visible"]["lost"] == {"mean": 0.0, "low": 0.0, "high": 0.0}  # against itself
        assert outcome["dependence_sentence"] == (
            "needle: index of dependence +0.00 [-0.28, +0.28]: none to 28 % of the score above chance (0.1) goes with the sink"
            ", or up to 28 % of it while the sink stays."
        )

    def test_a_score_that_needs_bos(self, planted):
        """Without it the model guesses with the first tokens and without them: at chance, and there is no index."""
        outcome = planted({"needs_bos": True})
        assert pair_of(outcome)["dependence"]["mean"] == pair_of(outcome, bos=2)["dependence"]["mean"] == 0.0
        without = pair_of(outcome, bos=0)
        assert without["dependence"] == {"refused": "at chance: says nothing about sinks"}
        assert without["visible"]["lost"]["mean"] > 0.7

    def test_a_score_that_needs_precision(self, planted):
        outcome = planted({"rounds": "int4"})
        assert pair_of(outcome, bits=8)["visible"]["lost"]["mean"] == 0.0
        assert pair_of(outcome, bits=4)["visible"]["lost"]["mean"] > 0.7
        assert pair_of(outcome, bits=4)["dependence"] == {"refused": "at chance: says nothing about sinks"}

    def test_the_full_cross(self, planted):
        outcome = planted({}, cross=True, bos=["one", "none"], cache_bits=[8], items=4)
        found = [(pair["bos"], pair["policy"], pair["bits"]) for pair in outcome["grid"]]
        assert found == [(bos, policy, bits) for bos in (1, 0) for policy in ("4+116", "full") for bits in (32, 8)]
        integers = pair_of(outcome, policy="full", bits=8)
        assert integers["visible"] == integers["hidden"]
        assert integers["visible"]["refused"].startswith("a full cache of integers is not there")
        assert integers["dependence"] is None

    def test_only_what_is_asked_for(self, planted):
        outcome = planted({}, visibility=["visible"], bos=["auto"], cache_bits=[8], policies=["recompute:window=120"], items=4)
        assert [pair["hidden"] is None for pair in outcome["grid"]] == [False, True, True]
        outcome = planted({}, bos=["auto"], cache_bits=[32, 8], policies=["recompute:window=120"], items=4)
        assert "what recompute 120 keeps is its own rule" in pair_of(outcome, policy="recompute 120")["hidden"]["refused"]

    def test_the_table_has_every_index_with_its_interval(self, loaded, monkeypatch):
        monkeypatch.setattr(runner, "open_reader", functools.partial(InductionReader, needs_bos=True))
        result = depend(loaded, [NEEDLE], **GRID)
        values = result.table.set_index(["metric", "bos", "policy"])["value"]
        for pair in result.summary["tasks"][0]["grid"]:
            for metric, index, label in (
                ("sink_dependence", pair["dependence"], pair["visible"]["read"]),
                ("score_lost", pair["visible"]["lost"], pair["visible"]["read"]),
                ("score_lost", pair["hidden"]["lost"], pair["hidden"]["read"]),
            ):
                for name, end in (("mean", ""), ("low", "_low"), ("high", "_high")):
                    key = (metric + end, pair["bos"], label)
                    assert (key in values.index) == ("refused" not in index)
                    assert "refused" in index or values[key] == index[name]
        assert "sink_dependence" in {entry["metric"] for entry in result.record["definitions"]}


class TestIndex:
    """measure_dependence by hand and against simulated truth."""

    def test_by_hand(self):
        """Visible 0.7, hidden 0.4, chance 0.1: half of the 0.6 goes."""
        spread = np.linspace(-0.01, 0.01, 40)
        found = measure_dependence(0.7 + spread, 0.4 - spread, spread * 0, chance=0.1, scale=1.0)
        assert found.index.mean == pytest.approx(0.5)
        assert measure_dependence(0.4 + spread, 0.7 + spread, spread, chance=0.1, scale=1.0).index.mean == pytest.approx(-0.5)

    def test_below_chance_is_at_chance(self):
        spread = np.linspace(-0.01, 0.01, 40)
        found = measure_dependence(0.7 + spread, 0.02 - spread, spread, chance=0.1, scale=1.0)
        assert (found.index.mean, found.index.high) == (1.0, 1.0)

    def test_nats_are_above_one_token(self):
        """-2 with the sink, -3 without, -6 with one token: a quarter of the four nats that context gives."""
        spread = np.linspace(-0.1, 0.1, 40)
        found = measure_dependence(-2 + spread, -3 - spread, -6 + spread, chance=None, scale=None)
        assert found.index.mean == pytest.approx(0.25)
        nothing = measure_dependence(-6 + spread, -6 - spread, -6 + 0 * spread, chance=None, scale=None)
        assert nothing.reason == "not shown to be better than with one token in the cache: no share of it can be given"

    @pytest.mark.slow
    def test_holds_the_truth_as_often_as_it_says(self):
        """95 % of intervals hold the ratio of the true means, here 0.5; 300 draws leave 1.3 % of standard error."""
        generator = np.random.default_rng(0)
        hits = 0
        for _ in range(300):
            items = generator.normal(0.0, 0.1, size=32)
            noise = generator.normal(0.0, 0.1, size=(2, 32))
            found = measure_dependence(0.7 + items + noise[0], 0.4 + items + noise[1], items, chance=0.1, scale=1.0).index
            hits += found.low <= 0.5 <= found.high
        assert 0.90 < hits / 300 < 0.99

    def test_a_function_of_one_mean_is_the_mean(self):
        values = np.random.default_rng(1).normal(size=20)
        found, mean = function_over_items(values[None], lambda means: means[0]), mean_over_items(values)
        assert found.to_dict() == pytest.approx(mean.to_dict(), abs=1e-12)  # float64 means in two orders of summation


class TestSentence:
    """What the terminal says of an index."""

    @pytest.mark.parametrize(
        ("visible", "hidden", "chance", "words"),
        [
            (0.7, 0.4, 0.1, "+0.50 [+0.49, +0.51]: 50 % of the score above chance (0.1) goes with the sink"),
            (0.4, 0.7, 0.1, "-0.50 [-0.51, -0.49]: 50 % of the score above chance (0.1) goes while the sink stays"),
            (
                0.5,
                0.5,
                0.1,
                "+0.00 [-0.02, +0.02]: none to 2 % of the score above chance (0.1) goes with the sink, or up to 2 % of it "
                "while the sink stays",
            ),
            (
                -2.0,
                -3.0,
                None,
                "+0.25 [+0.25, +0.25]: 25 % of the score above what one token of context gives goes with the sink",
            ),
            (0.1, 0.1, 0.1, "at chance: says nothing about sinks"),
            (-6.0, -6.0, None, "not shown to be better than with one token in the cache: no share of it can be given"),
        ],
    )
    def test_says_what_the_index_is(self, visible, hidden, chance, words):
        spread = np.linspace(-0.03, 0.03, 64)
        found = measure_dependence(visible + spread, hidden - spread, -6.0 + 0 * spread, chance=chance, scale=None)
        index = "" if found.index is None else "index of dependence "
        assert dependence_sentence("mine", chance, found) == f"mine: {index}{words}."

    @pytest.mark.parametrize(
        ("index", "words"),
        [
            ((0.004, 0.001, 0.006), "0.4 % of the score above chance (0.1) goes with the sink."),
            ((-0.0004, -0.0006, -0.0001), "0.04 % of the score above chance (0.1) goes while the sink stays."),
            ((0.0, 0.0, 0.0), "none of the score above chance (0.1) goes with the sink."),
            ((0.0, -0.002, 0.3), "none to 30 % of the score above chance (0.1) goes with the sink, or up to 0.2 % of it while "
             "the sink stays."),
            ((0.00999, 0.009, 0.0101), "1 % of the score above chance (0.1) goes with the sink."),
        ],
    )  # fmt: skip
    def test_a_share_that_is_not_nothing_is_not_said_to_be(self, index, words):
        said = dependence_sentence("mine", 0.1, Dependence(Interval(*index)))
        assert said.partition("]: ")[2] == words

    def test_a_loss_that_gains_by_the_sink_is_not_said_to_say_nothing(self):
        """By 0.4 nats in each of three texts, which scatter by more than what one token of context is worse."""
        texts = np.array([-2.0, -3.6, -5.2])
        with_sinks, floor = texts + np.array([0.40, 0.42, 0.44]), np.array([-6.0, -5.5, -5.2])
        verdict = judge(with_sinks, texts, floor, minimal_effect=0.05, chance=None, scale=None)
        index = measure_dependence(with_sinks, texts, floor, chance=None, scale=None)
        assert (verdict.verdict, index.index) == ("yes", None)
        assert "says nothing" not in dependence_sentence("mine", None, index)

    @pytest.mark.parametrize(
        ("index", "text"),
        [
            ((0.5, 0.4, 0.6), "+0.50 [+0.40, +0.60]"),
            ((-0.001, -0.004, 0.002), "+0.00 [+0.00, +0.00]"),
            ((-0.0004, -0.0006, -0.0001), "-0.0004 [-0.0006, -0.0001]"),
            ((0.004, 0.001, 0.006), "+0.004 [+0.001, +0.006]"),
            ((0.0, 0.0, 0.0), "+0.00 [+0.00, +0.00]"),
        ],
    )
    def test_an_index_that_is_apart_from_nothing_is_written_so(self, index, text):
        """And rounding makes no "-0.00"."""
        assert index_text(Interval(*index).to_dict()) == text
        assert f" {text}: " in dependence_sentence("mine", 0.1, Dependence(Interval(*index)))


class TestSinkEvicted:
    @pytest.mark.parametrize("sizes", [(1, 1, 2), (3, 3, 6), (2, 9, 30), (4, 9, 13)])
    def test_what_is_visible_is_what_the_slots_hold(self, sizes):
        """Token after token: no slot is taken whose token a later query would see, and none is kept that it would not."""
        sinks, at, length = sizes
        policy = SinkEvicted(num_sinks=sinks, at=at, length=length)
        held = torch.full((policy.num_slots,), -1)
        for token in range(length):
            held[policy.slots(torch.tensor(token))] = token
            visible = policy.visible(torch.tensor(token), torch.arange(length)).nonzero()[:, 0]
            assert torch.equal(held[held >= 0].sort().values, visible)
        assert visible.tolist() == list(range(sinks, length))

    def test_hides_the_first_tokens_and_nothing_else(self, loaded):
        """Against one forward under the mask that its rule says, in float32: 1e-4."""
        policy = SinkEvicted(num_sinks=3, at=20, length=64)
        tokens = torch.randint(4, 300, (2, 64), generator=torch.Generator().manual_seed(0))
        found = open_reader(loaded.model, policy, chunk=7).read(tokens)
        places = torch.arange(64)
        visible = policy.visible(places[:, None], places)
        assert visible.sum().item() == 64 * 65 // 2 - sum(64 - 20 - token for token in range(3))
        mask = torch.zeros(2, 1, 64, 64).masked_fill(~visible, torch.finfo(torch.float32).min)
        with torch.no_grad():
            expected = loaded.model(tokens, attention_mask=mask).logits
            whole = open_reader(loaded.model, Full()).read(tokens)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[:, :20], whole[:, :20], atol=1e-4, rtol=1e-4)
        assert (found[:, 30:] - whole[:, 30:]).abs().max() > 1e-3


class TestPlan:
    def test_one_factor_at_a_time(self):
        """Reference and, of every factor, each other value: two cells a pair, and the floor."""
        plan = make_plan(make_contenders(64, (4,), ["full"]), [1, 0, 2], ["visible", "hidden"], [8, 4], 32, cross=False)
        assert len(plan.cells) == 2 * (1 + 2 + 1 + 2)
        assert len(plan.conditions) == len(plan.cells) + 1
        assert plan.cells[1].condition == Condition(1, Window(window=64))

    @pytest.mark.parametrize(
        ("given", "twin", "more"),
        [
            ("blocks:num_sinks=4,block=30,blocks=4", "0+4×31", 0),
            ("blocks:num_sinks=1,block=60", "0+2×61", 1),
            ("blocks:num_sinks=1,block=60,positions=original", "0+2×61, original positions", 1),
            ("blocks:num_sinks=3,block=32,blocks=1", "0+1×35", 0),
        ],
    )
    def test_blocks_without_a_sink_are_blocks_of_as_many_tokens(self, given, twin, more):
        contenders = make_contenders(120, (4,), [given])
        plan = make_plan(contenders, [1], ["visible", "hidden"], [8], 32, cross=False)
        policies = {cell.sink: cell.condition.policy for cell in plan.cells if "×" in cell.policy}
        assert policies["hidden"].describe() == twin
        assert policies["hidden"].pinned == ()
        assert policies["hidden"].max_held(2**31) == policies["visible"].max_held(2**31) + more

    def test_without_factors_there_is_no_grid(self):
        plan = make_plan(make_contenders(64), [1], ["visible", "hidden"], [32], 32, cross=False)
        assert not plan.grid
        assert [condition.label for condition in plan.conditions] == ["full", "0+64", "1+63", "4+60", "recompute 64", "0+1"]

    def test_what_the_tokenizer_does_is_the_reference(self):
        encoder = Encoder(vocab_size=300, bos_token_id=0, tokenizer=make_tokenizer())
        assert encoder.adds_bos
        assert counts_of(["none", "two", "auto", "always"], encoder) == [1, 0, 2]
        assert counts_of(["none", "two"], encoder) == [0, 2]


def test_texts_behind_bos_are_the_same(loaded):
    plan = make_plan(make_contenders(120, (4,), []), [1, 0, 2], ["visible"], [], 32, cross=False)
    prepared = runner.prepare_task(loaded, tasks["needle"](distances=(), length=2), "needle", plan, 3, 0)
    (none,), (one,), (two,) = (prepared.sheets[count] for count in (0, 1, 2))
    assert torch.equal(one.tokens[:, 1:], none.tokens)
    assert torch.equal(two.tokens[:, 2:], none.tokens)
    assert two.tokens[:, :2].eq(0).all()
    for sheet in (none, one, two):
        (question,) = sheet.questions
        fact = question.stop - 2 - question.distance
        assert torch.equal(sheet.tokens[:, fact : fact + 5], sheet.tokens[:, question.start : question.stop])


class TestStore:
    def test_goes_on_where_it_was_interrupted(self, loaded, tmp_path, monkeypatch):
        """Killed in the third cell; the second run reads only the others, and gives what one run would have given."""
        arguments = {**GRID, "items": 2, "bos": ["one", "none"], "cache_bits": [8], "policies": []}
        whole = depend(loaded, [NEEDLE], **arguments)
        read = []

        def counted(model, policy, **options):
            read.append(policy.describe())
            if len(read) == 3:
                raise KeyboardInterrupt
            return open_reader(model, policy, **options)

        monkeypatch.setattr(runner, "open_reader", counted)
        with pytest.raises(KeyboardInterrupt):
            depend(loaded, [NEEDLE], **arguments, out=tmp_path / "out")
        said = []
        result = depend(loaded, [NEEDLE], **arguments, out=tmp_path / "out", say=said.append)
        cells = len({(row.policy, row.bos) for row in whole.table.itertuples()})
        assert cells == 7
        assert len(read) == 3 + cells - 2
        assert result.table.drop(columns="run_id").equals(whole.table.drop(columns="run_id"))
        assert json.loads(json.dumps(result.summary)) == json.loads(json.dumps(whole.summary))
        assert (tmp_path / "out" / "grid.png").is_file()
        assert read_run(tmp_path / "out", "summary.json")["tasks"][0]["grid"] == result.summary["tasks"][0]["grid"]
        assert said[0].startswith("7 cells: 1 task, 7 conditions, ")
        assert said[1].startswith("the first cell took ")

    def test_what_was_read_under_another_configuration_is_read_again(self, loaded, tmp_path, monkeypatch):
        arguments = {**GRID, "items": 2, "policies": []}
        read = []

        def counted(model, policy, **options):
            read.append(policy.describe())
            if len(read) == stop:
                raise KeyboardInterrupt
            return open_reader(model, policy, **options)

        monkeypatch.setattr(runner, "open_reader", counted)
        stop = 0
        depend(loaded, [NEEDLE], **arguments)
        whole = read.copy()
        stop = len(whole) + 3
        with pytest.raises(KeyboardInterrupt):
            depend(loaded, [NEEDLE], **arguments, out=tmp_path / "out")
        changed = copy.deepcopy(loaded)
        changed.model.config.update({"rms_norm_eps": 1e-3})
        depend(changed, [NEEDLE], **arguments, out=tmp_path / "out")
        assert read[stop:] == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bos": ["three"]}, "`bos` 'three' is none of auto, always, none, one, two"),
        ({"bos": []}, "`bos` '' is none of auto"),
        ({"visibility": ["away"]}, "`visibility` 'away' is none of visible, hidden"),
        ({"cache_bits": [2]}, "`cache_bits` 2 is none of 32, 8, 4: the model computes in 32 bits, and integers have 8 or 4"),
        ({"cache_bits": [16]}, "`cache_bits` 16 is none of 32, 8, 4"),
        ({"tasks": ["passkey", "passkey"]}, "task 'passkey' is named twice; once is enough, or give it other settings"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_read(loaded, monkeypatch, options, message):
    monkeypatch.setattr(runner, "open_reader", None)
    with pytest.raises(ConfigurationError, match=message):
        depend(loaded, **{"tasks": [NEEDLE], **GRID, **options})


@pytest.mark.parametrize("word", ["one", "two", "always"])
def test_a_tokenizer_without_bos(word):
    with pytest.raises(
        ConfigurationError, match=f"`bos` {word}: this model has no beginning-of-sequence token; use `bos` none"
    ):
        counts_of(["none", word], Encoder(vocab_size=300, tokenizer=make_tokenizer()))
    assert counts_of(["auto", "none"], Encoder(vocab_size=300, tokenizer=make_tokenizer())) == [0]


def test_one_task_with_two_settings(loaded):
    result = depend(
        loaded, ["long_text:scored=4", "long_text:scored=8"], window=24, sinks=(4,), items=2, policies=[], bos=["none", "one"]
    )
    assert [outcome["task"] for outcome in result.summary["tasks"]] == ["long_text:scored=4", "long_text:scored=8"]
