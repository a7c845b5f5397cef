"""The index of runs: what is a run, what is at work, which numbers stand beside each other, and links that lead somewhere."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from synthetic import HOSTILE, write_audit

from sinklab.errors import ConfigurationError, InputError
from sinklab.report.index import write_index
from sinklab.report.runs import MOST_POINTS, finding_of, read_runs
from sinklab.results.folder import FolderLock, in_use
from sinklab.results.table import append, make_table, write_json, write_table


def write_training(folder: Path, *, steps: int = 300, status: str = "finished", **record: Any) -> Path:
    """A run of pretrain whose training loss at step s is 5 - s / 1000."""
    folder.mkdir(parents=True)
    about = {"run_id": "20261122T100000Z-00000a", "kind": "pretrain", "status": status, "name": "tiny"}
    config = {"training": {"steps": steps, "seed": 0}, "model": {"operation": {"name": "softmax"}}}
    write_json({**about, "config": config, "token_sha256": {"train": "ab"}, **record}, folder / "run.json")
    rows: list[dict[str, object]] = [
        {"probe": "training", "metric": "train_loss", "value": 5 - step / 1000, "step": step, "unit": "nats", "version": 1}
        for step in range(1, steps + 1)
    ]
    write_table(make_table(rows, operation="softmax"), folder / "table.parquet")
    return folder


def hrefs(page: Path) -> list[str]:
    return [unquote(html.unescape(href)) for href in re.findall(r'<a href="([^"]*)"', page.read_text(encoding="utf-8"))]


def test_what_is_a_run(tmp_path):
    write_audit(tmp_path / "deep" / "er" / "audit")
    run = write_training(tmp_path / "train")
    for inside in ("store", "checkpoints", "model", "measured", "logs", ".train.partial"):
        write_training(run / inside / "no run of its own")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "empty").mkdir()
    assert sorted(found.folder for found in read_runs(tmp_path)) == ["deep/er/audit", "train"]


def test_newest_first_and_what_has_no_time_last(tmp_path):
    for name, run_id in (("old", "20250101T000000Z-1"), ("new", "20261122T235959Z-1"), ("odd", "yesterday")):
        write_training(tmp_path / name, run_id=run_id)
    assert [run.folder for run in read_runs(tmp_path)] == ["new", "old", "odd"]
    assert read_runs(tmp_path)[0].created == "2026-11-22T23:59:59+00:00"


def test_an_extreme_over_seeds_is_an_extreme(tmp_path):
    """The worst of all runs is not the mean of the worst of each."""
    rows = [
        {"probe": "trigger", "metric": metric, "unit": "weight", "version": 1, "seed": seed, "value": value}
        for metric, values in (("max_error", (0.25, 4.0, 1.0)), ("bos_weight_min", (0.5, 0.125, 0.75)), ("steps", (3.0, 6.0)))
        for seed, value in enumerate(values)
    ]
    (tmp_path / "lab").mkdir()
    extremes = {"max_error": "max", "bos_weight_min": "min"}
    write_json(
        {"run_id": "20261122T100000Z-00000a", "kind": "trigger", "config": {}, "extremes": extremes},
        tmp_path / "lab" / "run.json",
    )
    write_table(make_table(rows, operation="softmax"), tmp_path / "lab" / "table.parquet")
    numbers = {name: value for name, (value, _) in read_runs(tmp_path)[0].numbers.items()}
    assert numbers == {"max_error": 4.0, "bos_weight_min": 0.125, "steps": 4.5}


def test_at_work_is_what_a_process_holds(tmp_path):
    folder = write_training(tmp_path / "train", status="running")
    unfinished = tmp_path / "lab" / "store"
    unfinished.mkdir(parents=True)
    (unfinished / "settings.json").write_text('{"kind": "trigger", "settings": {"seeds": [0, 1]}}')
    with FolderLock(folder), FolderLock(unfinished.parent):
        assert in_use(folder)
        assert [(run.kind, run.status) for run in read_runs(tmp_path)] == [("pretrain", "running"), ("trigger", "running")]
    assert not in_use(folder)
    trained, lab = read_runs(tmp_path)
    assert (trained.status, lab.status) == ("stopped", "stopped")
    assert lab.settings == {"seeds": "[0, 1]"}
    assert "--resume" in lab.finding


def test_the_lock_file_of_a_dead_process_holds_nothing(tmp_path):
    line = "import os, sys; from sinklab.results.folder import FolderLock, Path; FolderLock(Path(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", line, tmp_path / "out"], check=False).returncode == 9
    assert (tmp_path / ".out.lock").is_file()
    assert not in_use(tmp_path / "out")


def test_what_cannot_be_read_is_in_the_list_and_says_why(tmp_path):
    write_training(tmp_path / "good")
    for name, text in (("cut", '{"kind": "au'), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    page, runs = write_index(tmp_path)
    broken = {run.folder: run for run in runs if run.status == "unreadable"}
    assert set(broken) == {"cut", "list"}
    assert "not valid JSON" in broken["cut"].finding
    assert "expected a JSON object, got list" in page.read_text(encoding="utf-8")


def test_numbers_of_another_condition_say_so(tmp_path):
    folder = write_training(tmp_path / "run", steps=2)
    common = {"probe": "sink_rate", "metric": "gu2024", "unit": "percent", "version": 1}
    rows: list[dict[str, object]] = [
        {**common, "value": 7.0, "corpus": "notes", "bos": 1, "key_position": 0},
        {
            **common,
            "value": 99.0,
            "corpus": "notes",
            "bos": 1,
            "key_position": 1,
        },  # of another position: not of the whole model
        {**common, "value": 98.0, "corpus": "notes", "bos": 1, "key_position": 0, "layer": 2},
        {**common, "value": 3.0, "corpus": "notes", "bos": 0, "key_position": 0},
        {**common, "value": 5.0, "corpus": "random_tokens", "bos": 1, "key_position": 0},
        {**common, "metric": "loss", "unit": "nats", "value": 1.0, "corpus": "notes", "bos": 1, "policy": "window", "seed": 0},
        {**common, "metric": "loss", "unit": "nats", "value": 2.0, "corpus": "notes", "bos": 1, "policy": "window", "seed": 1},
    ]
    write_table(make_table(rows), folder / "table.parquet")
    [run] = read_runs(tmp_path)
    assert run.numbers == {
        "gu2024": (7.0, "percent"),
        "gu2024 · 0 BOS": (3.0, "percent"),
        "gu2024 · random_tokens": (5.0, "percent"),
        "loss · window": (1.5, "nats"),
    }


def test_a_number_has_one_name_with_the_sections_of_an_audit_and_without(tmp_path):
    """Sections have more rows about the whole model than the audit, on other corpora or on none."""
    audit = {"model": "org/model", "operation": "softmax", "corpus": "book", "bos": 1, "probe": "sink_rate", "unit": "%"}
    rows = [{"metric": "gu2024", "value": 25.0}]
    section = make_table([{"metric": f"rho_{number}", "value": 0.5} for number in range(5)], probe="causes_read_outs", unit="1")  # type: ignore[arg-type]
    names = []
    for name, tables in (("plain", []), ("with", [section])):
        (tmp_path / name).mkdir()
        write_json({"kind": "audit", "status": "finished", "config": {}}, tmp_path / name / "run.json")
        write_json({"model": "org/model", "corpus": "book", "bos": 1}, tmp_path / name / "summary.json")
        write_table(append([make_table(rows, **audit), *tables]), tmp_path / name / "table.parquet")  # type: ignore[arg-type]
        names.append([name for name in read_runs(tmp_path / name)[0].numbers if name.startswith("gu2024")])
    assert names == [["gu2024"], ["gu2024"]]


def test_numbers_of_several_sinks_are_told_apart(tmp_path):
    """A mean over the places of several origins is the number of none."""
    spikes = [{"metric": "spike", "value": value, "sink": sink} for value, sink in ((900.0, "corner patches"), (4.0, "[CLS]"))]
    norms = [{"metric": "norm", "value": 2.0, "sink": "[CLS]"}]
    write_json({"kind": "origin", "status": "finished", "config": {}}, tmp_path / "run.json")
    write_table(make_table(spikes + norms, model="org/model", probe="origin", unit="1"), tmp_path / "table.parquet")  # type: ignore[arg-type]
    assert {name: value for name, (value, _) in read_runs(tmp_path)[0].numbers.items()} == {
        "spike · corner patches": 900.0,
        "spike · [CLS]": 4.0,
        "norm": 2.0,
    }


def test_runs_say_by_which_definition_a_number_was_measured(tmp_path):
    write_training(tmp_path / "old", steps=2)
    rows = [{"probe": "training", "metric": "train_loss", "value": 4.0, "step": 1, "unit": "nats", "version": 2}]
    write_table(make_table(rows), write_training(tmp_path / "new", steps=2) / "table.parquet")
    page, runs = write_index(tmp_path)
    assert {run.folder: run.versions for run in runs} == {"old": {"train_loss": "1"}, "new": {"train_loss": "2"}}
    text = page.read_text(encoding="utf-8")
    assert '"versions":{"train_loss":"2"}' in text.replace(" ", "")
    # A model whose sink stands elsewhere has 0 there.
    assert ">sink rate at the first position (%)<" in text


@pytest.mark.parametrize(
    ("about", "names"),
    [
        ([{"operation": "softmax"}, {"operation": "relu"}], ["softmax", "relu"]),  # toy problems
        ([{"model": "plain", "operation": "softmax"}, {"model": "other", "operation": "sigmoid"}], ["plain", "other"]),
        ([{"model": "a/b", "operation": "softmax"}, {"model": "c/d", "operation": "softmax"}], ["a/b", "c/d"]),
        ([{"model": "a", "operation": "softmax"}, {"model": "a", "operation": "relu"}, {"model": "b", "operation": "relu"}],
         ["a · softmax", "a · relu", "b · relu"]),
    ],
)  # fmt: skip
def test_numbers_of_several_models_are_not_averaged(tmp_path, about, names):
    folder = write_training(tmp_path / "run", steps=2)
    common = {"probe": "lab", "metric": "held_out_loss", "unit": "nats", "version": 1}
    rows: list[dict[str, object]] = [
        {**common, "seed": seed, "value": 10.0 * at + seed, **one}
        for at, one in enumerate(about) for seed in (0, 1)
    ]  # fmt: skip
    write_table(make_table(rows), folder / "table.parquet")
    [run] = read_runs(tmp_path)
    assert run.numbers == {f"held_out_loss · {name}": (10.0 * at + 0.5, "nats") for at, name in enumerate(names)}
    assert run.number("held_out_loss", "loss") is None  # the column of losses: no one's


def test_curves_keep_their_ends(tmp_path):
    write_training(tmp_path / "run", steps=1000)
    [run] = read_runs(tmp_path)
    steps, values = run.curves["train_loss"]
    assert len(steps) == len(values) == MOST_POINTS
    assert (steps[0], steps[-1]) == (1, 1000)
    assert values == pytest.approx([5 - step / 1000 for step in steps])
    assert run.numbers["train_loss"] == (4.0, "nats")


def test_every_link_leads_somewhere(tmp_path):
    write_audit(tmp_path / "runs" / "a b #1 é" / "audit?")
    (tmp_path / "runs" / "a b #1 é" / "audit?" / "report.html").write_text("<p>")
    write_training(tmp_path / "runs" / "train")
    (tmp_path / "elsewhere").mkdir()
    for out in (None, tmp_path / "elsewhere" / "all.html"):
        page, _ = write_index(tmp_path / "runs", out)
        links = hrefs(page)
        assert len(links) == 3
        assert all((page.parent / link).exists() for link in links), links


def test_hostile_names_stay_text(tmp_path):
    write_training(tmp_path / "run", name=HOSTILE, status="failed", error=HOSTILE)
    text = write_index(tmp_path)[0].read_text(encoding="utf-8")
    assert HOSTILE not in text
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["runs"][0]["name"] == HOSTILE


@pytest.mark.parametrize(
    ("prepare", "arguments", "error", "message"),
    [
        (None, {}, InputError, "is no directory"),
        (lambda folder: folder.mkdir(), {}, InputError, "no run is below"),
        (
            lambda folder: write_training(folder / "a"),
            {"refresh": 0.0},
            ConfigurationError,
            "`refresh` is 0, expected 1 seconds",
        ),
        (lambda folder: write_training(folder / "a"), {"refresh": float("nan")}, ConfigurationError, "`refresh` is nan"),
    ],
)
def test_refused(tmp_path, prepare, arguments, error, message):
    if prepare is not None:
        prepare(tmp_path / "runs")
    with pytest.raises(error, match=message):
        write_index(tmp_path / "runs", **arguments)


def test_a_page_of_somebody_else_stays(tmp_path):
    write_training(tmp_path / "run")
    (tmp_path / "index.html").write_text("<p>mine")
    with pytest.raises(InputError, match="is no page of sinklab"):
        write_index(tmp_path)
    assert (tmp_path / "index.html").read_text() == "<p>mine"


@pytest.mark.parametrize(
    ("record", "summary", "said"),
    [
        ({"kind": "audit"}, {"finding": "No sink.", "text": ["No sink.", "More."]}, "No sink."),
        ({"kind": "quantize"}, {"text": "It costs 0.1."}, "It costs 0.1."),
        ({"kind": "cache"}, {"recommendation": "Keep 1 sink."}, "Keep 1 sink."),
        (
            {"kind": "depend"},
            {"tasks": [{"sentence": "It depends."}, {"sentence": "It does not."}]},
            "It depends. It does not.",
        ),
        ({"kind": "measure"}, {}, ""),
        (
            {"kind": "claim", "verdict": "not reproduced", "statement": "Sinks grow.", "reason": "no sink"},
            {},
            "Not reproduced: Sinks grow. (no sink)",
        ),
        ({"kind": "pretrain", "status": "running"}, {}, "Running."),
        ({"kind": "pretrain", "status": "failed", "error": "no space"}, {}, "Failed: no space"),
        (
            {"kind": "pretrain", "status": "finished", "steps": 9, "result": {"held_out_loss": 2.0, "sink_rate": 1.5}},
            {},
            "Finished after 9 steps: 2.000 nats per held-out token, 1.50 % of heads and samples sink at position 0.",
        ),
        (
            {"kind": "pretrain", "status": "diverged", "steps": 9, "result": {}, "divergence": {"reason": "The loss is nan."}},
            {},
            "Diverged after 9 steps. The loss is nan.",
        ),
    ],
)
def test_findings(record, summary, said):
    assert finding_of(record, summary) == said
