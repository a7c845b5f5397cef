"""Published numbers are a reproduction; kept results are read back; the commands claims and reproduce show them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from tests.claims.made_results import PARTS, write_claim
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.errors import ConfigurationError, InputError, UnknownNameError
from sinklab.registry import claims
from sinklab.results.run import Result
from sinklab.results.sections import to_json
from sinklab_claims.contract.claim import RECORDED, base_config
from sinklab_claims.reproduce import on_trainings
from sinklab_claims.reproduce.claims import stated
from sinklab_claims.reproduce.reproduce import chosen
from sinklab_claims.reproduce.store import claim_called, configure, resolved_changes
from sinklab_claims.verdict.records import (
    PLAIN,
    answer,
    clearance,
    deciding_part,
    hardware_of,
    published_effects,
    read_results,
    summary_of,
)
from sinklab_claims.verdict.rule import judge

RATE, STAR, LOSS = "sink_rate", "sink_rate_star", "held_out_loss"
WINDOW, SINKS, ANEW = (math.log(perplexity) for perplexity in (5158.07, 5.40, 5.43))


PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "sink_moves_to_bias": {
        "baseline": {STAR: 0, RATE: 18.18},
        "sink token": {STAR: 74.12, RATE: 0.00},
        "key-value bias": {STAR: 72.76, RATE: 0.04},
        "key bias": {STAR: 73.34, RATE: 0.00},
        "value bias": {STAR: 0, RATE: 17.53},
    },
    "sigmoid_has_no_sink": {
        "baseline": {RATE: 18.18, LOSS: 3.73},
        "sigmoid": {RATE: 0.44, "carried_rate": 0, LOSS: 3.70},
        "sigmoid, normalised": {RATE: 30.24, LOSS: 3.74},
    },
    "learning_rate": {
        "rate x1/4": {RATE: 2.90},
        "rate x1/2": {RATE: 11.21},
        "baseline": {RATE: 18.18},
        "rate x2": {RATE: 32.23},
    },
    # The rate at the end of warm-up, after 100 steps, is not published; the sink appears ten times as late.
    "emergence": {"baseline": {"sink_rate_start": 0, "sink_rate_warm": 0, "sink_rate_end": 18.18}},
    # LLaMA3-8B.
    "hidden_key_value_norms": {
        "baseline": {
            **{RATE: 99.02, "hidden_ratio": 370 / 60, "key_ratio_sink": 5 / 20, "value_ratio_sink": 1 / 2},
            **{"cosine_first": 0.5, "cosine_other": -0.2},
        }
    },
    # Llama-2-13B and Llama-2-7B.
    "window_fails_sinks_restore": {
        "baseline": {"first_attention": 0.5, "window_0": WINDOW, "window_4": SINKS, "re_computation": ANEW}
    },
    "cache_size_not_monotone": {
        label: {"loss": math.log(perplexity)}
        for label, perplexity in {"an eighth": 9.73, "a quarter": 9.32, "half": 9.08, "the whole": 9.59}.items()
    },
    "gate_positions": {
        "baseline": {RATE: 46, "first_attention": 0.467},
        "gate, element-wise": {"first_attention": 0.048},
        "gate, head-wise": {"first_attention": 0.073},
        "gate, shared by heads": {"first_attention": 0.301},
        "gate, input-independent": {"first_attention": 0.364},
        "gate, at least a half": {"first_attention": 0.451},
    },
    "softpick_table": {
        "softpick": {RATE: 0.0},
        "gate, element-wise": {RATE: 2.0},
        "sink logit": {RATE: 8.78},
        "softmax plus one": {RATE: 16.36},
        "baseline": {RATE: 34.89},
    },
    "trigger_relu": {
        "solution": {"max_error": 0.0, "bos_weight_largest": 0.0},
        "one head": {"head_bos_weight_largest": 0.0, "max_error": 0.004},
        "several heads": {"head_bos_weight_largest": 0.0032, "max_error": 0.004},
    },
}
"""Claim to variant to metric to the number of the source, or where it gives none to one that it describes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_a_reproduction(name):
    """At forty seeds that differ by a hundred-thousandth."""
    claim, published = claim_called(name), PUBLISHED[name]
    seeds = {
        seed: {label: {metric: value * (1 - seed / 100_000) for metric, value in of.items()} for label, of in published.items()}
        for seed in range(40)
    }
    # Papers give rates, and where a mean weight decides they stand beside it.
    parts, presupposes = ([part.beside or part for part in of] for of in (claim.parts, claim.presupposes))
    verdict = judge(parts, presupposes, seeds).verdict
    assert PLAIN.get(verdict, verdict) == "reproduced"


