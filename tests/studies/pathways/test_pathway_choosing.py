"""A learning rate for each operation on seeds of its own, as many parameters for all, and what is trained for that."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab.results.progress import duration
from sinklab_claims.pathways import operations, runs
from sinklab_claims.pathways.operations import TOLERANCE, matched_widths, parameters_of, pathways_of
from sinklab_claims.pathways.runs import FACTORS, SELECTION_SEEDS, Choice

SEEDS = SELECTION_SEEDS["tiny"]


def choice(*losses):
    """Five losses, one for each factor, the same on both seeds; a pair gives them by seed."""
    pairs = [loss if isinstance(loss, tuple) else (loss, loss) for loss in losses]
    return Choice({factor: dict(zip(SEEDS, pair, strict=True)) for factor, pair in zip(FACTORS, pairs, strict=True)}, SEEDS)


def test_the_lowest_mean_decides():
    found = choice(2.3, 2.2, (2.2, 2.0), (1.9, 2.25), 2.4)
    assert found.factor == 2.0  # 2.075, where the scale's rate has 2.1, although its second seed is the better one
    assert found.end == ""
    assert found.numbers == {"chosen_factor": 2.0, "rate_range": pytest.approx(2.4 - 2.075), "rate_diverged": 0.0}
    assert [choice(*losses).end for losses in ((5, 4, 3, 2, 1), (1, 2, 3, 4, 5))] == ["highest", "lowest"]


def test_a_rate_at_which_one_training_diverges_is_out():
    found = choice(2.3, 2.2, 2.1, 2.0, (1.0, None))
    assert (found.factor, found.end) == (2.0, "")  # what diverges bounds the range
    assert found.numbers["rate_diverged"] == pytest.approx(0.1)
    assert found.numbers["rate_range"] == pytest.approx(0.3)


def test_without_all_trainings_nothing_is_chosen():
    found = choice(2.3, 2.2, 2.1, 2.0, 2.2)
    del found.losses[4.0][SEEDS[0]]
    assert found.missing == 1
    assert found.factor is None
    assert found.numbers == {}
    assert choice(None, None, None, None, None).factor is None


@pytest.fixture
def asked():
    pathways = pathways_of([{"name": "gated"}])
    return runs.Design(pathways, {"softmax": 128, "gated": 85}, "tiny", "bos", [0, 1, 2, 3])


def test_what_is_trained_to_choose_and_to_evaluate(asked):
    tried = runs.selection_cells(asked)
    assert {seed for cells in tried.values() for _, seed in cells} == set(SEEDS)
    assert {cell.config.training.seed for cells in tried.values() for cell in cells.values()} == set(SEEDS)
    rates = [cells["gated", 1000].config.optimizer.learning_rate for cells in tried.values()]
    assert rates == [0.0025, 0.005, 0.01, 0.02, 0.04]
    cells = runs.evaluation_cells(asked, {"softmax": 1.0, "gated": 4.0})
    assert cells["chosen"]["softmax", 3].name == cells["scale"]["softmax", 3].name  # trained once
    chosen = cells["chosen"]["gated", 3].config
    assert (chosen.optimizer.learning_rate, chosen.model.intermediate_size, chosen.training.seed) == (0.04, 85, 3)
    assert cells["scale"]["gated", 3].config.optimizer.learning_rate == 0.01
    assert sorted(seed for label, seed in cells["longer"] if label == "gated") == [0, 1, 2]
    assert cells["longer"]["gated", 0].config.model.position == {"name": "alibi"}
    without = runs.evaluation_cells(asked, {"softmax": 1.0})
    assert {label for label, _ in without["chosen"]} == {"softmax"}
    assert ("gated", 0) in without["scale"]


def test_the_choice_sees_nothing_but_its_own_seeds(asked, monkeypatch, tmp_path):
    """Gated is best at four times the rate on the seeds of the selection, and at the scale's on those of the evaluation."""
    stages = []

    def train(cells, read, **options):
        stages.append(cells)
        return SimpleNamespace(folder=tmp_path, outcome=lambda name: "finished"), {}

    def numbers(folder, read_outs):
        config = next(cells[folder.name] for cells in stages if folder.name in cells).config
        factor, seed = config.optimizer.learning_rate / 0.01, config.training.seed
        gated = config.model.operation["name"] == "gated"
        if seed in SEEDS:
            return {"diverged": 0.0, "held_out_loss": 2.0 - 0.1 * factor if gated else 2.0 + abs(factor - 1)}
        return {"diverged": 0.0, "held_out_loss": 1.0 + factor if gated else 1.9}

    monkeypatch.setattr(runs.work, "train_and_read", train)
    monkeypatch.setattr(runs.work, "read_numbers", numbers)
    found = runs.train_and_read(asked, store=tmp_path, cache=tmp_path, jobs=1, retries=0, ray=None, progress=False)
    assert {cell.config.training.seed for cell in stages[0].values()} == set(SEEDS)
    assert {cell.config.training.seed for cell in stages[1].values()} == {0, 1, 2, 3}
    assert (found.choices["gated"].factor, found.choices["gated"].end) == (4.0, "highest")
    assert found.choices["softmax"].factor == 1.0
    gated = found.numbers[0]["gated"]
    assert (gated["held_out_loss"], gated["scale_rate_loss"], gated["tuning_gain"]) == (5.0, 2.0, -3.0)
    assert set(found.numbers) == {0, 1, 2, 3}
    assert found.errors == []
    assert set(found.cells["rates"]["gated"]) >= {"0.25 seed 1000", "4 seed 1001"}


