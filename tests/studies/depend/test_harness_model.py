"""lm-evaluation-harness through the cache: equal to its own model class when dense, changed by a policy that keeps nothing."""

from __future__ import annotations

import functools
import json
import random

import pytest
import torch
from tests.conftest import make_sinklm, make_tokenizer
from tests.studies.depend.induction import InductionReader

from sinklab.errors import ConfigurationError, InputError
from sinklab.models.loading import load_model, wrap_model
from sinklab.streaming.reader import CacheReader, open_reader

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed, so nothing here is tested: pip install 'sinklab[evaluation]'"
)

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from sinklab.studies.depend.depend import depend  # noqa: E402
from sinklab.studies.depend.lm_eval import Beginnings, PolicyLM  # noqa: E402

NOTHING = {"name": "window", "window": 1}


@pytest.fixture(scope="module")
def embedded():
    return load_model("embedded:softmax", device="cpu")


@pytest.fixture(scope="module")
def small():
    return wrap_model(make_sinklm(), tokenizer=make_tokenizer())


def write_task(folder, name, documents):
    """A multiple-choice task of the harness, of documents with ``context``, ``choices`` and ``label``."""
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / f"{name}.yaml").write_text(
        f"""
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/data.jsonl
  cache_dir: {folder}/cache
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""
    )


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """A multiple-choice task from local files: which of four names was defined above?"""
    folder = tmp_path_factory.mktemp("harness")
    generator = random.Random(0)
    documents = []
    for number in range(24):
        names = [f"name_{name}" for name in generator.sample(range(10, 100), 4)]
        label = generator.randrange(4)
        filler = "    x = x + 1\n" * (number % 12)
        documents.append(
            {"context": f"def {names[label]}(x):\n{filler}    return x\n\nresult =", "choices": names, "label": label}
        )
    write_task(folder, "defined_name", documents)
    return folder


def evaluate(lm, folder):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(lm, tasks=["defined_name"], task_manager=manager, bootstrap_iters=0)
    answers = [[answer[0][0] for answer in sample["resps"]] for sample in results["samples"]["defined_name"]]
    return results, torch.tensor(answers)


def test_dense_is_the_harness_and_nothing_held_is_not(embedded, task_folder):
    """float32 log-likelihoods around -20 in two orders of summation: 1e-4."""
    stock, expected = evaluate(HFLM(pretrained=embedded.model, tokenizer=embedded.tokenizer, batch_size=4), task_folder)
    dense, found = evaluate(PolicyLM(embedded, "full", batch_size=5), task_folder)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert dense["results"]["defined_name"]["acc,none"] == stock["results"]["defined_name"]["acc,none"] > 0.9

    nothing, changed = evaluate(PolicyLM(embedded, NOTHING), task_folder)
    assert nothing["results"]["defined_name"]["acc,none"] < 0.6  # of four, chance is 0.25
    assert (changed - found).abs().min() > 1e-3

    config = dense["config"]
    assert config["policy"] == {"name": "full", "positions": "original"}
    assert config["bos"] == {"token": "<|bos|>", "added_by_tokenizer": True, "texts_by_count": {"1": 96}}
    assert nothing["config"]["policy_text"] == "0+1"


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=number) for number, one in enumerate(arguments)]


def test_chunks_change_nothing(small):
    """Rows of different lengths under an evicting policy."""
    policy = {"name": "sink_window", "num_sinks": 2, "window": 6}
    pairs = [("def f(x):\n", " return x"), ("a", " b"), ("one two three four five six", " seven"), ("", "empty context")]
    asked = requests("loglikelihood", *pairs)
    one = PolicyLM(small, policy).loglikelihood(asked, disable_tqdm=True)
    many = PolicyLM(small, policy, chunk=3).loglikelihood(asked, disable_tqdm=True)
    for (left, left_greedy), (right, right_greedy) in zip(one, many, strict=True):
        assert left == pytest.approx(right, abs=1e-4)
        assert left_greedy == right_greedy


def test_score_is_the_sum_over_the_continuation(small):
    lm = PolicyLM(small, "full")
    ((found, greedy),) = lm.loglikelihood(requests("loglikelihood", ("def f(x):", " return")), disable_tqdm=True)
    context, text = lm.tok_encode("def f(x):"), lm.tok_encode("def f(x): return")
    logits = open_reader(small.model, "full").read(torch.tensor([text]))[0].log_softmax(-1)
    expected = sum(float(logits[column - 1, text[column]]) for column in range(len(context), len(text)))
    assert found == pytest.approx(expected, abs=1e-4)
    assert not greedy


def test_greedy_continuations_are_known_as_such(small):
    lm = PolicyLM(small, "full")
    ids = lm.tok_encode("def f(x):")
    likeliest = open_reader(small.model, "full").read(torch.tensor([ids]), keep=1).argmax().item()
    ((_, greedy),) = lm._loglikelihood_tokens([(None, ids, [likeliest])])
    assert greedy


def test_rolling_reads_a_text_in_one_stream_with_one_bos(small):
    """Longer than the model was made for (128), and not cut into windows."""
    lm = PolicyLM(small, {"name": "sink_window", "num_sinks": 1, "window": 50})
    text = "some words of a long text, " * 30
    found, nothing = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,), ("",)))
    assert nothing == 0.0
    ids = lm.tok_encode(text)
    assert len(ids) > 200
    logits = open_reader(small.model, lm.policy).read(torch.tensor([ids]))[0].log_softmax(-1)
    expected = float(logits[:-1].gather(-1, torch.tensor(ids[1:])[:, None]).sum())
    assert found == pytest.approx(expected, abs=1e-2)  # 200 terms
    assert lm.bos_record()["texts_by_count"] == {"1": 1}


def test_generates_what_the_model_would(small):
    lm = PolicyLM(small, "full", batch_size=2)
    settings = {"until": ["never in this text"], "max_gen_toks": 6}
    prompts = ["def f(x):", "a longer prompt than the first"]
    found = lm.generate_until(requests("generate_until", *((prompt, settings) for prompt in prompts)))
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.tensor([lm.tok_encode(prompt)])
        expected = small.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
        assert text == small.tokenizer.decode(expected, skip_special_tokens=True)


def test_stops_before_the_stop_text(small):
    lm = PolicyLM(small, "full")
    whole, settings = None, {"until": [], "max_gen_toks": 12}
    (whole,) = lm.generate_until(requests("generate_until", ("def f(x):", settings)))
    stop = whole[3:5]
    (cut,) = lm.generate_until(requests("generate_until", ("def f(x):", {**settings, "until": [stop]})))
    assert cut == whole[: whole.index(stop)]


def alone(model, policy, context, continuation):
    """The definition: a text from its beginning to its end."""
    logits = open_reader(model, policy).read(torch.tensor([[*context, *continuation[:-1]]]))[0, len(context) - 1 :].double()
    targets = torch.tensor(continuation)
    score = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    return float(score), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "full"}, {"name": "window", "window": 24}, {"name": "window", "window": 1},
        {"name": "sink_window", "num_sinks": 4, "window": 20}, {"name": "recompute", "window": 24},
    ],
)  # fmt: skip
def test_what_texts_share_is_read_once_and_scores_are_those_of_each_text_alone(small, policy, monkeypatch):
    """Against every text from its beginning to its end; sums of up to ten float32 logarithms agree to 1e-3."""
    monkeypatch.setattr("sinklab.studies.depend.lm_eval.HELD", 300)  # so that there are several groups
    generator = random.Random(0)
    beginnings = [[generator.randrange(2, 250) for _ in range(30)] for _ in range(3)]
    texts = []
    for beginning in beginnings:
        for length in (0, 5, 20):
            context = [*beginning, *(generator.randrange(2, 250) for _ in range(length))]
            choices = [[generator.randrange(2, 250) for _ in range(size)] for size in (1, 3, 10, 10)]  # several to the end
            texts += [(context, choice) for choice in (*choices, [*choices[1], 5])]
    texts += [([7], [8, 9]), (beginnings[0][:12], [9]), texts[0]]
    read, counted = CacheReader.read, []
    slow = [alone(small.model, policy, *text) for text in texts]
    monkeypatch.setattr(
        CacheReader,
        "read",
        lambda self, tokens, *rest, **named: (counted.append(tokens.numel()), read(self, tokens, *rest, **named))[1],
    )
    shared, totals = Beginnings(20), list[int]()
    for given in (None, shared, shared):  # the second time the beginnings are there
        counted.clear()
        monkeypatch.setattr("sinklab.models.losses.MANY_WORDS", 2 if given else 2**16)  # from hidden states, and from logits
        fast = PolicyLM(small, policy, beginnings=given)._answers(texts)
        assert [score for score, _ in fast] == pytest.approx([score for score, _ in slow], abs=1e-3)
        assert [greedy for _, greedy in fast] == [greedy for _, greedy in slow]
        if policy["name"] != "recompute":
            assert sum(counted) < sum(len(context) + len(choice) for context, choice in texts) / 1.5
        totals.append(sum(counted))
    if policy.get("window") != 1 and policy["name"] != "recompute":  # what sees all of the first tokens, pinned ones or none
        assert totals[0] - totals[2] >= 2 * 20


def test_bos_is_counted_and_not_doubled(small):
    lm = PolicyLM(small, "full")
    bos = small.tokenizer.bos_token
    lm.loglikelihood(requests("loglikelihood", ("a", " b"), (f"{bos}a", " b")), disable_tqdm=True)
    assert lm.bos_record() == {"token": bos, "added_by_tokenizer": True, "texts_by_count": {"1": 2}}
    lm._loglikelihood_tokens([(None, [0, 0, 5], [6]), (None, [5], [6])])
    assert lm.bos_record()["texts_by_count"] == {"0": 1, "1": 2, "2": 1}


def test_what_stands_in_front_is_what_was_asked_for(small):
    bos = small.tokenizer.bos_token_id
    for count in (0, 1, 2):
        lm = PolicyLM(small, "full", bos=count)
        lm.loglikelihood(requests("loglikelihood", ("a", " b"), (f"{small.tokenizer.bos_token}a", " b")), disable_tqdm=True)
        assert lm.bos_record()["texts_by_count"] == {str(count): 2}
        assert lm.fronted([bos, bos, bos, 5, bos]) == [bos] * count + [5, bos]
        assert lm.fronted([bos]) == ([bos] * count or [lm.prefix_token_id])
    assert PolicyLM(small, "full").fronted([5]) == [5]
    with pytest.raises(ConfigurationError, match="bos -1 must be 0 or more"):
        PolicyLM(small, "full", bos=-1)


def write_generation(folder, name, documents, limit, do_sample="false"):
    """A task of the harness that generates up to so many tokens behind each document."""
    write_task(folder, name, documents)
    made = (folder / f"{name}.yaml").read_text()
    head, _, tail = made.partition("output_type: multiple_choice\n")
    scored = tail[tail.index("metric_list") :].replace("metric: acc", "metric: exact_match")
    (folder / f"{name}.yaml").write_text(
        f"""{head}output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["never in this text"]
  max_gen_toks: {limit}
  do_sample: {do_sample}
{scored}"""
    )


class TestDepend:
    def test_verdict_of_a_task_of_ones_own(self, embedded, task_folder):
        result = depend(embedded, [f"lm_eval:{task_folder}:defined_name"], window=40, sinks=(4,), items=24)
        (outcome,) = result.summary["tasks"]
        assert outcome["task"] == "lm_eval:defined_name"
        assert outcome["chance"] == 0.25
        assert 2 <= outcome["items"] < outcome["documents"] == 24  # the short ones never fill the cache
        assert set(result.table["policy"]) == {"0+40", "4+36", "full", "0+1"}
        assert set(result.table["metric"]) - {"acc"} <= {
            f"{name}{end}" for name in ("acc", "sink_dependence") for end in ("", "_low", "_high")
        }
        assert result.record["tasks"][0]["bos"]["full"]["texts_by_count"] == {"1": 96}

    def test_with_other_tokens_in_front(self, small, task_folder):
        task = f"lm_eval:{task_folder}:defined_name"
        result = depend(small, [task], window=16, sinks=(4,), items=3, bos="none")
        assert set(result.table["bos"]) == {0}
        assert result.record["tasks"][0]["bos"]["4+12"]["texts_by_count"] == {"0": 12}
        assert result.summary["tasks"][0]["dependence"] == {"refused": "at chance: says nothing about sinks"}

    @pytest.mark.parametrize("needs_sink", [True, False])
    def test_a_planted_dependence(self, small, tmp_path, monkeypatch, needs_sink):
        """A reader that copies what followed the same words before, with its first token in sight or in any case."""
        generator = random.Random(1)
        documents = []
        for _ in range(8):
            names = [f"n{name}" for name in generator.sample(range(10, 100), 4)]
            filler = " ".join(str(generator.randrange(1000)) for _ in range(40))
            text = f"{filler}\nThe word is {names[0]}.\nThe word is"
            documents.append({"context": text, "choices": names, "label": 0})
        write_task(tmp_path, "copied_word", documents)
        reader = functools.partial(InductionReader, needs_sink=needs_sink)
        monkeypatch.setattr("sinklab.studies.depend.lm_eval.open_reader", reader)
        task = f"lm_eval:{tmp_path}:copied_word"
        outcome = depend(small, [task], window=60, sinks=(4,), items=8).summary["tasks"][0]
        scores = {row["policy"]: row["score"]["mean"] for row in outcome["policies"]}
        assert scores["4+56"] == 1.0
        if needs_sink:
            assert outcome["dependence"]["mean"] > 0.6
        else:
            assert outcome["dependence"] == {"mean": 0.0, "low": -3 / 8 / 0.75, "high": 3 / 8 / 0.75}

    def test_chance_counts_the_choices_and_not_how_often_they_are_read(self, small, task_folder, tmp_path):
        made = (task_folder / "defined_name.yaml").read_text().replace("task: defined_name", "task: mutual")
        (tmp_path / "mutual.yaml").write_text(made.replace("metadata", "  - metric: acc_mutual_info\nmetadata"))
        asked = {"window": 16, "sinks": (4,), "items": 3}
        with_mutual = depend(small, [f"lm_eval:{tmp_path}:mutual"], **asked)
        assert with_mutual.record["tasks"][0]["bos"]["0+16"]["texts_by_count"] == {"1": 3 * 8}  # four choices, each read twice
        assert with_mutual.summary["tasks"][0]["chance"] == 0.25

    def test_sampling_is_refused_before_anything_is_read(self, small, tmp_path, monkeypatch):
        documents = [{"context": "x = 1\n" * 9, "answer": "no"}] * 3
        write_generation(tmp_path, "drawn", documents, 2, do_sample="true")
        read = []
        monkeypatch.setattr("sinklab.studies.depend.harness._evaluate", lambda *arguments: read.append(arguments))
        with pytest.raises(ConfigurationError, match="PolicyLM decodes greedily; this task asks for"):
            depend(small, [f"lm_eval:{tmp_path}:drawn"], window=16, sinks=(4,), items=3)
        assert not read

    def test_texts_that_cannot_be_had(self, embedded, task_folder, tmp_path):
        task = (task_folder / "defined_name.yaml").read_text().replace("dataset_path: json", "dataset_path: nobody/nothing")
        (tmp_path / "absent.yaml").write_text(task.replace("task: defined_name", "task: absent"))
        with pytest.raises(InputError, match=r"task 'absent' of \S+ cannot be loaded: .*nobody/nothing.*; it needs its texts"):
            depend(embedded, [f"lm_eval:{tmp_path}:absent"], window=40)

    def test_refusals(self, embedded, task_folder):
        with pytest.raises(
            InputError, match=r"lm-evaluation-harness \S+ has no task 'no_such_task' in \S+; list its tasks with"
        ):
            depend(embedded, [f"lm_eval:{task_folder}:no_such_task"], window=40)
        with pytest.raises(
            ConfigurationError, match=r"0 of 24 documents are longer than the window of 200 tokens, the longest"
        ):
            depend(embedded, [f"lm_eval:{task_folder}:defined_name"], window=200)
        with pytest.raises(ConfigurationError, match=r"PolicyLM decodes greedily; this task asks for \{'do_sample': True\}"):
            PolicyLM(embedded, "full").generate_until(requests("generate_until", ("a", {"do_sample": True})))
        with pytest.raises(InputError, match="are texts and this model has no tokenizer"):
            PolicyLM(make_sinklm(), "full")
        with pytest.raises(InputError, match=r"the continuation of \('a', ''\) has no token of its own"):
            PolicyLM(embedded, "full").loglikelihood(requests("loglikelihood", ("a", "")), disable_tqdm=True)
        with pytest.raises(ConfigurationError, match="batch_size 0 must be 1 or more"):
            PolicyLM(embedded, "full", batch_size=0)
