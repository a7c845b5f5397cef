"""depend(): scores against the model itself, verdicts on a reader of known behaviour, what is written, shown and refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import sys

import numpy as np
import pytest
import torch
from tests.command_line import CliRunner
from tests.conftest import make_sinklm, make_tokenizer
from tests.studies.depend.induction import InductionReader
from tests.test_sinks import planted, texts
from transformers import GPT2Config, GPT2LMHeadModel

from sinklab.cli.app import app
from sinklab.errors import ConfigurationError, InputError, UnknownNameError, UnsupportedModelError
from sinklab.models.loading import wrap_model
from sinklab.registry import tasks
from sinklab.results.table import read_run, read_table
from sinklab.streaming.reader import open_reader
from sinklab.studies.depend import harness, lm_eval, measurement
from sinklab.studies.depend.depend import depend
from sinklab.studies.depend.harness import make_contenders

QUICK = {"window": 70, "sinks": (4,), "items": 3}


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(make_sinklm(), tokenizer=make_tokenizer())


@pytest.fixture
def induction(monkeypatch):
    """Every policy is read by the constructed reader; call with needs_sink."""

    def use(**options):
        monkeypatch.setattr(lm_eval, "open_reader", functools.partial(InductionReader, **options))

    return use


def test_scores_are_those_of_one_forward_of_the_whole_text(loaded):
    """Under the full policy; float32 logits of about 1 in two orders of summation agree to 1e-4."""
    contenders = make_contenders(70)
    task = tasks["long_text"](scored=8, contexts=(1.5, 2.0))
    prepared = harness.prepare_task(loaded, task, "long_text", contenders, 3, 0, 1)
    found = harness._evaluate(loaded, prepared, contenders.policies["full"], 1)
    assert found["metric"] == "log_likelihood"
    for score, document in zip(found["scores"], task.documents(loaded.encoder, budget=70, items=3, seed=0), strict=True):
        before = loaded.tokenizer.encode(document.context)
        ids = loaded.tokenizer.encode(document.context + document.answer)
        logarithms = loaded.model(torch.tensor([ids])).logits.detach()[0].log_softmax(-1)
        right = [float(logarithms[at - 1, ids[at]]) for at in range(len(before), len(ids))]
        assert score == pytest.approx(np.mean(right), abs=1e-4)


class TestVerdicts:
    def test_retrieval_that_needs_no_sink(self, loaded, induction):
        """All facts within the window are found under both caches; nothing behind it: the cliff."""
        induction()
        task = tasks["passkey"](distances=(0.5, 0.92, 1.1, 1.5))
        (found,) = depend(loaded, [task], window=180, sinks=(4,), items=12).summary["tasks"]
        assert found["verdict"] == "undecided"  # 12 items without an exception leave 3/12 on either side
        assert found["difference"]["mean"] == 0.0
        beyond = {name: [point["mean"] for point in curve if point["at"] > 180] for name, curve in found["curves"].items()}
        assert max(beyond["4+176"]) < 0.6
        assert min(beyond["full"]) == 1.0

    def test_enough_items_decide(self, loaded, induction):
        induction()
        task = tasks["passkey"](distances=(), length=1.5)
        (found,) = depend(loaded, [task], window=120, sinks=(4,), items=64).summary["tasks"]
        assert found["verdict"] == "no"
        assert found["difference"] == {"mean": 0.0, "low": -3 / 64, "high": 3 / 64}

    def test_retrieval_that_needs_the_sink(self, loaded, induction):
        induction(needs_sink=True)
        task = tasks["passkey"](distances=(), length=1.5)
        (found,) = depend(loaded, [task], window=120, sinks=(4,), items=16).summary["tasks"]
        assert found["verdict"] == "yes"
        scores = {row["policy"]: row["score"]["mean"] for row in found["policies"]}
        assert scores["4+116"] == scores["full"] == 1.0
        assert scores["0+120"] < 0.6
        assert found["dependence"]["mean"] == pytest.approx((1 - max(scores["0+120"], 0.25)) / 0.75)

    def test_lookup_counts_only_what_both_hold(self, loaded, induction):
        """A fact between the windows of the two caches is no evidence about sinks."""
        induction()
        task = tasks["line_lookup"](shares=(0.7,), back=(30,), every=3)
        (found,) = depend(loaded, [task], window=150, sinks=(4,), items=4).summary["tasks"]
        scores = {row["policy"]: row["score"]["mean"] for row in found["policies"]}
        assert scores["0+150"] == scores["4+146"] == 1.0
        assert (found["items"], found["documents"]) == (4, 8)

    def test_an_untrained_model_is_at_chance(self, loaded):
        (found,) = depend(loaded, ["passkey"], **{**QUICK, "window": 100}).summary["tasks"]
        assert found["verdict"] == "undecided"
        assert "not shown to be above chance" in found["reason"]


@pytest.fixture(scope="module")
def line(checkpoint, tmp_path_factory):
    """The command line, and its folder."""
    out = tmp_path_factory.mktemp("depend") / "out"
    words = ["--task", "passkey:distances=[]", "--task", "long_text:scored=8", "--window", "70"]
    done = CliRunner().invoke(app, ["depend", str(checkpoint), *words, "--sinks", "4", "--items", "3", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return done, out


class TestFolder:
    def test_shows_every_policy_and_the_verdict(self, line):
        done, out = line
        text = " ".join(done.stdout.split())
        assert "passkey, 3 items passkey depends on the sink tokens: undecided. " in text
        for name in ("0+70", "4+66", "full", "0+1", str(out / "report.html")):
            assert name in done.stdout
        assert done.stderr == ""

    def test_holds_what_it_shows(self, line):
        _, out = line
        summary, table, run = read_run(out, "summary.json"), read_table(out / "table.parquet"), read_run(out)
        assert {path.name for path in out.iterdir()} == {"table.parquet", "summary.json", "run.json", "report.html"}
        assert set(table["policy"]) == {"0+70", "4+66", "full", "0+1"}
        assert set(table["corpus"]) == {"long_text", "passkey:distances=[]"} or set(table["corpus"]) == {"long_text", "passkey"}
        assert set(table["count"]) == {3}
        shown = {row["policy"]: row for row in summary["tasks"][1]["policies"]}
        rows = table[(table["metric"] == "log_likelihood") & (table["policy"] == "4+66")]
        assert rows[rows["query_position"].isna()]["value"].item() == shown["4+66"]["score"]["mean"]
        late = rows[rows["query_position"] >= 71]["value"]  # the two contexts that fill the cache
        assert float(np.mean(late)) == pytest.approx(shown["4+66"]["score"]["mean"])
        assert run["policies"]["4+66"] == {"name": "sink_window", "positions": "in_cache", "num_sinks": 4, "window": 66}
        assert [task["name"] for task in run["tasks"]] == ["passkey", "long_text"]
        assert run["tasks"][1]["scored"] == 8
        assert run["tasks"][1]["identity"]["licence"]

    def test_same_seed_same_numbers(self, checkpoint, line):
        words = ["--task", "passkey:distances=[],long_text:scored=8", "--window", "70", "--sinks", "4"]
        again = CliRunner().invoke(app, ["depend", str(checkpoint), *words, "--items", "3", "--json"])
        assert json.loads(again.stdout) == read_run(line[1], "summary.json")


def test_an_interrupted_run_goes_on_with_what_it_has(loaded, tmp_path, monkeypatch):
    evaluate, read = harness._evaluate, []

    def counted(*arguments):
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(arguments[2].describe())
        return evaluate(*arguments)

    monkeypatch.setattr(harness, "_evaluate", counted)
    asked = {"tasks": ["passkey:distances=[]"], **QUICK, "out": tmp_path / "out"}
    with pytest.raises(KeyboardInterrupt):
        depend(loaded, **asked)
    read_before = list(read)
    monkeypatch.setattr(
        harness, "_evaluate", lambda *arguments: (read.append(arguments[2].describe()), evaluate(*arguments))[1]
    )
    depend(loaded, **asked)
    assert read_before == read[:2]
    assert sorted(read) == ["0+1", "0+70", "4+66", "full"]


class TestWarnings:
    @pytest.mark.parametrize("task", ["long_text", "false_sinks"])
    def test_of_texts_that_are_scored_on_the_same_tokens(self, loaded, tmp_path, task):
        """One passage again and again is no sample of texts: told of a short corpus and of none that is long enough."""
        words = random.Random(0)
        long = "\n".join("".join(words.choices("abcdefghij", k=4)) for _ in range(5_000))
        contenders, warned = make_contenders(70), []
        for name, text in (("short", long[:600]), ("long", long)):
            (tmp_path / f"{name}.txt").write_text(text)
            made = tasks[task](corpus=str(tmp_path / f"{name}.txt"), contexts=(1.3,), scored=8)
            warned.append(measurement._repeats(harness.prepare_task(loaded, made, task, contenders, 24, 0, 1)))
        found = re.match(rf"{task}: (\d+) of 24 texts are scored on tokens that another one is scored on, too", warned[0])
        assert 3 <= int(found[1]) <= 23
        assert warned[1] == ""

    @pytest.mark.parametrize(("places", "warned"), [((2, 2, 2), False), ((9, 9, 9), True), ((3, 11, 17), True)])
    def test_of_a_sink_that_is_not_among_the_first_tokens(self, loaded, places, warned):
        contenders = make_contenders(20)
        prepared = harness.prepare_task(loaded, tasks["long_text"](), "long_text", contenders, 3, 0, 1)
        prepared = dataclasses.replace(prepared, texts=texts(*places).tolist())
        said = measurement._other_sink(wrap_model(planted()), prepared, contenders)
        assert ("long_text: the strongest sink of these texts is" in said) == warned

    def test_of_a_window_past_the_trained_length(self, loaded):
        trained = loaded.model.config.max_position_embeddings
        assert measurement.window_warning(loaded, trained - 1) == ""
        said = measurement.window_warning(loaded, trained)
        assert f"take {trained + 1:,} positions, and the model was made for {trained:,}" in said
        assert measurement.default_window(loaded) == trained // 2


class TestRefusals:
    def test_a_model_whose_cache_cannot_be_moved(self):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=512, n_embd=32, n_layer=2, n_head=2)).eval()
        with pytest.raises(
            UnsupportedModelError, match=r"GPT2LMHeadModel adds positions to its .*, which this model cannot have"
        ):
            depend(wrap_model(model, tokenizer=make_tokenizer()), ["long_text"], **QUICK)

    def test_another_policy_is_left_out_with_the_reason(self, loaded, monkeypatch):
        def refuse(model, policy, **settings):
            if getattr(policy, "name", policy) == "full" and settings.get("chunk") and not refuse.allowed:
                raise UnsupportedModelError("not with\nthis one")
            return open_reader(model, policy, **settings)

        prepare, refuse.allowed = harness.prepare_task, True
        monkeypatch.setattr(lm_eval, "open_reader", refuse)

        def prepared(*arguments):
            made = prepare(*arguments)
            refuse.allowed = False
            return made

        monkeypatch.setattr(harness, "prepare_task", prepared)
        (found,) = depend(loaded, ["passkey:distances=[]"], **QUICK).summary["tasks"]
        assert {row["policy"]: row["refused"] for row in found["policies"]}["full"] == "not with this one"
        assert "full" not in found["curves"]

    def test_a_harness_that_is_not_installed(self, loaded, monkeypatch):
        for module in ("harness", "lm_eval", "measurement"):
            monkeypatch.delitem(sys.modules, f"sinklab.studies.depend.{module}", raising=False)
        monkeypatch.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(
            InputError, match=r"lm-evaluation-harness cannot be imported .* pip install 'sinklab\[evaluation\]'"
        ):
            depend(loaded, ["long_text"], **QUICK)

    def test_a_model_without_a_tokenizer(self):
        with pytest.raises(InputError, match="this model has no tokenizer"):
            depend(wrap_model(make_sinklm()), ["long_text"], **QUICK)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"tasks": []}, ConfigurationError, "name at least one task: sinklab list tasks"),
            ({"tasks": ["paskey"]}, UnknownNameError, "no task is called 'paskey'. Did you mean 'passkey'"),
            ({"tasks": ["passkey", "passkey"]}, ConfigurationError, "task 'passkey' is named twice"),
            ({"tasks": ["long_text:contexts=[0.5]"]}, ConfigurationError, r"task 'long_text' asks nothing .* window of 70: "),
            ({"items": 1}, ConfigurationError, "`items` 1 must be 2 or more"),
            ({"bos": "three"}, ConfigurationError, "`bos` 'three' must be auto, always or none"),
            ({"window": 2}, ConfigurationError, "`window` must be at least 3 tokens, a sink included, got 2"),
            ({"sinks": (0,)}, ConfigurationError, "`sinks` 0 must each be 1 or more"),
            ({"sinks": (69,)}, ConfigurationError, "`sinks` 69 must .* leave two tokens of the window of 70"),
        ],
    )
    def test_what_cannot_take_effect(self, loaded, options, error, message):
        with pytest.raises(error, match=message):
            depend(loaded, **{"tasks": ["passkey:distances=[]"], **QUICK, **options})


def test_contenders_hold_the_same_number_of_tokens():
    found = make_contenders(64, (4, 1))
    assert list(found.policies) == ["full", "0+64", "1+63", "4+60", "0+1"]
    assert (found.without, found.with_sinks, found.floor) == ("0+64", "4+60", "0+1")
    assert found.policies["4+60"].num_slots == found.policies["0+64"].num_slots == 65