SAME_RUNS = ("position_schemes",)
"""Claims in which a variant may be the scale's own configuration."""


@pytest.mark.parametrize("name", claims.names())
def test_no_two_variants_are_the_same_run(name):
    claim = claim_called(name)
    for scale in claim.costs:
        base = base_config(scale)
        made = {(variant.after, configure(base, variant).model_dump_json()) for variant in claim.variants}
        assert name in SAME_RUNS or len(made) == len(claim.variants)
        assert all(resolved_changes(base, variant) == {} for variant in claim.variants if variant.label == "baseline")


# --- the published numbers that stand beside effects ------------------------------------------------------------------------


@pytest.mark.parametrize("name", published_effects())
def test_a_published_number_is_the_effect_of_a_part(name):
    claim = claim_called(name)
    both = [of for part in (*claim.parts, *claim.presupposes) for of in (part, part.beside) if of is not None]
    parts = {part.effect.words: part for part in both}
    assert set(published_effects()[name]) <= set(parts), f"bring published.json to the words of {name}"
    for effect, published in published_effects()[name].items() if name in PUBLISHED else ():
        assert published == pytest.approx(parts[effect].effect(PUBLISHED[name]), rel=6e-4, abs=1e-9)  # four digits


ROOT = Path(__file__).parents[2]


def test_newest_first_and_nothing_but_claims(tmp_path):
    write_claim(tmp_path / "tiny" / "older", created="2026-01-01T00:00:00+00:00")
    write_claim(tmp_path / "small" / "newer", created="2026-01-02T00:00:00+00:00")
    write_claim(tmp_path / "tiny" / "same_day", created="2026-01-01T00:00:00+00:00")
    write_claim(tmp_path / "tiny-bos" / "oldest", created="2025-01-01T00:00:00+00:00", scale="tiny", base="bos")
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "run.json").write_text("{}")
    assert [kept.record.claim for kept in read_results(tmp_path)] == ["newer", "older", "same_day", "oldest"]
    assert read_results(tmp_path / "nowhere") == []


def test_the_effect_is_that_of_the_part_that_decides(tmp_path):
    record = write_claim(tmp_path / "tiny" / "one")
    assert (record.verdict, record.reason) == ("in part", "'what nobody measured': inconclusive")
    assert summary_of(record)["verdict"] == "in part (2 of 3)"
    assert deciding_part(record.parts, record.verdict).says == "what nobody measured"
    record, shown = write_claim(tmp_path / "tiny" / "two", parts=PARTS[:2]), ("says", "effect", "expected")
    assert summary_of(record) == {
        "name": "two", "source": "gu2024", "scale": "tiny", "base": None, "looks": 1, "verdict": "reproduced", "effect": -30.5,
        "interval": list(record.parts[0].interval), "unit": "points", "seeds": [0, 1, 2],
        "evidence": "toy", "created": "2026-01-01T00:00:00+00:00", "hardware": "cpu, made up, 2 cores", "reason": record.reason,
        "parts": [
            {name: to_json(part)[name] for name in (*shown, "mean", "interval", "unit", "verdict", "secondary")} | {"n": 3}
            for part in record.parts
        ],
    }  # fmt: skip
    assert hardware_of(dataclasses.replace(record, environment={})) == "unknown hardware"


