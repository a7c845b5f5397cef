"""depend(): scores against the model itself, verdicts on a reader of known behaviour, what is written, what is refused."""

from __future__ import annotations

import functools
import json
import random
import re
import sys

import numpy as np
import pytest
import torch
from tests.conftest import make_sinklm, make_tokenizer
from tests.studies.depend.induction import InductionReader
from tests.test_sinks import planted, texts
from transformers import GPT2Config, GPT2LMHeadModel

from sinklab.errors import ConfigurationError, InputError, MeasurementError, UnknownNameError, UnsupportedModelError
from sinklab.models.loading import wrap_model
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.registry import policies, tasks
from sinklab.results.table import read_run, read_table
from sinklab.sinks import Sinks
from sinklab.streaming.reader import open_reader
from sinklab.studies.depend import runner
from sinklab.studies.depend.contenders import make_contenders, parse_policy
from sinklab.studies.depend.depend import depend
from sinklab.studies.depend.measurement import default_window, sink_warning, window_warning
from sinklab.studies.depend.plot import write_plots
from sinklab.studies.depend.score import score_sheet
from sinklab.tasks.base import Question, Sheet

QUICK = {"policies": ["full"], "window": 60, "sinks": (4,), "items": 4}


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(make_sinklm(), tokenizer=make_tokenizer())


@pytest.fixture
def induction(monkeypatch):
    """Every policy is read by the constructed reader; call with needs_sink."""

    def use(**options):
        monkeypatch.setattr("sinklab.studies.depend.runner.open_reader", functools.partial(InductionReader, **options))

    return use


class TestScores:
    def test_are_those_of_one_forward_of_the_whole_text(self, loaded):
        """Under the full policy; float32 logits of about 1 in two orders of summation agree to 1e-4."""
        (sheet,) = tasks["question_stream"](length=2).sheets(loaded.encoder, budget=60, rows=3, seed=0, bos=True)
        logits = loaded.model(sheet.tokens).logits.detach().log_softmax(-1)
        scores = score_sheet(open_reader(loaded.model, "full"), sheet)
        assert len(scores) == len(sheet.questions) > 1
        for found, question in zip(scores, sheet.questions, strict=True):
            right = torch.zeros(3)
            hits, exact = torch.zeros(3), torch.ones(3)
            for column in range(question.start, question.stop):
                for row in range(3):
                    answer = sheet.tokens[row, column]
                    at = logits[row, column - 1]
                    right[row] += at[answer]
                    hits[row] += at[answer] >= at[question.alphabet].max()
                    exact[row] *= at.argmax() == answer
            count = question.stop - question.start
            assert torch.allclose(found.values["log_likelihood"].float(), right / count, atol=1e-4)
            assert torch.equal(found.values["choice"].float(), hits / count)
            assert torch.equal(found.values["exact_match"].float(), exact)

    def test_margin_by_hand(self, loaded):
        """The right symbol less the mean of the two others."""
        sheet = Sheet(torch.tensor([[0, 5, 9]]), (Question(2, 3, 0, torch.tensor([9, 7, 8])),), 0)
        (found,) = score_sheet(open_reader(loaded.model, "full"), sheet)
        at = loaded.model(sheet.tokens).logits[0, 1].detach()
        assert float(found.values["margin"]) == pytest.approx(float(at[9] - (at[7] + at[8]) / 2), abs=1e-4)

    def test_logits_that_are_not_numbers(self, loaded):
        class Broken(InductionReader):
            def _logits(self, row):
                return torch.full((300,), torch.nan)

        sheet = Sheet(torch.tensor([[0, 5, 9]]), (Question(2, 3),), 0)
        with pytest.raises(MeasurementError, match=r"SinkLM under 4\+60 gives logits that are not numbers at columns 1 to 1"):
            score_sheet(Broken(loaded.model, parse_policy("4+60", 64)), sheet)


def test_a_window_beyond_the_training_is_warned_of(loaded, capsys):
    """As soon as a full cache and the token at hand have a position that the model has never seen, and not before."""
    trained = loaded.model.config.max_position_embeddings
    options = {**QUICK, "policies": [], "items": 2}
    inside = depend(loaded, ["long_text:contexts=[1.2],scored=4"], **{**options, "window": trained - 1})
    assert inside.summary["warnings"] == []
    result = depend(loaded, ["long_text:contexts=[1.2],scored=4"], **{**options, "window": trained})
    (warning,) = result.summary["warnings"]
    assert warning.startswith(
        f"A window of {trained} tokens and the token at hand take {trained + 1} positions, and the model was made for {trained}"
    )
    assert warning.endswith(f"Take a `window` below {trained}.")
    capsys.readouterr()
    result.show()
    assert f"warning: {warning}" in " ".join(capsys.readouterr().out.split())
    loaded.model.config.max_position_embeddings = None
    try:
        assert window_warning(loaded, 10**6) == ""
    finally:
        loaded.model.config.max_position_embeddings = trained


