"""The commands ``claims`` and ``reproduce``: what they list, choose, print and refuse; nothing is trained here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
from tests.claims.made_results import PARTS, write_claim
from tests.command_line import CliRunner

from sinklab.cli.app import app
from sinklab.errors import ConfigurationError, UnknownNameError
from sinklab.registry import claims
from sinklab.results.run import Result
from sinklab_claims.reproduce import on_trainings
from sinklab_claims.reproduce.claims import stated
from sinklab_claims.reproduce.reproduce import chosen
from sinklab_claims.verdict.records import answer

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
            assert row["scale"] == "tiny"

    def test_the_verdict_is_that_of_the_folder(self, tmp_path):
        write_claim(tmp_path / "mine" / "tiny" / NAME, parts=PARTS[:1])
        (row,) = json.loads(run("claims", NAME, "--results", "mine", "--json").stdout)
        assert (row["verdict"], row["effect"], row["unit"], row["seeds"]) == ("reproduced", -30.5, "points", [0, 1, 2])
        (row,) = json.loads(run("claims", NAME, "--results", "mine", "--scale", "60m", "--json").stdout)
        assert row["verdict"] in (None, "not tested at this scale")
        printed = run("claims", NAME, "--results", "mine").stdout
        assert "reproduced  −30.5 [" in printed
        assert "points  (3 seeds; evidence: toy)" in printed
        assert printed.endswith("Verdicts from mine.\n")

    def test_what_was_found_on_the_other_base_stands_below_and_is_not_the_verdict(self, tmp_path):
        write_claim(tmp_path / "mine" / "small-bos" / "learning_rate", parts=PARTS[:1], scale="small", base="bos")
        asked = ("claims", "learning_rate", "--results", "mine", "--scale", "small")
        (row,) = json.loads(run(*asked, "--json").stdout)
        assert (row["verdict"], row["base"], row["seeds"]) == (None, None, [])
        assert (row["other_base"]["verdict"], row["other_base"]["base"]) == ("reproduced", "bos")
        printed = " ".join(run(*asked).stdout.split())
        assert "at small not run yet" in printed
        assert "small, with BOS reproduced −30.5 [" in printed
        assert "with BOS: reproduced" in " ".join(run("claims", "--results", "mine", "--scale", "small").stdout.split())
        write_claim(tmp_path / "mine" / "small" / "learning_rate", parts=PARTS[:1], scale="small", base="no-bos")
        (row,) = json.loads(run(*asked, "--json").stdout)
        assert (row["verdict"], row["base"], row["other_base"]["base"]) == ("reproduced", "no-bos", "bos")
        (row,) = json.loads(run("claims", NAME, "--json").stdout)
        assert row["other_base"] is None

    def test_of_a_claim_on_checkpoints_every_model_is_shown(self):
        (row,) = json.loads(run("claims", "number_of_sinks", "--scale", "checkpoint", "--json").stdout)
        assert {model["name"]: model["verdict"] for model in row["models"]}["shibatch/tiny1m"] == "reproduced"
        printed = run("claims", "number_of_sinks", "--scale", "checkpoint").stdout
        assert "shibatch/tiny1m" in printed
        (row,) = json.loads(run("claims", "learning_rate", "--scale", "checkpoint", "--json").stdout)
        assert (row["cost"], row["verdict"]) == (None, "not applicable")

    def test_results_beside_the_user_come_before_those_of_the_package(self, tmp_path):
        assert "the results that come with sinklab" in run("claims", NAME).stdout
        write_claim(tmp_path / "sinklab-claims" / "tiny" / NAME, parts=PARTS[:1])
        assert run("claims", NAME).stdout.endswith("Verdicts from sinklab-claims.\n")

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["repeated_token_law"], "Did you mean 'repeated_token_laws'?"),
            (["--source", "gu2042"], "there is no source 'gu2042'. Did you mean 'gu2024'?"),
            (["--scale", "tin"], "there is no scale 'tin'. Did you mean 'tiny'? Known: tiny, small, medium, 60m, 1b"),
        ],
    )
    def test_unknown_words_are_refused_with_the_nearest(self, arguments, complaint):
        assert complaint in run("claims", *arguments, status=2).stderr.replace("\n", " ")

    def test_listing_needs_no_torch(self):
        program = "import sys; from sinklab.cli.app import app\ntry: app(['claims'])\nexcept SystemExit: pass\n"
        done = subprocess.run(
            [sys.executable, "-c", f"{program}print('torch' in sys.modules)"], capture_output=True, text=True, check=True
        )
        assert done.stdout.endswith("False\n")


class TestChosen:
    def test_names_source_cost_and_all(self):
        given = {"source": None, "cost": None, "all_claims": False, "scale": "tiny"}
        assert chosen([NAME], **given) == [NAME]
        assert chosen([], **given | {"all_claims": True}) == claims.names()
        for name in chosen([], **given | {"source": "gu2024", "cost": "seconds"}):
            assert (stated(name).source, stated(name).costs["tiny"]) == ("gu2024", "seconds")

    @pytest.mark.parametrize(
        ("names", "changed", "error", "complaint"),
        [
            ([], {}, ConfigurationError, "no claim is asked for; give names from 'sinklab claims'"),
            ([NAME], {"all_claims": True}, ConfigurationError, "not names together with"),
            ([], {"cost": "minute"}, UnknownNameError, "there is no cost 'minute'. Did you mean 'minutes'?"),
            (["no_such"], {}, UnknownNameError, "no claim is called 'no_such'"),
            ([NAME], {"cost": "gpu"}, ConfigurationError, "no claim has source any and cost gpu at scale tiny"),
        ],
    )
    def test_refusals(self, names, changed, error, complaint):
        given = {"source": None, "cost": None, "all_claims": False, "scale": "tiny"} | changed
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
        for file in ("claims.html", f"tiny/{NAME}/table.parquet"):
            assert (tmp_path / "sinklab-claims" / file).is_file()
            assert file in printed.replace("\n", "")

    def test_failed_runs_are_named_and_the_status_is_1(self, asked):
        result = run("reproduce", "learning_rate", status=1)
        assert "failed: baseline-seed0: killed" in result.stderr
        assert "the same command again tries what failed" in result.stderr.replace("\n", " ")

    def test_claims_that_share_trainings_are_foreseen_with_them_once(self):
        names = ["learning_rate", "sink_moves_to_bias"]
        alone = [len(request.cells) for request in on_trainings._requests(names, "tiny", [0])]
        both = re.search(r"trainings: (\d+)", on_trainings.foreseen(names, "tiny", [0]))
        assert int(both[1]) == sum(alone) - 1  # the baseline