def test_a_claim_that_holds_shows_its_weakest_part(tmp_path):
    gone, loss = PARTS[:2]
    clear = write_claim(tmp_path / "tiny" / "one", parts=(loss, gone))
    assert deciding_part(clear.parts, clear.verdict).says == "the sink is gone"
    narrow = write_claim(tmp_path / "tiny" / "two", parts=(gone, dataclasses.replace(loss, less_than=2.05)))
    assert narrow.verdict == "reproduced"
    assert deciding_part(narrow.parts, narrow.verdict).says == "the loss stays"
    loss = narrow.parts[1]
    middle, (low, high) = loss.mean, loss.interval
    assert clearance(loss) == pytest.approx((2.05 - middle) / (high - middle))
    assert clearance(dataclasses.replace(loss, interval=(middle, middle))) == math.inf
    assert clearance(dataclasses.replace(loss, less_than=None)) == pytest.approx((middle - 1) / (middle - low))
    assert clearance(dataclasses.replace(loss, interval=None)) == 0


def test_a_result_on_other_seeds_is_another_look(tmp_path):
    record = write_claim(tmp_path / "made" / NAME, scale="tiny")
    for seeds, looks in (([0, 1, 2], 1), ([0, 1, 2], 1), (list(range(5)), 2), (list(range(5)), 2), (list(range(8)), 3)):
        found = replace(record, seeds=seeds)
        assert on_trainings.written(found, pd.DataFrame(), tmp_path / "tiny" / NAME).summary["looks"] == looks
    assert "in part (2 of 3), looks: 3" in run("claims", NAME, "--results", str(tmp_path)).stdout


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"kind": "audit"}, "kind: "),
        ({"verdict": "true"}, "verdict: "),
        ({"seeds": None}, "seeds: "),
        ({"parts": [{"says": "it is"}]}, "parts.0.effect: "),
    ],
)
def test_a_damaged_record_is_refused_by_name(tmp_path, changed, complaint):
    folder = tmp_path / "tiny" / "one"
    write_claim(folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | changed))
    with pytest.raises(
        InputError, match=r"tiny/one/run\.json is not what this version writes: .*run the claim again"
    ) as caught:
        read_results(tmp_path)
    assert complaint in str(caught.value)


def test_a_list_of_records_is_read_as_folders_are(tmp_path):
    record = write_claim(tmp_path / "made" / "one", scale="tiny")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tiny.json").write_text(f"[{(tmp_path / 'made' / 'one' / 'run.json').read_text()}]")
    (kept,) = read_results(tmp_path / "kept")
    assert (kept.record, kept.folder) == (record, tmp_path / "kept" / "tiny" / "one")


def test_committed_results_are_whole():
    kept = read_results(ROOT / "results")
    assert len(kept) > 80
    assert all(one.record.seeds and one.record.environment["hardware"] for one in kept)


NAME = "repeated_token_laws"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, status: int = 0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result