@pytest.mark.parametrize(
    ("places", "sinks", "sink"),
    [
        ([2, 2, 2, 2], 4, None),
        ([2, 2, 2, 2], 1, "position 2"),
        ([9, 5, 13, 7], 4, "the first “7”"),
        (None, 4, None),
    ],
)
def test_a_sink_beyond_the_first_tokens_that_are_compared_is_named(places, sinks, sink):
    """Verdict and index would be read as being about it."""
    model = planted(loud=40.0 if places else 0.0)
    said = sink_warning(wrap_model(model), "long_text", texts(*(places or [3, 4, 5])), make_contenders(20, (sinks,)))
    if sink is None:
        assert said == ""
    else:
        assert said.startswith(f"long_text: the strongest sink of these texts is {sink}, and what is compared are the first ")
        assert f"the first {sinks} token{'' if sinks == 1 else 's'}: verdict and index say nothing of that sink" in said


def test_that_sink_is_named_beside_the_verdict(loaded, monkeypatch, capsys):
    monkeypatch.setattr("sinklab.studies.depend.measurement.sinks_of_texts", lambda *inputs: Sinks.at(9))
    result = depend(loaded, ["long_text:contexts=[1.2],scored=4"], **{**QUICK, "policies": [], "items": 2})
    (warning,) = (one for one in result.summary["warnings"] if "sink" in one)
    assert warning.startswith("long_text: the strongest sink of these texts is position 9, and")
    result.show()
    assert f"warning: {warning}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("window", "expected"), [(None, 64), (20, 19), (100, 64)])
def test_the_usual_window_is_no_larger_than_what_the_narrowest_layer_sees(window, expected):
    """Trained on 128 positions; of the tokens that a layer sees one is the query's own."""
    assert default_window(wrap_model(make_sinklm(window=window))) == expected


def test_tokens_that_are_predicted_worse_than_by_a_guess_are_warned_of():
    """Logits of random weights, a hundred times as large, are sure of what is not there; a choice has a chance of its own."""
    sure = make_sinklm()
    with torch.no_grad():
        sure.lm_head.weight *= 100
    sure = wrap_model(sure, tokenizer=make_tokenizer())
    result = depend(sure, ["long_text:contexts=[1.3],scored=8", "question_stream"], **{**QUICK, "policies": []})
    (warning,) = result.summary["warnings"]
    best = max(row["score"]["mean"] for row in result.summary["tasks"][0]["policies"])
    assert warning.startswith(f"A loss of {-best:.3f} nats on long_text is above that of a guess among all ")


@pytest.mark.parametrize("task", ["long_text", "false_sinks"])
def test_texts_that_are_scored_on_the_same_tokens_are_warned_of(loaded, tmp_path, task):
    """One passage again and again is no sample of texts: told of a short corpus and of none that is long enough."""
    words = random.Random(0)
    long = "\n".join("".join(words.choices("abcdefghij", k=4)) for _ in range(5_000))
    for name, text in (("short", long[:600]), ("long", long)):
        (tmp_path / f"{name}.txt").write_text(text)
    options = {**QUICK, "policies": [], "items": 24}
    settings = "contexts=[1.3],scored=8"
    short, long = (depend(loaded, [f"{task}:corpus={tmp_path / name}.txt,{settings}"], **options) for name in ("short", "long"))
    assert long.summary["warnings"] == []
    (warning,) = short.summary["warnings"]
    found = re.fullmatch(
        rf"{task}: (\d+) of 24 texts are scored on tokens that another one is scored on, too \(and the 15 before are alike\)\. "
        r"Intervals take texts for independent, and are too narrow here: take fewer `items` or a longer `corpus`\.",
        warning,
    )
    assert found
    assert 3 <= int(found[1]) <= 23


