"""What the folder of a run says of it: its finding, and numbers that are those of one condition, sink, model or seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sinklab.report.runs import finding_of, run_of
from sinklab.results.folder import in_use
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
    numbers = {name: value for name, (value, _) in run_of(tmp_path / "lab").numbers.items()}
    assert numbers == {"max_error": 4.0, "bos_weight_min": 0.125, "steps": 4.5}


def test_the_lock_file_of_a_dead_process_holds_nothing(tmp_path):
    line = "import os, sys; from sinklab.results.folder import FolderLock, Path; FolderLock(Path(sys.argv[1])); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", line, tmp_path / "out"], check=False).returncode == 9
    assert (tmp_path / ".out.lock").is_file()
    assert not in_use(tmp_path / "out")


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
    run = run_of(folder)
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
        names.append([name for name in run_of(tmp_path / name).numbers if name.startswith("gu2024")])
    assert names == [["gu2024"], ["gu2024"]]


def test_numbers_of_several_sinks_are_told_apart(tmp_path):
    """A mean over the places of several origins is the number of none."""
    spikes = [{"metric": "spike", "value": value, "sink": sink} for value, sink in ((900.0, "corner patches"), (4.0, "[CLS]"))]
    norms = [{"metric": "norm", "value": 2.0, "sink": "[CLS]"}]
    write_json({"kind": "origin", "status": "finished", "config": {}}, tmp_path / "run.json")
    write_table(make_table(spikes + norms, model="org/model", probe="origin", unit="1"), tmp_path / "table.parquet")  # type: ignore[arg-type]
    assert {name: value for name, (value, _) in run_of(tmp_path).numbers.items()} == {
        "spike · corner patches": 900.0,
        "spike · [CLS]": 4.0,
        "norm": 2.0,
    }


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
    run = run_of(folder)
    assert run.numbers == {f"held_out_loss · {name}": (10.0 * at + 0.5, "nats") for at, name in enumerate(names)}


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
