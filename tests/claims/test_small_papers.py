"""Claims of papers with few of them: the entropy bound, triggers, gates, BOS taken away, massive activations, false sinks."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from tests.claims.planted_models import by_position, drawn_rows, model_like, read_like

from sinklab_claims import ranmilo2026
from sinklab_claims.barbero2025 import without_bos
from sinklab_claims.yona2025 import COUNT, false_sinks
from sinklab_claims.zhai2023 import LENGTHS, NORMS, course, of_rows_of_scores


def test_entropy_bound_is_measured_on_every_norm_and_length():
    numbers = of_rows_of_scores(3, "tiny")["rows of scores"]
    assert len(LENGTHS) * len(NORMS) == 15
    assert numbers["largest_violation"] == max(0.0, -numbers["least_margin"]) < 1e-12
    assert 0 <= numbers["largest_gap_of_worst_row"] < 1e-12
    assert of_rows_of_scores(3, "tiny")["rows of scores"] == numbers


def test_numbers_of_a_trigger_model_that_has_hardly_been_trained():
    numbers = ranmilo2026.trained_numbers("softmax", 0, layers=2, heads=2, cap=2)
    assert numbers["steps"] == 2
    assert numbers["sinking_heads"] == 0
    # Small maps attend evenly: the mean of 1/i over queries 2 to 16 but the trigger's, 8, is 0.1611.
    assert numbers["head_bos_weight_largest"] == pytest.approx(0.161, abs=0.005)


def test_the_relu_solution_is_measured_exactly(monkeypatch):
    monkeypatch.setattr(ranmilo2026, "trained_numbers", lambda *_, **fields: {"layers": fields.get("layers", 1)})
    numbers = ranmilo2026.of_relu(0, "small")
    assert numbers["solution"]["max_error"] < 1e-6
    assert numbers["solution"]["bos_weight_largest"] == 0.0
    assert numbers["several heads"] == {"layers": 4}


def test_course_of_a_run_that_diverged():
    def row(metric, step, value):
        return {"metric": metric, "step": step, "value": value, "layer": None, "key_position": None}

    table = pd.DataFrame(
        [
            *(row("train_loss", step, loss) for step, loss in ((10, 3.0), (20, 2.0), (30, 2.4), (40, 2.6), (50, float("nan")))),
            *(row("entropy", step, entropy) for step, entropy in ((10, 2.0), (30, 0.2), (50, float("nan")))),
        ]
    )
    assert course.of_diverged is True
    assert course(SimpleNamespace(table=table)) == {"least_loss": 2.0, "least_entropy": 0.2}


@pytest.fixture(scope="module")
def trained():
    """Random weights, BOS 0 in front of random rows."""
    model = model_like(num_hidden_layers=2, position={"name": "learned"}, initializer_range=0.3)
    rows = torch.randint(1, 40, (8, 64))
    rows[:, 0] = 0
    return read_like(model, rows)


def test_removal_of_bos_is_measured(trained):
    numbers = without_bos(trained)
    assert 0 < numbers["strongest"] < 1
    assert {"at_first_without", "at_first_replaced", "at_bos_moved", "at_first_moved"} < numbers.keys()
    assert {"loss_without", "loss_replaced", "loss_moved"} < numbers.keys()


# --- false sinks --------------------------------------------------------------------------------------------------------------


def rows_with_bos() -> torch.Tensor:
    rows = drawn_rows()
    rows[:, 0] = 0
    return rows


def test_a_sink_that_is_its_token_is_split_by_more_of_them():
    """Nine keys have the score of BOS and all others none, so that each has a ninth of nearly everything."""
    numbers = false_sinks(read_like(by_position(8.0, token=0), rows_with_bos()))
    assert numbers["first_beside_text"] > 0.99
    assert numbers["first_beside_bos"] == pytest.approx(1 / (COUNT + 1), rel=0.01)
    assert numbers["taken_by_bos"] == pytest.approx(COUNT / (COUNT + 1), rel=0.01)
    assert numbers["taken_by_repeated"] < 0.01
    # No value carries anything, so neither do weights, wherever they are.
    assert numbers["cost_of_bos"] == numbers["cost_of_repeated"] == 0.0


def test_a_sink_that_is_its_position_stays_whole():
    numbers = false_sinks(read_like(by_position(8.0), rows_with_bos()))
    assert numbers["first_beside_bos"] == pytest.approx(numbers["first_beside_text"], rel=1e-5)
    assert numbers["taken_by_bos"] < 0.01


def test_without_a_bos_there_are_no_further_ones():
    trained = read_like(by_position(8.0), drawn_rows())
    trained.bos = None
    assert not any("bos" in name for name in false_sinks(trained))