class TestVerdicts:
    def test_retrieval_that_needs_no_sink(self, loaded, induction):
        """All facts within the window are found under both caches; nothing behind it: the cliff, at the very token."""
        induction()
        task = tasks["needle"](distances=(0.5, 0.92, 1.05, 1.5), length=2)
        result = depend(loaded, [task], policies=["full"], window=180, sinks=(4,), items=24)
        (outcome,) = result.summary["tasks"]
        assert outcome["verdict"] == "undecided"  # 24 items without an exception leave 3/24 on either side
        assert outcome["difference"]["mean"] == 0.0
        lengths = {row["policy"]: row["effective_length"] for row in outcome["policies"]}
        assert lengths == {"0+180": 166, "4+176": 166, "full": 270, "0+1": 0}
        beyond = {name: [point["mean"] for point in curve if point["at"] > 180] for name, curve in outcome["curves"].items()}
        assert max(beyond["4+176"]) < 0.3
        assert min(beyond["full"]) == 1.0

    def test_enough_items_decide(self, loaded, induction):
        induction()
        task = tasks["needle"](distances=(), length=1.5)
        outcome = depend(loaded, [task], policies=[], window=120, sinks=(4,), items=64).summary["tasks"][0]
        assert outcome["verdict"] == "no"
        assert outcome["difference"] == {"mean": 0.0, "low": -3 / 64, "high": 3 / 64}
        assert outcome["sentence"].endswith(". A cost in fewer than one item in 21 may not show in these 64.")

    def test_retrieval_that_needs_the_sink(self, loaded, induction):
        induction(needs_sink=True)
        task = tasks["needle"](distances=(), length=1.5)
        outcome = depend(loaded, [task], policies=["full", "1+119"], window=120, sinks=(4,), items=16).summary["tasks"][0]
        assert outcome["verdict"] == "yes"
        assert outcome["sentence"].startswith("needle depends on the sink tokens: yes. 4+116 less 0+120: +0.")
        assert "may not show" not in outcome["sentence"]
        found = {row["policy"]: row["score"]["mean"] for row in outcome["policies"]}
        assert found["4+116"] == found["1+119"] == found["full"] == 1.0
        assert found["0+120"] < 0.3

    def test_an_untrained_model_is_at_chance(self, loaded):
        outcome = depend(loaded, ["passkey"], **{**QUICK, "window": 100}).summary["tasks"][0]
        assert outcome["verdict"] == "undecided"
        assert "not shown to be above chance" in outcome["reason"]
        assert {row["effective_length"] for row in outcome["policies"]} == {None}

    def test_lookup_counts_only_what_both_hold(self, loaded, induction):
        """A fact between the windows of the two caches is no evidence about sinks."""
        induction()
        task = tasks["line_lookup"](shares=(0.7,), back=(30,), questions=1, every=3)
        outcome = depend(loaded, [task], policies=[], window=150, sinks=(4,), items=4).summary["tasks"][0]
        found = {row["policy"]: row["score"]["mean"] for row in outcome["policies"]}
        assert found["0+150"] == found["4+146"] == 1.0
        assert outcome["questions"] == 1


@pytest.fixture(scope="module")
def result(loaded, tmp_path_factory):
    out = tmp_path_factory.mktemp("depend") / "out"
    return depend(loaded, ["long_text:scored=8", "question_stream"], **QUICK, out=out)


class TestResult:
    def test_writes_what_it_returns(self, result):
        assert read_run(result.folder, "summary.json") == json.loads(json.dumps(result.summary))
        assert read_table(result.folder / "table.parquet").equals(result.table)
        names = {path.name for path in result.folder.iterdir()}
        assert names == {"table.parquet", "summary.json", "run.json", "long_text.png", "question_stream.png"}

    def test_record(self, result):
        run = read_run(result.folder)
        assert run["policies"]["4+56"] == {"name": "sink_window", "positions": "in_cache", "num_sinks": 4, "window": 56}
        assert [task["name"] for task in run["tasks"]] == ["long_text", "question_stream"]
        assert run["tasks"][0]["scored"] == 8
        assert len(run["tasks"][0]["token_sha256"]) == 7
        assert run["tasks"][0]["identity"]["licence"]

    def test_table_has_the_policy_and_the_place(self, result):
        rows = result.table
        assert set(rows["policy"]) == {"0+60", "4+56", "full", "0+1"}
        assert set(rows["corpus"]) == {"long_text", "question_stream"}
        scores = rows[~rows["metric"].str.startswith("sink_dependence")]
        assert set(scores.loc[scores["corpus"] == "long_text", "metric"]) == {"log_likelihood"}
        asked = rows[(rows["corpus"] == "question_stream") & (rows["metric"] == "choice")]
        assert (asked["key_position"] < asked["query_position"]).all()
        assert set(rows["count"]) == {4}

    def test_summary_means_are_those_of_the_table(self, result):
        """Over the two contexts that fill the cache."""
        rows = result.table
        rows = rows[(rows["corpus"] == "long_text") & (rows["policy"] == "4+56") & (rows["query_position"] >= 61)]
        outcome = result.summary["tasks"][0]
        (shown,) = (row for row in outcome["policies"] if row["policy"] == "4+56")
        assert shown["score"]["mean"] == pytest.approx(float(np.mean(rows["value"])))

    def test_same_seed_same_numbers(self, loaded, result):
        again = depend(loaded, ["long_text:scored=8", "question_stream"], **QUICK)
        assert again.table.drop(columns="run_id").equals(result.table.drop(columns="run_id"))


