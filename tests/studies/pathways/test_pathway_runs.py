"""From trainings to columns by hand, and the whole comparison of two operations in a few steps."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sinklab.errors import InputError
from sinklab.jobs.cell import run_cell
from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab.registry import read_outs
from sinklab.results.table import make_table, read_run, read_table, write_table
from sinklab.studies.trigger.problem import TriggerProblem
from sinklab.training.rows import TextRows
from sinklab_claims.contract.trained import TrainedModel
from sinklab_claims.numbers import losses as extrapolation_file
from sinklab_claims.pathways import compare, runs
from sinklab_claims.pathways.operations import pathways_of
from sinklab_claims.reproduce import cells, store


def test_columns_are_put_together_by_hand():
    raw = {
        "chosen": {
            ("softmax", 0): {"held_out_loss": 2.0, "window_gap": 0.3, "int8_gap": -0.1, "loss_spikes": 1.0, "entropy": 1.0}
        },
        "scale": {("softmax", 0): {"held_out_loss": 2.5, "diverged": 0.0, "loss_spikes": 4.0}},
        "longer": {("softmax", 0): {"held_out_loss": 9.0, "longer_gap": 0.7}},
    }
    assert runs.combined(raw, [0])[0]["softmax"] == {
        "held_out_loss": 2.0,
        "window_gap": 0.3,
        "int8_gap": -0.1,
        "loss_spikes": 1.0,
        "distortion": 0.3,  # a gap below 0 is none
        "scale_rate_loss": 2.5,
        "tuning_gain": 0.5,
        "longer_gap": 0.7,
    }


def test_what_has_no_number_is_absent():
    raw = {"chosen": {("a", 0): {"held_out_loss": 2.0, "kurtosis": math.nan}}, "scale": {("a", 0): {"diverged": 1.0}}}
    assert runs.combined(raw, [0, 1]) == {0: {"a": {"held_out_loss": 2.0}}, 1: {}}


def test_on_natural_text_the_distortion_is_what_the_first_tokens_give_back():
    found = {"held_out_loss": 2.0, "window_gap": 0.3, "sink_worth": 0.125, "int8_gap": 0.25}
    raw = {"chosen": {("softmax", 0): found}, "scale": {("softmax", 0): {"window_gap": 0.3, "sink_worth": 0.1}}}
    natural = runs.combined(raw, [0], natural=True)[0]["softmax"]
    assert (natural["distortion"], natural["scale_rate_worth"]) == (0.375, 0.1)
    made_up = runs.combined(raw, [0])[0]["softmax"]
    assert made_up["distortion"] == 0.55
    assert "scale_rate_worth" not in made_up


def test_what_provably_cannot_do_the_trigger_task_is_not_trained(tmp_path):
    asked = runs.Design(pathways_of([{"name": "sigmoid"}])[1:], {}, "tiny", "no-bos", [0, 1])
    found, cannot = runs.trigger_numbers(asked, TriggerProblem(cap=1), tmp_path / "trigger", lambda *told: None)
    assert found == {0: {"sigmoid": {"trigger_solved": 0.0}}, 1: {"sigmoid": {"trigger_solved": 0.0}}}
    # Weights that are divided by nothing: 1/9, as derived in sinklab.studies.trigger.expressible.
    assert cannot["sigmoid"].endswith("the largest error is 0.111 or more")
    assert not (tmp_path / "trigger").exists()


def test_trigger_runs_are_kept_under_the_names_of_the_comparison(tmp_path, monkeypatch):
    asked = runs.Design(pathways_of([{"name": "clipped_softmax"}]), {}, "tiny", "no-bos", [3])
    problem = TriggerProblem(cap=2)
    found, cannot = runs.trigger_numbers(asked, problem, tmp_path, lambda *told: None)
    assert cannot == {}
    assert set(found[3]) == {"softmax", "clipped_softmax"}
    assert found[3]["clipped_softmax"]["trigger_solved"] == 0.0
    assert found[3]["clipped_softmax"]["trigger_steps"] == 2.0
    assert runs.trigger_numbers(asked, problem, tmp_path, lambda *told: None) == (found, cannot)
    # The folder is for models, which comparisons of other seeds share: that of one seed goes on where that of two has been.
    runs.trigger_numbers(dataclasses.replace(asked, seeds=[3, 4]), problem, tmp_path, lambda *told: None)
    assert runs.trigger_numbers(asked, problem, tmp_path, lambda *told: None) == (found, cannot)


def test_beyond_the_context_by_hand(monkeypatch):
    """Losses equal to the position of the query: 6 and 7 inside the context of 8, 8 to 30 beyond it."""

    class Made:
        cache, front = Path(), 0
        config = backcopy_tiny().model_copy(
            update={
                "model": backcopy_tiny().model.model_copy(update={"max_position_embeddings": 8, "position": {"name": "alibi"}})
            }
        )
        loaded = type("Loaded", (), {"model": None, "device": torch.device("cpu")})

    def data(config, cache):
        held_out = torch.zeros(40, config.model.max_position_embeddings, dtype=torch.int64)

        def text(rows, length, *, front):
            return TextRows(held_out[:rows, :length])

        return SimpleNamespace(held_out=held_out, probe_text=text)

    def losses(model, rows, after):
        length = rows.ids.shape[1]
        assert length == 32
        return torch.arange(after, length - 1).float().expand(len(rows), -1)

    monkeypatch.setattr(extrapolation_file, "prepare_data", data)
    monkeypatch.setattr(extrapolation_file, "token_losses", losses)
    monkeypatch.setattr(extrapolation_file, "_longer", lambda config: config.model_copy(
        update={"model": config.model.model_copy(update={"max_position_embeddings": 32})}
    ))  # fmt: skip
    assert read_outs["extrapolation"](Made()) == {"longer_gap": pytest.approx(sum(range(8, 31)) / 23 - 6.5)}


def test_learned_positions_end_at_the_context():
    trained = type("Made", (), {"config": backcopy_tiny()})
    assert read_outs["extrapolation"](trained) == {}


@pytest.fixture
def short(monkeypatch):
    """The tiny scale with eight steps and the text for them, everything in this process."""
    config = backcopy_tiny()
    config = config.model_copy(
        update={
            "training": config.training.model_copy(update={"steps": 8, "evaluate_every": 8, "log_every": 4, "save_every": 8}),
            "schedule": config.schedule.model_copy(update={"warmup_steps": 2}),
            "watch": config.watch.model_copy(update={"every": 8, "samples": 8}),
            "data": config.data.model_copy(update={"max_tokens": 10_000, "held_out_rows": 16}),
        }
    )
    for module in (cells, compare):
        monkeypatch.setattr(module, "base_config", lambda scale, base=None: config)

    def train(plan, names, **options):
        for name in names:
            run_cell(plan.folder, name)
        return {}

    def read(readings, measurements, *, cache, **options):
        for reading in readings:
            reading.take(TrainedModel(reading.folder, cache))
        return {}

    monkeypatch.setattr(runs, "FACTORS", (1.0,))
    monkeypatch.setitem(runs.SELECTION_SEEDS, "tiny", (1000,))
    monkeypatch.setattr(store, "train_cells", train)
    monkeypatch.setattr(store, "run_missing", read)


def test_the_whole_comparison(tmp_path, short):
    out, said = tmp_path / "out", []
    given = {"seeds": [0], "out": out, "store": tmp_path / "store", "cache": tmp_path / "cache", "progress": False}
    result = compare.run_pathways([{"name": "softmax_plus_one"}], problem=TriggerProblem(cap=2), say=said.append, **given)
    rows = result.summary["rows"]
    assert [row["label"] for row in rows] == ["softmax", "softmax_plus_one"]
    assert result.summary["errors"] == []
    columns = {
        *("held_out_loss", "effective_sink_rate", "sink_rate", "kurtosis", "int8_gap", "window_gap", "distortion", "noise_gap"),
        *("scale_rate_loss", "scale_rate_sink", "scale_rate_window", "tuning_gain", "chosen_factor", "rate_range"),
        "longer_gap",
    }
    for row in rows:
        assert columns <= set(row["numbers"])
        assert row["low_distortion"] == "undecided", "one seed decides nothing"
    assert rows[1]["numbers"]["null_mass"]["mean"] > 0
    table = read_table(out / "table.parquet")
    assert set(table["probe"]) == {"pathways"}
    loss = table[(table["metric"] == "held_out_loss") & (table["model"] == "softmax")]["value"].item()
    assert loss == rows[0]["numbers"]["held_out_loss"]["mean"]
    run = read_run(out)
    assert run["operations"]["softmax_plus_one"]["source"].startswith("Miller 2023")
    assert set(run["cells"]) == {"rates", "chosen", "scale", "longer"}
    for cell in run["cells"]["rates"]["softmax"].values():
        assert read_run(tmp_path / "store" / "runs" / "tiny" / cell)["data"]["held_out"]["sha256"] == run["held_out_sha256"]
    assert (run["protocol"], run["base"], run["selection_seeds"]) == (2, "no-bos", [1000])
    assert run["operations"]["softmax_plus_one"]["intermediate_size"] == 128
    assert said == [runs.foreseen(compare.design_of([{"name": "softmax_plus_one"}], [0], "tiny", None))]
    written = (out / "pathways.md").read_text()
    assert written.count("| softmax") == 2 * written.count("| operation |")
    for changed, message in (
        ({"scale": "small"}, "holds the comparison with scale tiny, and this one has small; choose another"),
        ({"base": "bos"}, "holds the comparison with base no-bos, and this one has bos; choose another"),
        ({"rate": 0.5}, "holds the comparison with rate None, and this one has 0.5; choose another"),
        ({"seeds": [1]}, "with `operations` softmax_plus_one and `seeds` 0, which would be lost"),
    ):
        with pytest.raises(InputError, match=message):
            compare.run_pathways([], **given | changed)
    assert read_run(out) == run


def test_one_rate_for_all_is_not_searched_for_and_one_that_was_ended_while_it_wrote_goes_on(tmp_path, short, monkeypatch):
    """Half of the scale's rate: as many trainings as operations and seeds, and no column of another training."""
    out = tmp_path / "out"
    given = {"seeds": [0], "out": out, "store": tmp_path / "store", "cache": tmp_path / "cache", "progress": False}

    def compared():
        return compare.run_pathways([{"name": "softmax_plus_one"}], rate=0.5, problem=TriggerProblem(cap=2), **given)

    result, run = compared(), read_run(out)
    assert (run["rate"], run["rates"], run["selection_seeds"]) == (0.5, {}, [])
    assert set(run["cells"]) == set(run["trainings"]) == {"chosen"}
    trained = {path.name for path in (tmp_path / "store" / "runs" / "tiny").iterdir() if (path / "run.json").is_file()}
    assert trained == {run["cells"]["chosen"][label]["0"] for label in ("softmax", "softmax_plus_one")}
    usual = run["config"]["optimizer"]["learning_rate"]
    for name in trained:
        assert read_run(tmp_path / "store" / "runs" / "tiny" / name)["config"]["optimizer"]["learning_rate"] == 0.5 * usual
    for row in result.summary["rows"]:
        assert {"held_out_loss", "window_gap", "distortion"} <= set(row["numbers"])
        assert not {"scale_rate_loss", "tuning_gain", "chosen_factor", "longer_gap", "trigger_solved"} & set(row["numbers"])
        assert set(row["bounds_at_one_rate"]) == {"loss", "sink", "window"} - ({"loss"} if row["label"] == "softmax" else set())
    # The table is the first file; behind it come the page and the record.
    with monkeypatch.context() as full:
        full.setattr(compare, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            compared()
    assert not (out / "run.json").exists(), "it would speak of other numbers than the table"
    (out / ".sinklab-0123.partial").write_text("half")
    assert compared().record["run_id"] != run["run_id"]
    assert not (out / ".sinklab-0123.partial").exists()
    (out / "run.json").unlink()
    mine = make_table([{"metric": "m", "value": 1.0, "unit": "weight", "probe": "mine"}])
    write_table(mine, out / "table.parquet")
    with pytest.raises(InputError, match="out holds something else than a comparison of pathways; choose another with `out`"):
        compared()
