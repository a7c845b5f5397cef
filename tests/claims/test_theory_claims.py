"""Claims about theory, entropy and later work: published numbers pass, reversed ones fail; what is measured for them."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from sinklab.claims._rates import course
from sinklab.claims._trigger import trained_numbers
from sinklab.claims.bos_removed import without_bos
from sinklab.claims.entropy_bound import LENGTHS, NORMS, measure, trained_rows
from sinklab.claims.massive_mean_against_zero import edited
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab_claims.reproduce.cells import base_config, resolved_changes
from sinklab_claims.reproduce.store import claim_called


def test_rates_of_the_gates_change_the_operation_alone():
    base = base_config("tiny")
    for variant in claim_called("gate_positions").variants[1:]:
        assert set(resolved_changes(base, variant)) == {"model.operation"}


# --- what is measured --------------------------------------------------------------------------------------------------------


def test_entropy_bound_is_measured_on_every_norm_and_length():
    numbers = measure(3, "tiny")["rows of scores"]
    assert len(LENGTHS) * len(NORMS) == 15
    assert numbers["largest_violation"] == max(0.0, -numbers["least_margin"]) < 1e-12
    assert 0 <= numbers["largest_gap_of_worst_row"] < 1e-12
    assert measure(3, "tiny")["rows of scores"] == numbers


def test_numbers_of_a_trigger_model_that_has_hardly_been_trained():
    numbers = trained_numbers("softmax", 0, layers=2, heads=2, cap=2)
    assert numbers["steps"] == 2
    assert numbers["sinking_heads"] == 0
    # Small maps attend evenly: the mean of 1/i over queries 2 to 16 but the trigger's, 8, is 0.1611.
    assert numbers["head_bos_weight_smallest"] == pytest.approx(0.161, abs=0.005)
    assert numbers["head_bos_weight_largest"] == pytest.approx(0.161, abs=0.005)
    assert "bos_weight_bound" not in numbers  # only one head has one


def test_the_relu_solution_is_measured_exactly(monkeypatch):
    module = __import__("sinklab.claims.trigger_relu", fromlist=["measure"])
    monkeypatch.setattr(module, "trained_numbers", lambda *_, **fields: {"layers": fields.get("layers", 1)})
    numbers = module.measure(0, "small")
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
    config = SimpleNamespace(
        training=SimpleNamespace(steps=100), schedule=SimpleNamespace(warmup_steps=0), model=SimpleNamespace(tokens_in_front=0)
    )
    assert course.of_diverged is True
    # 2.4 lies 0.4 above the least loss and is no spike, 2.6 is one, and what is no number is one.
    assert course(SimpleNamespace(table=table, config=config)) == {"least_loss": 2.0, "least_entropy": 0.2, "spikes": 2.0}


@pytest.fixture(scope="module")
def trained():
    """What the read-outs ask of a trained model, with random weights, BOS 0 in front of random rows."""
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SinkLM(
        SinkLMConfig(**shape, max_position_embeddings=64, position={"name": "learned"}, initializer_range=0.3)
    ).eval()
    rows = torch.randint(1, 40, (8, 64))
    rows[:, 0] = 0
    return SimpleNamespace(
        config=SimpleNamespace(model=Architecture(**shape), data=SimpleNamespace(held_out_rows=8)),
        loaded=SimpleNamespace(model=model, device=torch.device("cpu")),
        rows=lambda samples=100, seq_len=None: rows[:samples, :seq_len],
        front=0,
        context=64,
    )


def test_bound_is_measured_in_a_model(trained):
    numbers = trained_rows(trained)
    assert 0 < numbers["least_margin"] < 4.2  # ln 64, the largest entropy of all
    assert numbers["largest_violation"] == 0


def test_removal_of_bos_is_measured(trained):
    numbers = without_bos(trained)
    assert 0 < numbers["strongest"] < 1
    assert {"at_first_without", "at_first_replaced", "at_bos_moved", "at_first_moved"} < numbers.keys()
    assert {"loss_without", "loss_replaced", "loss_moved"} < numbers.keys()


def test_nothing_is_massive_in_a_small_random_model(trained):
    numbers = edited(trained)
    assert numbers["massive"] == 0
    assert numbers["largest"] > 0
    assert numbers["times_median"] > 1
