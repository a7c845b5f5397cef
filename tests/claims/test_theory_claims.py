"""Claims about theory, entropy and later work: published numbers pass, reversed ones fail; what is measured for them."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from sinklab.claims import backcopy_dormant as dormant
from sinklab.claims._rates import course
from sinklab.claims._trigger import trained_numbers
from sinklab.claims.backcopy_dormant_among_heads import TRIGGERS, copy_head
from sinklab.claims.bos_removed import without_bos
from sinklab.claims.context_length import LONG, SHORT, first_tokens
from sinklab.claims.entropy_bound import LENGTHS, NORMS, measure, trained_rows
from sinklab.claims.massive_mean_against_zero import edited
from sinklab.corpora import bigram_backcopy
from sinklab.models.architecture import Architecture
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.studies.backcopy.training import BackcopySettings
from sinklab_claims.contract.claim import SCALES
from sinklab_claims.reproduce.cells import base_config, configure, resolved_changes
from sinklab_claims.reproduce.store import claim_called


@pytest.mark.parametrize("scale", SCALES)
def test_contexts_have_equal_tokens_a_step(scale):
    base = base_config(scale)
    tokens = base.training.batch_size * base.model.max_position_embeddings
    for variant, factor in ((SHORT, 0.25), (LONG, 4)):
        config = configure(base, variant)
        assert config.model.max_position_embeddings == base.model.max_position_embeddings * factor
        assert config.training.batch_size * config.model.max_position_embeddings == tokens


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


def test_numbers_of_a_backcopy_model(monkeypatch):
    short = BackcopySettings(width=8, length=8, batch=2, steps=2, evaluations=2)
    monkeypatch.setattr(dormant, "SETTINGS", {"tiny": short})
    numbers = dormant.measure(0, "tiny")["softmax"]
    assert set(numbers) <= {metric.name for metric in dormant.METRICS}
    assert numbers["trigger_excess"] > 1
    assert claim_called("backcopy_dormant").costs.keys() == {"tiny", "small", "60m"}


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
    """What the read-outs ask of a trained model, with random weights, BOS 0 in front of random rows, tokens 1 to 3 triggers."""
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SinkLM(
        SinkLMConfig(**shape, max_position_embeddings=64, position={"name": "learned"}, initializer_range=0.3)
    ).eval()
    rows = torch.randint(1, 40, (8, 64))
    rows[:, 0] = 0
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: 1 + TRIGGERS.index(token))
    return SimpleNamespace(
        config=SimpleNamespace(model=Architecture(**shape), data=SimpleNamespace(held_out_rows=8)),
        loaded=SimpleNamespace(model=model, tokenizer=tokenizer, device=torch.device("cpu")),
        rows=lambda samples=100, seq_len=None: rows[:samples, :seq_len],
        front=0,
        context=64,
    )


def test_bound_is_measured_in_a_model(trained):
    numbers = trained_rows(trained)
    assert 0 < numbers["least_margin"] < 4.2  # ln 64, the largest entropy of all
    assert numbers["largest_violation"] == 0


def test_copy_head_is_the_one_of_the_maps(trained):
    model, rows = trained.loaded.model, trained.rows()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = torch.stack(model(rows, output_attentions=True, use_cache=False).attentions, 1)  # (rows, layers, heads, q, k)
    model.set_attn_implementation("sdpa")
    triggers = ((rows >= 1) & (rows <= 3))[:, 2:]
    previous = maps.diagonal(-1, -2, -1)[..., 1:] * triggers[:, None, None]
    by_row = previous.sum(-1) / triggers.sum(-1)[:, None, None]
    numbers = copy_head(trained)
    assert numbers["previous_at_trigger"] == pytest.approx(by_row.nanmean(0).max().item(), rel=1e-5)
    assert numbers.keys() == {"previous_at_trigger", "previous_elsewhere", "bos_at_trigger", "bos_elsewhere", "value_ratio"}


def test_triggers_are_those_of_the_corpus():
    assert TRIGGERS == bigram_backcopy.TRIGGERS


def test_removal_of_bos_is_measured(trained):
    numbers = without_bos(trained)
    assert 0 < numbers["strongest"] < 1
    assert {"at_first_without", "at_first_replaced", "at_bos_moved", "at_first_moved"} < numbers.keys()
    assert {"loss_without", "loss_replaced", "loss_moved"} < numbers.keys()


def test_first_tokens_are_read_in_rows_of_sixteen(trained):
    numbers = first_tokens(trained)
    assert numbers.keys() == {"first_attention_of_16", "sink_rate_of_16"}
    # Even rows of 1 to 16 keys have 0.211 on the first one; random scores scatter about it.
    assert 0.1 < numbers["first_attention_of_16"] < 0.4


def test_nothing_is_massive_in_a_small_random_model(trained):
    numbers = edited(trained)
    assert numbers["massive"] == 0
    assert numbers["largest"] > 0
    assert numbers["times_median"] > 1