class TestRefusals:
    def test_a_policy_that_cannot_run_on_the_model_ends_it_if_the_verdict_needs_it(self):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=512, n_embd=32, n_layer=2, n_head=2)).eval()
        gpt2 = wrap_model(model, tokenizer=make_tokenizer())
        for more in (["full"], ["recompute"]):  # the two that are compared hold a window whatever else does not
            with pytest.raises(
                UnsupportedModelError, match=r"GPT2LMHeadModel adds positions to its .*, which this model cannot have"
            ) as refused:
                depend(gpt2, ["long_text"], **(QUICK | {"policies": more}))
            assert "recompute" not in str(refused.value)

    def test_another_policy_is_left_out_with_the_reason(self, loaded, monkeypatch):
        def refuse(model, policy, **settings):
            if policy.name == "full":
                raise UnsupportedModelError("not with\nthis one")
            return open_reader(model, policy, **settings)

        monkeypatch.setattr(runner, "open_reader", refuse)
        outcome = depend(loaded, ["question_stream"], **QUICK).summary["tasks"][0]
        assert {"policy": "full", "refused": "not with this one"} in outcome["policies"]
        assert "full" not in outcome["curves"]

    def test_a_harness_that_is_not_installed(self, loaded, monkeypatch):
        for module in ("sinklab.studies.depend.harness", "sinklab.studies.depend.lm_eval"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(
            InputError, match=r"lm-evaluation-harness cannot be imported .* pip install 'sinklab\[evaluation\]'"
        ):
            depend(loaded, ["lm_eval:arc_easy"], **QUICK)

    def test_a_corpus_is_that_of_the_tasks_that_name_none(self, loaded, tmp_path):
        book = tmp_path / "my, book.txt"
        book.write_text(" ".join(f"line {number} of the book" for number in range(4000)))
        named = ["long_text", "false_sinks:corpus=python_source", "question_stream"]
        result = depend(loaded, named, corpus=str(book), **QUICK)
        given = [tasks.make(task) for task in result.record["config"]["tasks"]]
        assert [getattr(task, "corpus", None) for task in given] == [str(book), "python_source", None]
        (own,) = depend(loaded, [tasks["long_text"](corpus=str(book))], **QUICK).summary["tasks"]
        assert result.summary["tasks"][0] == own

    def test_texts_that_tell_nothing_apart(self, loaded):
        with pytest.raises(ConfigurationError, match=r"task 'long_text' asks nothing .* window of 60: .* longer texts"):
            depend(loaded, ["long_text:contexts=[0.5]"], **QUICK)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"tasks": []}, ConfigurationError, "name at least one task: sinklab list tasks"),
            ({"tasks": ["nedle"]}, UnknownNameError, "no task is called 'nedle'"),
            ({"tasks": ["needle:depth=3"]}, ConfigurationError, "task 'needle' has no setting 'depth'"),
            ({"tasks": ["needle:3"]}, ConfigurationError, r"'needle:3' cannot be read; write name or name:setting=value"),
            (
                {"tasks": ["passkey"], "corpus": "bigrams"},
                ConfigurationError,
                "none of the tasks that are named reads a corpus",
            ),
            ({"items": 1}, ConfigurationError, "`items` 1 must be 2 or more"),
            ({"sinks": (0,)}, ConfigurationError, "`sinks` 0 must each be 1 or more"),
            (
                {"sinks": (59,)},
                ConfigurationError,
                "`sinks` 59 must each be 1 or more and leave two tokens of the window of 60",
            ),
            ({"policies": ["ful"]}, UnknownNameError, "no policy is called 'ful'. Did you mean 'full'"),
            ({"policies": ["4-20"]}, ConfigurationError, r"'4-20' cannot be read; write a policy: full, 4\+1020"),
        ],
    )
    def test_what_cannot_take_effect(self, loaded, options, error, message):
        with pytest.raises(error, match=message):
            depend(loaded, **{"tasks": ["question_stream"], **QUICK, **options})


