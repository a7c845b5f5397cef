"""reproduce: claims on trainings and on checkpoints, how models are judged, what is kept, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.claims.made_results import numbers_of
from tests.command_line import CliRunner
from tests.test_real_models import real
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from sinklab.attention.session import attend
from sinklab.cli.app import app
from sinklab.corpora import resolve_corpus
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError
from sinklab.interventions.zero_value import ZeroValue
from sinklab.models.loading import load_model
from sinklab.results.blocks import markdown
from sinklab.results.metric import Metric
from sinklab.results.table import read_run, read_table
from sinklab.results.version import __version__
from sinklab.training.rows import token_losses
from sinklab_claims.contract.claim import Claim, Part, Variant
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.numbers.attention import attention_numbers
from sinklab_claims.numbers.norms import norms
from sinklab_claims.reproduce import on_checkpoints, on_trainings, store
from sinklab_claims.reproduce.on_checkpoints import reproduce_on
from sinklab_claims.reproduce.on_trainings import reproduce
from sinklab_claims.reproduce.show import show_results
from sinklab_claims.reproduce.store import claim_called, measurement, reading, version_of
from sinklab_claims.verdict.records import read_results, summary_of
from sinklab_claims.verdict.rule import judge_model, judge_models, judge_part
from sinklab_claims.xiao2023 import SILENT, freed_weight

CALLS: list[int] = []


HALF = 4.302652729911275 / 3**0.5
"""Half of the interval of 10, 11 and 12: t(0.975, 2) times their standard error."""


def measure(seed: int, scale: str) -> dict[str, dict[str, float]]:
    """Numbers of the made-up claim; one of them is not finite."""
    CALLS.append(seed)
    return {"more": {"sink_rate": 10.0 + 2 * seed, "lost": float("nan")}, "less": {"sink_rate": float(seed)}}


def made_up(**changes: Any) -> Claim:
    fields: dict[str, Any] = {
        "statement": "More is more than less.",
        "source": "nobody2026",
        "reference": "Nobody 2026 (arXiv 2601.00000), table 1",
        "published": "10 and 0.",
        "parts": (Part("it is more", Difference("sink_rate", "more", "less"), more_than=5.0),),
        "measure": measure,
        "costs": {"tiny": "seconds"},
        "evidence": {"tiny": "Nothing was trained."},
    }
    return Claim(**(fields | changes))


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> dict[str, Claim]:
    """Claims by name, in place of the registered ones; measured in this process."""
    known = {"made_up": made_up()}
    monkeypatch.setattr(store, "claim_called", lambda name: known[name])
    monkeypatch.setattr(on_trainings, "claim_called", lambda name: known[name])

    def here(tasks: Any, **_: Any) -> dict[str, str]:
        for task in tasks:
            if task.cached() is None:
                task.take()
        return {}

    monkeypatch.setattr(on_trainings, "run_missing", here)
    CALLS.clear()
    return known


def test_a_claim_is_measured_judged_and_written_down(claims: dict[str, Claim], tmp_path: Path) -> None:
    (found,) = reproduce(["made_up"], out=tmp_path, progress=False)
    assert found.summary["verdict"] == "reproduced"
    assert numbers_of(found.table)[2] == {"more": {"sink_rate": 14.0}, "less": {"sink_rate": 2.0}}
    assert found.summary["errors"] == []
    record = read_run(tmp_path / "tiny" / "made_up")
    assert record["kind"] == "claim"
    assert (record["verdict"], record["seeds"], record["cost"]) == ("reproduced", [0, 1, 2], "seconds")
    assert record["parts"][0]["interval"] == pytest.approx([11.0 - HALF, 11.0 + HALF])
    assert record["evidence"] == "Nothing was trained."
    assert record["environment"]["versions"]["sinklab"]
    table = read_table(tmp_path / "tiny" / "made_up" / "table.parquet")
    assert sorted(zip(table["model"], table["seed"], table["value"], strict=True)) == sorted(
        (label, seed, base + rise * seed) for seed in range(3) for label, base, rise in (("more", 10.0, 2), ("less", 0.0, 1))
    )
    assert set(table["unit"]) == {"percent"}
    assert set(table["probe"]) == {"claim"}


def test_a_result_is_not_replaced_by_one_of_fewer_seeds(claims: dict[str, Claim], tmp_path: Path) -> None:
    reproduce(["made_up"], seeds=[0, 1, 2, 3], out=tmp_path, progress=False)
    before = read_run(tmp_path / "tiny" / "made_up")
    with pytest.raises(InputError, match="made_up holds a result with `seeds` 2, 3, which would be lost: ask for them too"):
        reproduce(["made_up"], seeds=[1, 0, 4], out=tmp_path, progress=False)
    assert CALLS == [0, 1, 2, 3]
    assert read_run(tmp_path / "tiny" / "made_up") == before
    (found,) = reproduce(["made_up"], seeds=[3, 2, 1, 0], out=tmp_path, progress=False)
    assert found.record["seeds"] == [3, 2, 1, 0]
    (tmp_path / "tiny" / "made_up" / "run.json").write_text("{")  # of which nothing can be lost
    reproduce(["made_up"], seeds=[0], out=tmp_path, progress=False)


def test_an_interruption_says_where_what_was_measured_is_kept(claims: dict[str, Claim], tmp_path, monkeypatch) -> None:
    measured, some = on_trainings.run_missing, [0]
    kept = f"what was trained and measured is kept in {tmp_path}: the same command goes on from there"

    def stops(tasks: Any, **options: Any) -> dict[str, str]:
        measured(tasks[: some[0]], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(on_trainings, "run_missing", stops)
    for some[0], notes in ((0, []), (1, [kept])):
        with pytest.raises(KeyboardInterrupt) as caught:
            reproduce(["made_up"], out=tmp_path, progress=False)
        assert getattr(caught.value, "__notes__", []) == notes
    monkeypatch.setattr(on_trainings, "run_missing", measured)
    monkeypatch.setattr(on_trainings, "write_table", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left") as full:
        reproduce(["made_up"], out=tmp_path, progress=False)
    assert full.value.__notes__ == [kept]


def test_the_result_on_the_base_of_the_source_is_that_of_the_claim(claims: dict[str, Claim], tmp_path, monkeypatch) -> None:
    variants, given = (Variant("baseline"),), {"seeds": [0], "out": tmp_path, "progress": False}
    part = Part("it is learned", Value("held_out_loss", "baseline"), less_than=2.0)
    claims["both"] = made_up(measure=None, evidence={}, variants=variants, parts=(part,), bases=("no-bos", "bos"))
    monkeypatch.setattr(on_trainings, "train_cells", lambda *_, **__: {})
    (own,) = reproduce(["both"], **given)
    (other,) = reproduce(["both"], base="bos", **given)
    assert (own.folder, own.record["base"]) == (tmp_path / "tiny" / "both", "no-bos")
    assert (other.folder, other.record["base"]) == (tmp_path / "tiny-bos" / "both", "bos")
    assert own.record["config"]["data"]["bos"] == "none"
    assert other.record["config"]["data"]["bos"] == "rows"
    cells = [result.record["conditions"]["baseline"]["cells"]["0"] for result in (own, other)]
    assert cells[0] != cells[1]
    # Which of the two is newer is a matter of the second in which each was written.
    assert sorted(kept.record.base for kept in read_results(tmp_path)) == ["bos", "no-bos"]
    (measured,) = reproduce(["made_up"], **given)
    assert measured.record["base"] is None
    with pytest.raises(ConfigurationError, match="'made_up' is run on bos, and `base` is 'no-bos'"):
        reproduce(["made_up"], base="no-bos", **given)


def test_what_another_version_has_measured_is_measured_again(claims: dict[str, Claim], tmp_path: Path) -> None:
    reproduce(["made_up"], seeds=[0], out=tmp_path, progress=False)
    (path,) = (tmp_path / "measured" / "tiny").iterdir()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "sources": "0.0.1"}))
    assert measurement(tmp_path, "made_up", 0, "tiny").cached() is None
    reproduce(["made_up"], seeds=[0], out=tmp_path, progress=False)
    assert CALLS == [0, 0]
    assert json.loads(path.read_text())["sources"] == kept["sources"]


def test_numbers_belong_to_the_version_and_to_definitions_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = (Metric("old", "nats", "One."), Metric("new", "nats", "Two.", version=3))
    monkeypatch.setattr(measure, "metrics", metrics, raising=False)
    assert version_of([measure]) == f"{__version__} new=3"


def test_a_scale_without_a_cost_is_not_tested(claims: dict[str, Claim], tmp_path: Path) -> None:
    (found,) = reproduce(["made_up"], scale="small", out=tmp_path, progress=False)
    assert found.summary["verdict"] == "not tested at this scale"
    assert found.summary["reason"] == "the claim can be run at tiny only"
    assert found.folder is None
    assert CALLS == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": []}, "reproduce: 0 claims"),
        ({"names": ["made_up"], "seeds": [1, 1]}, r"seeds \[1, 1\]; expected one or more, and no seed twice"),
        ({"names": ["made_up"], "scale": "huge"}, "there is no scale 'huge'; scales: tiny, small, medium"),
        ({"names": ["made_up"], "jobs": 0}, "`jobs` must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_run_is_refused(
    claims: dict[str, Claim], tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        reproduce(**arguments, out=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ()}, "has no parts"),
        ({"reference": "somebody said so"}, "names no 'arXiv NNNN.NNNNN'"),
        ({"measure": None}, "has no variants, no measure and no checkpoint"),
        ({"costs": {}}, "has no costs"),
        ({"bases": ("bos", "bos")}, "bases are bos, bos; expected one or more of bos, no-bos, each once"),
        ({"bases": ("no-bos", "bos")}, "measures by itself, which no base decides, and names several bases"),
    ],
)
def test_claims_that_say_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made_up(**changes)


def test_only_finished_models_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "cell"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "stopped"}))
    assert reading(folder, "sinks") is reading(tmp_path / "runs" / "nobody", "sinks") is None


SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
FAST = "repeated_token_laws"
RISES = Part("it rises", Value("loss", "a"), more_than=1.0)
SINKS = Part("there is a sink", Value("sink_rate", "a"), more_than=5.0)


@pytest.fixture
def here(monkeypatch):
    """Measure in this process; what was asked for and not yet kept is added to the list."""
    taken: list[tuple[str, str, int]] = []

    def run(tasks, **_):
        for task in tasks:
            if task.cached() is None:
                taken.append((task.model, task.name, task.seed))
                task.take(Checkpoint(load_model(task.model), resolve_corpus(task.corpus), task.seed))
        return {}

    monkeypatch.setattr(on_checkpoints, "run_missing", run)
    return taken


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n".join(f"def line_{number}():\n    return {number}  # of a text" for number in range(400)))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tokenizer) -> Path:
    """A random Llama with rotary positions and grouped queries, and the tokenizer of the tests."""
    folder = tmp_path_factory.mktemp("llama") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(**SIZE, num_key_value_heads=1, vocab_size=300, max_position_embeddings=128, initializer_range=0.5)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vit") / "vit"
    ViTModel(ViTConfig(**SIZE, image_size=8, patch_size=4)).save_pretrained(folder)
    return folder


# --- the verdict --------------------------------------------------------------------------------------------------------------


def draws(**values) -> dict:
    length = len(next(iter(values.values())))
    return {seed: {"a": {name: series[seed] for name, series in values.items()}} for seed in range(length)}


@pytest.mark.parametrize(
    ("rates", "losses", "verdict", "reason"),
    [
        ((20, 21, 22), (2.0, 2.01, 2.02), "reproduced", ""),
        ((20, 21, 22), (0.1, 0.11, 0.12), "not reproduced", ""),
        ((1, 1.1, 1.2), (2.0, 2.01, 2.02), "not applicable", "presupposes that there is a sink: sink_rate of a is 1.1"),
        ((4, 6, 8), (2.0, 2.01, 2.02), "inconclusive", "reaches over the bound"),
        ((20,), (2.0,), "inconclusive", "1 draw; a verdict needs 3"),
        ((1,), (2.0,), "not applicable", "is 1 percent"),
    ],
)
def test_a_model_is_judged_over_draws_and_what_is_presupposed_too(rates, losses, verdict, reason):
    found = judge_model((RISES,), (SINKS,), draws(sink_rate=rates, loss=losses))
    assert found.verdict == verdict
    assert reason in found.reason


def test_over_models_each_to_which_it_applies_is_one_observation():
    good = {
        name: judge_model((RISES,), (SINKS,), draws(sink_rate=(20, 21, 22), loss=(2.0 + at, 2.1 + at, 2.2 + at)))
        for name, at in (("a", 0.0), ("b", 0.1), ("c", 0.2))
    }
    without = judge_model((RISES,), (SINKS,), draws(sink_rate=(0, 0, 0), loss=(9.0, 9.1, 9.2)))
    undecided = judge_model((RISES,), (SINKS,), draws(sink_rate=(4, 6, 8), loss=(9.0, 9.1, 9.2)))
    found = judge_models((RISES,), {**good, "without": without, "undecided": undecided}, {})
    assert found.verdict == "reproduced"
    assert found.findings[0].by_seed == pytest.approx({"a": 2.1, "b": 2.2, "c": 2.3})
    few = judge_models((RISES,), {"a": good["a"], "without": without}, {})
    assert (few.verdict, few.reason) == ("inconclusive", "'it rises': 1 model; a verdict needs 3")
    assert judge_models((RISES,), {"without": without}, {}).verdict == "not applicable"
    assert judge_models((RISES,), {"undecided": undecided}, {}).verdict == "inconclusive"


def test_over_models_one_model_on_several_texts_is_one_observation():
    numbers = {f"m{at}": draws(loss=(2.0 + at, 2.1 + at, 2.2 + at)) for at in range(4)}
    found = {name: judge_model((RISES,), (), of) for name, of in numbers.items()}
    apart = judge_models((RISES,), found, numbers)
    assert (apart.verdict, len(apart.findings[0].by_seed)) == ("reproduced", 4)
    one = judge_models((RISES,), found, numbers, dict.fromkeys(numbers, "the same weights"))
    assert (one.verdict, one.reason) == ("inconclusive", "'it rises': 1 model; a verdict needs 3")
    two = judge_models((RISES,), found, numbers, {"m0": "a", "m1": "a", "m2": "b", "m3": "b"})
    assert two.findings[0].by_seed == pytest.approx({"m0, m1": 2.6, "m2, m3": 4.6})
    assert two.verdict == "inconclusive"
    # Trainings that are three of a kind stay so with a second text each.
    weights = {f"{name}{text}": name for name in numbers for text in "xy"}
    each = {name: found[model] for name, model in weights.items()}
    twice = judge_models((RISES,), each, {name: numbers[model] for name, model in weights.items()}, weights)
    assert twice.findings[0].interval == pytest.approx(apart.findings[0].interval)


def some_of(losses: dict[str, tuple[float, ...]], part: Part):
    """The verdict over models, from the losses of each by draw."""
    numbers = {name: draws(loss=of_model) for name, of_model in losses.items()}
    return judge_models((part,), {name: judge_model((part,), (), of) for name, of in numbers.items()}, numbers)


def test_that_there_are_such_models_is_shown_by_one_and_refuted_by_none():
    some = dataclasses.replace(RISES, of_some=True)
    shows, does_not, open_ = (2.0, 2.1, 2.2), (0.1, 0.2, 0.3), (0.5, 1.5, 2.5)
    alone = [judge_model((some,), (), draws(loss=losses)).verdict for losses in (shows, does_not, open_)]
    assert alone == ["reproduced", "not reproduced", "inconclusive"]
    found = some_of({"a": does_not, "b": shows, "c": open_}, some)
    # The numbers are those of the model that shows it, whose interval lies in the region, at the level of three together.
    alone_b = judge_part(some, draws(loss=shows), draws=True, level=1 - 0.05 / 3)
    part = found.findings[0]
    assert (found.verdict, part.model, part.mean, part.interval) == ("reproduced", "b", alone_b.mean, alone_b.interval)
    assert part.interval[0] > some.more_than
    assert part.by_seed == pytest.approx({"a": 0.2, "b": 2.1, "c": 1.5})
    assert part.record().model == "b"
    falls = Part("it falls", RISES.effect, less_than=1, of_some=True)
    assert some_of({"a": (0.5, 0.6, 0.7), "b": does_not, "c": shows}, falls).findings[0].model == "b"
    none = some_of({"a": does_not, "b": does_not, "c": does_not, "d": open_}, some)
    assert (none.verdict, none.reason) == (
        "inconclusive",
        "'it rises': none of 4 models shows it by intervals that hold for all of them together, which refutes nothing: the "
        "claim is that there are such models",
    )
    assert none.findings[0].model == "d"
    assert some_of({"a": open_}, some).reason == (
        "'it rises': the model does not show it, which refutes nothing: the claim is that there are such models"
    )
    assert some_of({"a": does_not, "b": does_not, "c": does_not}, RISES).verdict != "reproduced"


# --- the run ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_the_same_weights_are_measured_anew_under_another_configuration_or_tokenizer(here, llama, text, tmp_path, file):
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    changed = json.loads((other / file).read_text())
    if file == "config.json":
        changed["rope_parameters"]["rope_theta"] = 100.0
    else:
        changed["post_processor"] = None  # and no BOS in front
    (other / file).write_text(json.dumps(changed))
    assert load_model(str(other)).revision == load_model(str(llama)).revision
    about = {"corpora": [str(text)], "seeds": [0], "out": tmp_path / "out"}
    reproduce_on([f"one={llama}", f"other={other}"], ["inputs_by_position", FAST], **about)
    assert {model for model, _, _ in here} == {str(llama), str(other)}
    assert len(here) == 4


def test_models_against_claims_are_kept_under_their_public_names(here, llama, checkpoint, vit, text, tmp_path):
    models = [f"nobody/llama={llama}", f"nobody/vit={vit}"]
    about, told = {"corpora": [str(text)], "out": tmp_path / "out"}, []
    laws, zero = reproduce_on(models, [FAST, "inputs_by_position"], progress=lambda *of: told.append(of), **about)
    assert told == [("models and texts", done, 2) for done in (0, 1, 2)]
    assert len(here) == 6  # two claims, three draws; of the model of images nothing is measured
    first, second = laws.summary["models"]
    assert (first["name"], first["verdict"], first["kind"]) == ("nobody/llama", "agrees with the proof", "decoder")
    assert first["revision"] == load_model(str(llama)).revision
    assert (second["verdict"], second["reason"]) == (
        "not applicable",
        "it reads images, and the claim is about tokens of a text",
    )
    assert laws.summary["verdict"] == "inconclusive"  # of one model nothing follows about models
    assert zero.summary["verdict"] == "not applicable"
    assert zero.summary["models"][0]["reason"].startswith("it has rotary")
    assert set(laws.table["model"]) == {"nobody/llama"}
    assert len(laws.table) == 9
    kept = {one.record.claim: summary_of(one.record) for one in read_results(tmp_path / "out")}
    assert [model["verdict"] for model in kept[FAST]["models"]] == ["agrees with the proof", "not applicable"]
    assert kept[FAST]["scale"] == "checkpoint"
    written = [path.read_text() for path in (tmp_path / "out" / "checkpoint").glob("*/run.json")]
    assert len(written) == 2
    assert not any(str(llama) in record or str(text.parent) in record for record in written)
    here.clear()
    reproduce_on(models, [FAST, "inputs_by_position"], seeds=(0, 1, 2, 3), **about)
    assert here == [(str(llama), FAST, 3), (str(llama), "inputs_by_position", 3)]  # the rest was kept
    kept = (tmp_path / "out" / "checkpoint" / FAST / "run.json").read_text()
    with pytest.raises(InputError, match=r"holds a result with `seeds` 3 and `models` nobody/vit, which would be lost"):
        reproduce_on(models[:1], [FAST], **about)
    assert (tmp_path / "out" / "checkpoint" / FAST / "run.json").read_text() == kept
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    with pytest.raises(
        InputError, match=r"holds the result of nobody/llama on .*, which one on other.txt, sha256-\w* would repl"
    ):
        reproduce_on(models, [FAST], seeds=(0, 1, 2, 3), **{**about, "corpora": (str(other),)})
    assert (tmp_path / "out" / "checkpoint" / FAST / "run.json").read_text() == kept
    found = [one.record for one in read_results(tmp_path / "out")]
    shown = markdown(show_results(found))
    assert "| claim | nobody/llama | nobody/vit | over models |" in shown
    assert "nobody/vit: it reads images, and the claim is about tokens of a text" in shown
    assert f"- **{FAST}**: 'no weight is outside of its bounds'" in shown


def test_the_bounds_hold_where_keys_are_shared_and_can_fail(llama, text):
    numbers = claim_called(FAST).checkpoint.measure(Checkpoint(load_model(str(llama)), TextFile(text)))["rotary positions"]
    assert 0.5 < numbers["over_bound"] < 1.0 + 1e-4
    assert numbers["under_bound"] < 1.0 + 1e-4
    assert numbers["bound_violation"] == max(0.0, numbers["over_bound"] - 1, numbers["under_bound"] - 1)
    learned = load_model("embedded:softmax")
    assert (
        claim_called("inputs_by_position").checkpoint.not_about(Checkpoint(learned, TextFile(text))).startswith("it has rotary")
    )


def test_the_sink_silenced_leaves_the_first_query_alone(llama, text):
    checkpoint = Checkpoint(load_model(str(llama)), TextFile(text))
    rows, model = checkpoint.rows(32, 256), checkpoint.loaded.model
    losses = []
    for edits in ((), (ZeroValue(place=0),)):
        with torch.no_grad(), attend(model, (), edits):
            losses.append(token_losses(model, rows).double())
    plain, silent = losses
    # Float32 losses of order 5; in one layer nothing else depends on the sink's own query.
    assert torch.allclose(silent[:, 0], plain[:, 0], atol=1e-5)
    assert not torch.allclose(silent[:, 1:], plain[:, 1:], atol=1e-3)
    numbers = freed_weight(checkpoint)
    assert numbers[SILENT]["cost"] == pytest.approx(float((silent - plain).mean()), abs=1e-6)


# --- what is refused ----------------------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert lines[0].startswith("error:")
    return " ".join(result.stderr.split())


def test_refusals_are_one_line_and_come_first(here, llama, own_checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(llama)]
    said = refused("learning_rate", *model)
    assert "learning_rate take training" in said
    assert "repeated_token_laws" in said
    assert "there is no" in refused(FAST, "--model", "./nowhere")
    (tmp_path / "short.txt").write_text("Too short.")
    assert "short.txt" in refused("number_of_sinks", *model, "--corpus", "short.txt")
    for file in own_checkpoint.glob("tokenizer*"):
        file.unlink()
    config = own_checkpoint / "config.json"
    known = config.read_text()
    config.write_text(json.dumps(json.loads(known) | {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    assert "which sinklab does not run for claims" in refused(FAST, "--model", str(own_checkpoint), "--corpus", str(text))
    config.write_text(known)
    assert "came without a tokenizer" in refused(FAST, "--model", str(own_checkpoint), "--corpus", str(text))
    assert "are 3 for 1 models" in refused(FAST, *model, "--corpus", "a", "--corpus", "b", "--corpus", "c")
    assert "given twice" in refused(FAST, *model, *model)
    assert "--ray, --scale and --base are about training" in refused(FAST, *model, "--scale", "small")
    assert "are for --models" in refused(FAST, "--corpus", str(text))
    assert here == []
    assert not (tmp_path / "sinklab-claims" / "checkpoint").exists()


def test_draws_of_a_short_text_are_said_to_be_much_alike(llama, tmp_path):
    """Rows begin with lines: of 118 lines two draws of 100 rows have most in common, of thousands few."""
    loaded, letters = load_model(str(llama)), random.Random(0)
    lines = ["".join(letters.choices("abcdefghij ", k=40)) for _ in range(8000)]
    said = {}
    for count in (118, 8000):
        path = tmp_path / f"{count}.txt"
        path.write_text("\n".join(lines[:count]))
        said[count] = on_checkpoints.alike_draws(loaded, resolve_corpus(str(path)), "samples", (0, 1))
    assert said[8000] == ""
    found = re.fullmatch(
        r"(\d+) of 100 rows of seed 1 share half or more with one of seed 0 or one before them, so that intervals over draws "
        r"are about this text alone, and not about texts like it; give a longer text",
        said[118],
    )
    assert found
    assert 50 < int(found[1]) <= 100
    assert on_checkpoints.alike_draws(loaded, resolve_corpus(str(tmp_path / "118.txt")), "samples", (0,)) == ""


# --- known answers ------------------------------------------------------------------------------------------------------------


def test_a_llama_of_others_has_its_sink_with_bos_and_none_without(tmp_path):
    """Measured by independent code: 0.00 % without BOS, and with it a sink whose hidden norm is 10.3 times that of others."""
    stories = [
        f"Once upon a time, there was a little {who} named {name}. {name} liked to play with a {thing} in the {place}. One "
        f'day, {name} could not find the {thing}. {name} was very sad. A big dog came and said, "Do not cry, I can help you."'
        for who in ("girl", "boy", "cat", "bird", "bear")
        for name in ("Lily", "Tom", "Mia", "Sam", "Ben")
        for thing in ("red ball", "toy car")
        for place in ("park", "garden", "house")
    ]
    (tmp_path / "stories.txt").write_text("\n\n".join(stories))
    checkpoint = Checkpoint(load_model(str(real("tiny1m"))), TextFile(tmp_path / "stories.txt"))
    rows = checkpoint.rows(100, 64)
    with_bos, without = (attention_numbers(checkpoint.loaded.model, some)["sink_rate"] for some in (rows, rows[:, 1:]))
    assert with_bos > 5  # 17.9 to 20.7 % on stories that vary more
    assert without < 0.5
    # Of other texts, and over the layer outputs where it is largest.
    assert norms(checkpoint)["hidden_ratio"] == pytest.approx(10.3, rel=0.1)  # of other texts