def test_a_selection_that_is_not_whole_is_an_error(asked, monkeypatch, tmp_path):
    def train(cells, read, **options):
        return SimpleNamespace(folder=tmp_path, outcome=lambda name: None if "seed1000" in name else "finished"), {}

    monkeypatch.setattr(runs.work, "train_and_read", train)
    monkeypatch.setattr(runs.work, "read_numbers", lambda folder, read_outs: {"diverged": 0.0, "held_out_loss": 2.0})
    found = runs.train_and_read(asked, store=tmp_path, cache=tmp_path, jobs=1, retries=0, ray=None, progress=False)
    assert found.errors == [
        f"{label}: no learning rate is chosen, since 5 trainings of the selection are missing; run it again"
        for label in ("softmax", "gated")
    ]
    assert "held_out_loss" not in found.numbers[0]["gated"]


def test_how_much_it_is(asked):
    # 2 operations at 5 rates on 2 seeds; 8 evaluated, 8 at the scale's rate and 6 with ALiBi, of 17 s; 8 models of 21 s.
    assert runs.foreseen(asked) == (
        "2 operations, base bos: at most 42 trainings, 20 of them to choose learning rates; and 8 of the trigger task; "
        f"{duration(42 * 17 + 8 * 21)} of one core; what is there already is not done again"
    )
    one = dataclasses.replace(asked, pathways=asked.pathways[:1], seeds=[0], rate=1.0)
    assert runs.foreseen(one).startswith("1 operation, base bos: at most 1 training; about ")
    assert "of one data-centre GPU" in runs.foreseen(dataclasses.replace(asked, scale="medium"))


def test_parameters_are_matched():
    config = backcopy_tiny()
    pathways = pathways_of([{"name": "gated"}, {"name": "key_bias"}])
    widths = matched_widths(pathways, config)
    # A gate of 64 inputs on each of 128 coordinates in two layers is 16,384 numbers; a unit of width has 3 · 64 in two layers.
    assert widths == {"softmax": 128, "gated": 128 - round(16_384 / 384), "key_bias": 128}
    reference = parameters_of(pathways[0], config, 128)
    fields = {**config.model.model_dump(), "vocab_size": config.data.vocab_size}
    assert reference == sum(parameter.numel() for parameter in SinkLM(SinkLMConfig(**fields)).parameters())
    for pathway in pathways:
        assert abs(parameters_of(pathway, config, widths[pathway.label]) / reference - 1) <= TOLERANCE


def test_parameters_that_cannot_be_matched_are_refused(monkeypatch):
    config = backcopy_tiny()
    config = config.model_copy(update={"model": config.model.model_copy(update={"intermediate_size": 16})})
    with pytest.raises(
        ConfigurationError, match=r"operation gated has \+16,384 parameters beside the .* compare it at another"
    ):
        matched_widths(pathways_of([{"name": "gated"}]), config)
    monkeypatch.setattr(operations, "TOLERANCE", 0.0005)  # less than half of a unit of width
    with pytest.raises(ConfigurationError, match="operation gated has"):
        matched_widths(pathways_of([{"name": "gated"}]), backcopy_tiny())