def test_contenders_hold_the_same_number_of_tokens():
    found = make_contenders(64, (1, 4), [])
    assert list(found.policies) == ["0+64", "4+60", "0+1"]
    assert found.policies[found.with_sinks].num_slots == found.policies[found.without].num_slots == 65


def test_usual_contenders():
    names = list(make_contenders(64).policies)
    assert names[:4] == ["full", "0+64", "1+63", "4+60"]
    assert names[-1] == "0+1"
    assert len(names) == 6


def test_policies_are_read_as_they_are_written():
    assert parse_policy("0+20", 64) == policies["window"](window=20)
    assert parse_policy(" 8+20 ", 64) == policies["sink_window"](num_sinks=8, window=20)
    written = parse_policy("sink_window:num_sinks=2, window=9, positions=original", 64)
    assert written == policies["sink_window"](num_sinks=2, window=9, positions="original")


@pytest.mark.parametrize("spec", ["recompute", "strided", "pinned", "sink_window:num_sinks=8", "recompute:every=4"])
@pytest.mark.parametrize("budget", [20, 65])
def test_a_policy_whose_size_is_left_open_holds_what_the_two_that_are_judged_do(spec, budget):
    assert parse_policy(spec, budget, (1, 4)).max_held(1 << 31) == budget + 1


@pytest.mark.slow
def test_the_embedded_model_has_a_cliff_at_its_cache_size():
    """embedded:softmax copies digits out of its window and guesses behind it, whatever the sinks."""
    outcome = depend(
        "embedded:softmax", ["needle:distances=[0.9, 1.5]"], policies=["full"], window=120, sinks=(4,), items=24
    ).summary["tasks"][0]
    for policy in ("0+120", "4+116"):
        within, behind = outcome["curves"][policy][-2:]
        assert within["at"] == 108
        assert within["low"] > 0.5
        assert behind["high"] < 0.25


def test_policies_that_are_called_alike_are_refused():
    """One would vanish behind the other, as two head maps that cut as many heads to the same windows."""
    alike = ["pinned:pinned=[0,1,2,3,10],window=55", "pinned:pinned=[0,1,2,3,20],window=55"]
    said = r"two policies are both called '\{5 tokens\}\+55'.*\(0, 1, 2, 3, 10\).* and .*\(0, 1, 2, 3, 20\)"
    with pytest.raises(ConfigurationError, match=said):
        make_contenders(64, (1,), alike)
    assert "{5 tokens}+55" in make_contenders(64, (1,), [alike[0], alike[0]]).policies


@pytest.mark.parametrize(
    "written",
    [
        "sink_window:num_sinks=0,window=64",
        "sink_window:num_sinks=0,window=64,positions=original",
        "window:window=64,positions=original",
        "0+64",
    ],
)
def test_a_window_without_sinks_is_one_policy_however_it_is_written(written):
    """It is the one that is always compared, and may be named as a baseline."""
    named = make_contenders(64, (1,), [written, "sink_window:num_sinks=0,window=32"])
    assert named.policies == {
        "0+64": Window(window=64),
        "1+63": SinkWindow(num_sinks=1, window=63),
        "0+32": Window(window=32),
        "0+1": Window(window=1),
    }


def test_every_picture_has_a_name_of_its_own_that_files_can_have(tmp_path):
    """Tasks of one name are told apart by settings, which may be long paths, and paths that differ in what no name has."""
    point = {"at": 4, "mean": 0.5, "low": 0.4, "high": 0.6}
    same = {"metric": "choice", "unit": "fraction", "axis": "context", "verdict": "no", "chance": 0.5, "window": 8}
    long = "/".join(["", *("ö" * 90 for _ in range(3)), "a.txt"])
    named = ["needle", f"long_text:corpus={long}", "long_text:corpus=x y", "long_text:corpus=x-y", "long_text:corpus=z"]
    write_plots([{**same, "task": task, "curves": {"full": [point]}} for task in named], tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == len(named)
    assert {"needle.png", "long_text-corpus=z.png"} < set(names)
    twins = [name for name in names if name.startswith("long_text-corpus=x-y-")]
    assert [len(name) for name in twins] == [len("long_text-corpus=x-y-01234567.png")] * 2
    assert max(len(name.encode()) for name in names) <= 120 + len("-01234567.png")