class TestClaims:
    def test_all_are_listed_with_the_fields_that_are_promised(self):
        rows = json.loads(run("claims", "--json").stdout)
        assert [row["name"] for row in rows] == claims.names()
        for row in rows:
            assert {"name", "source", "scale", "verdict", "effect", "interval", "seeds", "statement", "cost"} <= set(row)
            assert row["scale"] in RECORDED

    def test_the_verdict_is_that_of_the_folder(self, tmp_path):
        write_claim(tmp_path / "mine" / "tiny" / NAME, parts=PARTS[:1])
        (row,) = json.loads(run("claims", NAME, "--results", "mine", "--json").stdout)
        assert (row["verdict"], row["effect"], row["unit"], row["seeds"]) == ("reproduced", -30.5, "points", [0, 1, 2])
        (row,) = json.loads(run("claims", NAME, "--results", "mine", "--scale", "medium", "--json").stdout)
        assert row["verdict"] in (None, "not tested at this scale")
        printed = run("claims", NAME, "--results", "mine").stdout
        assert "reproduced  −30.5 [" in printed
        assert "points  (3 seeds; evidence: toy)" in printed
        assert printed.endswith("n: seeds, or draws of texts. Verdicts from mine.\n")

    def test_what_was_found_on_the_other_base_stands_below_and_is_not_the_verdict(self, tmp_path):
        write_claim(tmp_path / "mine" / "small-bos" / "learning_rate", parts=PARTS[:1], scale="small", base="bos")
        asked = ("claims", "learning_rate", "--results", "mine", "--scale", "small")
        (row,) = json.loads(run(*asked, "--json").stdout)
        assert (row["verdict"], row["base"], row["seeds"]) == (None, None, [])
        assert (row["other_base"]["verdict"], row["other_base"]["base"]) == ("reproduced", "bos")
        assert "small, with BOS reproduced −30.5 [" in " ".join(run(*asked).stdout.split())
        assert "BOS:" in run("claims", "--results", "mine", "--scale", "small").stdout
        write_claim(tmp_path / "mine" / "small" / "learning_rate", parts=PARTS[:1], scale="small", base="no-bos")
        (row,) = json.loads(run(*asked, "--json").stdout)
        assert (row["verdict"], row["base"], row["other_base"]["base"]) == ("reproduced", "no-bos", "bos")

    def test_of_a_claim_on_checkpoints_every_model_is_shown(self):
        (row,) = json.loads(run("claims", "number_of_sinks", "--scale", "checkpoint", "--json").stdout)
        assert {model["name"]: model["verdict"] for model in row["models"]}["shibatch/tiny1m"] == "reproduced"
        (row,) = json.loads(run("claims", "learning_rate", "--scale", "checkpoint", "--json").stdout)
        assert (row["cost"], row["verdict"]) == (None, "not applicable")

    def test_the_strongest_evidence_gives_the_verdict_and_all_of_it_stands_on_the_page(self, tmp_path):
        for scale in ("tiny", "small", "medium"):
            write_claim(tmp_path / "mine" / scale / NAME, parts=PARTS[:1], scale=scale)
        (row,) = json.loads(run("claims", NAME, "--results", "mine", "--json").stdout)
        assert row["scale"] == "medium"
        printed = run("claims", NAME, "--results", "mine").stdout
        assert printed.rindex("at medium") < printed.rindex("at small") < printed.rindex("at tiny")
        assert printed.count(PARTS[0].says) == 3
        assert run("claims", NAME, "--results", "mine", "--scale", "small").stdout.count(PARTS[0].says) == 1

    def test_a_paper_shows_its_numbers_beside_ours_real_models_first(self):
        printed = run("claims", "--paper", "gu2024").stdout
        names = [name for name in claims.names() if stated(name).source == "gu2024"]
        places = {name: printed.index(f"\n{name}\n") for name in names}
        assert places["inputs_with_rotary_positions"] < places["emergence"]
        table = " ".join(printed[places["inputs_with_rotary_positions"] :].split())
        assert "natural text, as the model reads it 92.47 99.02 97.49 76.4" in table
        assert "timm/vit_tiny_patch16_224 it reads images, and the claim is about tokens of a text" in table
        found = run("claims", "--published", "92.47").stdout
        assert ("\ninputs_with_rotary_positions\n" in found, "\nemergence\n" in found) == (True, False)

    def test_results_beside_the_user_come_before_those_of_the_package(self, tmp_path):
        assert "the results that come with sinklab" in run("claims", NAME).stdout
        write_claim(tmp_path / "sinklab-claims" / "tiny" / NAME, parts=PARTS[:1])
        assert run("claims", NAME).stdout.endswith("Verdicts from sinklab-claims.\n")

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--paper", "gu2042"], "there is no paper 'gu2042'. Did you mean 'gu2024'?"),
            (["--published", "92.474"], "no claim of these has the published number 92.474"),
            (["--scale", "tin"], "there is no scale 'tin'. Did you mean 'tiny'? Known: tiny, small, medium"),
        ],
    )
    def test_unknown_words_are_refused_with_the_nearest(self, arguments, complaint):
        assert complaint in run("claims", *arguments, status=2).stderr.replace("\n", " ")


class TestChosen:
    def test_names_source_and_all(self):
        given = {"paper": None, "all_claims": False, "scale": "tiny"}
        assert chosen([NAME], **given) == [NAME]
        trained = [name for name in claims.names() if stated(name).costs]  # the others are measured on models as they are
        assert chosen([], **given | {"all_claims": True}) == trained
        assert {stated(name).source for name in chosen([], **given | {"paper": "gu2024"})} == {"gu2024"}

    @pytest.mark.parametrize(
        ("names", "changed", "error", "complaint"),
        [
            ([], {}, ConfigurationError, "no claim is asked for; give names from 'sinklab claims'"),
            ([NAME], {"all_claims": True}, ConfigurationError, "not names together with"),
            (["no_such"], {}, UnknownNameError, "no claim is called 'no_such'"),
            ([NAME], {"paper": "qiu2025"}, ConfigurationError, "not names together with the others"),
        ],
    )
    def test_refusals(self, names, changed, error, complaint):
        given = {"paper": None, "all_claims": False, "scale": "tiny"} | changed
        with pytest.raises(error) as caught:
            chosen(names, **given)
        assert complaint in str(caught.value)


class TestReproduce:
    @pytest.fixture
    def asked(self, monkeypatch):
        """What the command asks of the on_trainings, which answers with made-up results."""
        asked = {}

        def reproduce(names, *, out, **settings):
            asked.update(names=names, out=out, **settings)
            found = []
            for name in names:
                folder = None if name == "trigger_relu" else out.absolute() / "tiny" / name
                record = write_claim(
                    folder or out.absolute() / "elsewhere" / name,
                    parts=PARTS[:2],
                    scale="tiny",
                    seeds=list(settings["seeds"]),
                    errors=["baseline-seed0: killed"] if name == "learning_rate" else [],
                )
                if folder is None:
                    reason = "the claim can be run at small only"
                    record = replace(record, verdict="not tested at this scale", parts=[], reason=reason)
                found.append(Result(answer(record, folder), pd.DataFrame(), {"kind": "claim"}, folder))
            return found

        monkeypatch.setattr(on_trainings, "reproduce", reproduce)
        return asked

    def test_one_claim_is_shown_part_by_part(self, asked, tmp_path):
        printed = run("reproduce", NAME, "--seeds", "0..4", "--jobs", "1").stdout
        assert (asked["names"], asked["scale"], list(asked["seeds"]), asked["jobs"]) == ([NAME], "tiny", [0, 1, 2, 3, 4], 1)
        assert "the sink is gone" in printed
        assert "less than -5" in printed
        assert f"tiny/{NAME}/table.parquet" in printed.replace("\n", "")

    def test_failed_runs_are_named_and_the_status_is_1(self, asked):
        result = run("reproduce", "learning_rate", status=1)
        assert "failed: baseline-seed0: killed" in result.stderr
        assert "the same command again tries what failed" in result.stderr.replace("\n", " ")

    def test_claims_that_share_trainings_are_foreseen_with_them_once(self):
        names = ["learning_rate", "sink_moves_to_bias"]
        alone = [len(request.cells) for request in on_trainings._requests(names, "tiny", [0])]
        both = re.search(r"trainings: (\d+)", on_trainings.foreseen(names, "tiny", [0]))
        assert int(both[1]) == sum(alone) - 1  # the baseline
