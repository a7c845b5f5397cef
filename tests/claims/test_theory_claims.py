"""Claims about theory, entropy and later work: published numbers pass, reversed ones fail; what is measured for them."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from sinklab.backcopy.training import Setting
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
from sinklab.reproduction.cells import configure, resolved_changes
from sinklab.reproduction.claim import SCALES
from sinklab.reproduction.scales import base_config
from sinklab.reproduction.verdict import judge
from sinklab.reproduction.work import claim_called

RATE, WEIGHT = "sink_rate", "first_attention"
SOLVED = {"max_error": 0.004}

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "trigger_softmax_single": {
        "softmax to 0.1": {"bos_weight_min": 0.99},
        "softmax to 0.03": {"bos_weight_min": 0.995},
        "softmax": {"bos_weight_min": 0.9986} | SOLVED,
    },
    "trigger_softmax_deep": {"softmax": {"head_bos_weight_largest": 0.999} | SOLVED},
    "trigger_relu": {
        "solution": {"max_error": 0.0, "bos_weight_largest": 0.0},
        "one head": {"head_bos_weight_largest": 0.0} | SOLVED,
        "several heads": {"head_bos_weight_largest": 0.0032} | SOLVED,
    },
    "entropy_bound": {
        "rows of scores": {"largest_violation": 0.0, "largest_gap_of_worst_row": 0.0},
        "baseline": {"largest_violation": 0.0},
    },
    # Drawn and not tabulated: entropies next to 0 with losses that do not come down, against entropies that stay up.
    "entropy_collapse": {
        "baseline": {"least_loss": 2.0, "least_entropy": 2.0},
        "rate x16": {"least_loss": 3.0, "least_entropy": 0.1},
    },
    "collapse_is_unstable": {"baseline": {"least_loss": 2.0}, "rate x4": {"least_loss": 3.0, "least_entropy": 0.1}},
    "sigma_reparam_prevents": {
        "baseline": {"least_loss": 2.0},
        "rate x16": {"least_loss": 3.0, "least_entropy": 0.1},
        "rate x16, sigma_reparam": {"least_loss": 2.0, "least_entropy": 2.0},
    },
    "sink_is_a_role": {
        "fixed_second": {RATE: 0, "sink_rate_1": 69.03},
        "fixed_third": {RATE: 0, "sink_rate_2": 69.64},
        "another token fixed_second": {RATE: 0, "sink_rate_1": 69.03},
    },
    "bos_removed": {"baseline": {RATE: 50, "strongest": 0.8, "at_first_without": 0.05, "loss_without": 1.0}},
    "sinks_and_outliers_part": {
        "baseline": {RATE: 46.0, WEIGHT: 0.333, "massive_ratio": 3818},
        "sandwich norm": {RATE: 44.7, "massive_ratio": 520},
        "softmax plus one": {WEIGHT: 0.022, "massive_ratio": 3000},
    },
    "gate_positions": {
        "baseline": {RATE: 46, WEIGHT: 0.467},
        "gate, element-wise": {WEIGHT: 0.048},
        "gate, head-wise": {WEIGHT: 0.073},
        "gate, shared by heads": {WEIGHT: 0.301},
        "gate, input-independent": {WEIGHT: 0.364},
        "gate, at least a half": {WEIGHT: 0.451},
    },
    "softpick_table": {
        "softpick": {RATE: 0.0},
        "gate, element-wise": {RATE: 2.0},
        "sink logit": {RATE: 8.78},
        "softmax plus one": {RATE: 16.36},
        "baseline": {RATE: 34.89},
    },
    # Of residual norms and context lengths only figures are published.
    "adam_against_sgd": {
        "baseline": {"hidden_ratio": 20, "held_out_loss": 2.0},
        "sgd": {"hidden_ratio": 1.2, "held_out_loss": 2.0},
    },
    "sgd_keeps_the_sink": {"baseline": {RATE: 40, "held_out_loss": 2.0}, "sgd": {RATE: 40, "held_out_loss": 2.0}},
    "context_length": {
        "context / 4": {"first_attention_of_16": 0.1},
        "baseline": {RATE: 20, "first_attention_of_16": 0.2},
        "context x 4": {"first_attention_of_16": 0.4},
    },
    "backcopy_dormant": {
        "softmax": {
            "trigger_excess": 0.01,
            "previous_weight_trigger": 0.99,
            "bos_weight": 0.99,
            "bos_weight_trigger": 0.0,
            "value_ratio": 0.1,
        }
    },
    "backcopy_dormant_among_heads": {
        "baseline": {"previous_at_trigger": 0.9, "bos_elsewhere": 0.9, "bos_at_trigger": 0.0, "value_ratio": 0.1}
    },
    "massive_mean_against_zero": {"baseline": {"massive": 4, "deviation": 0.05, "zero": 5.0, "mean": 0.001}},
}

REVERSED: list[tuple[str, str, str, float]] = [
    ("trigger_softmax_single", "softmax", "bos_weight_min", 0.16),
    ("trigger_softmax_single", "softmax", "bos_weight_min", 0.9),
    ("trigger_softmax_deep", "softmax", "head_bos_weight_largest", 0.16),
    ("trigger_relu", "solution", "max_error", 0.03),
    ("trigger_relu", "solution", "bos_weight_largest", 0.01),
    ("trigger_relu", "one head", "head_bos_weight_largest", 0.99),
    ("trigger_relu", "several heads", "head_bos_weight_largest", 0.16),
    ("entropy_bound", "rows of scores", "largest_violation", 0.001),
    ("entropy_bound", "rows of scores", "largest_gap_of_worst_row", 0.001),
    ("entropy_bound", "baseline", "largest_violation", 0.001),
    ("entropy_collapse", "rate x16", "least_entropy", 2.0),
    ("collapse_is_unstable", "rate x4", "least_loss", 2.0),
    ("sigma_reparam_prevents", "rate x16, sigma_reparam", "least_loss", 3.0),
    ("sigma_reparam_prevents", "rate x16, sigma_reparam", "least_entropy", 0.1),
    ("sink_is_a_role", "fixed_second", RATE, 69),
    ("sink_is_a_role", "fixed_third", "sink_rate_2", 0),
    ("sink_is_a_role", "another token fixed_second", "sink_rate_1", 0),
    ("bos_removed", "baseline", "at_first_without", 0.7),
    ("bos_removed", "baseline", "loss_without", 0.0),
    ("sinks_and_outliers_part", "sandwich norm", RATE, 0),
    ("sinks_and_outliers_part", "sandwich norm", "massive_ratio", 3800),
    ("sinks_and_outliers_part", "softmax plus one", WEIGHT, 0.3),
    ("sinks_and_outliers_part", "softmax plus one", "massive_ratio", 100),
    ("gate_positions", "gate, element-wise", WEIGHT, 0.4),
    ("gate_positions", "gate, head-wise", WEIGHT, 0.4),
    ("gate_positions", "gate, shared by heads", WEIGHT, 0.05),
    ("gate_positions", "gate, input-independent", WEIGHT, 0.05),
    ("gate_positions", "gate, at least a half", WEIGHT, 0.05),
    ("softpick_table", "softpick", RATE, 20),
    ("softpick_table", "softmax plus one", RATE, 34),
    ("adam_against_sgd", "sgd", "hidden_ratio", 20),
    ("sgd_keeps_the_sink", "sgd", RATE, 0),
    ("context_length", "context x 4", "first_attention_of_16", 0.05),
    ("backcopy_dormant", "softmax", "previous_weight_trigger", 0.1),
    ("backcopy_dormant", "softmax", "bos_weight", 0.1),
    ("backcopy_dormant", "softmax", "bos_weight_trigger", 0.9),
    ("backcopy_dormant", "softmax", "value_ratio", 1.0),
    ("backcopy_dormant_among_heads", "baseline", "bos_elsewhere", 0.1),
    ("backcopy_dormant_among_heads", "baseline", "bos_at_trigger", 0.9),
    ("backcopy_dormant_among_heads", "baseline", "value_ratio", 1.0),
    ("massive_mean_against_zero", "baseline", "zero", 0.0),
    ("massive_mean_against_zero", "baseline", "mean", 5.0),
]

WHOLE_TABLE = {"softpick": 34.89, "gate, element-wise": 16.36, "sink logit": 8.78, "softmax plus one": 2.0, "baseline": 0.1}


def over_seeds(numbers):
    """Three seeds that differ by a ten-thousandth, so that intervals have a width."""
    return {
        seed: {label: {metric: value * (1 - seed / 10_000) for metric, value in of.items()} for label, of in numbers.items()}
        for seed in range(3)
    }


def changed(name, label, metric, value):
    published = PUBLISHED[name]
    return over_seeds(published | {label: published[label] | {metric: value}})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_a_reproduction(name):
    claim = claim_called(name)
    judgement = judge(claim.parts, claim.presupposes, over_seeds(PUBLISHED[name]))
    assert judgement.verdict == "reproduced", judgement


@pytest.mark.parametrize(("name", "label", "metric", "value"), REVERSED)
def test_a_reversed_number_is_no_reproduction(name, label, metric, value):
    claim = claim_called(name)
    assert judge(claim.parts, claim.presupposes, changed(name, label, metric, value)).verdict == "not reproduced"


def test_every_part_has_a_reversal():
    for name in PUBLISHED:
        claim, reached = claim_called(name), set()
        for _, label, metric, value in (row for row in REVERSED if row[0] == name):
            findings = judge(claim.parts, (), changed(name, label, metric, value)).findings
            reached |= {finding.part.says for finding in findings if finding.verdict == "not reproduced"}
        if name == "softpick_table":  # its order takes more than one number to turn round
            table = over_seeds({label: {RATE: rate} for label, rate in WHOLE_TABLE.items()})
            reached |= {one.part.says for one in judge(claim.parts, (), table).findings if one.verdict == "not reproduced"}
        assert reached == {part.says for part in claim.parts}, name


@pytest.mark.parametrize(
    ("name", "label", "metric", "value"),
    [
        ("trigger_softmax_single", "softmax", "max_error", 0.5),
        ("trigger_softmax_deep", "softmax", "max_error", 0.5),
        ("trigger_relu", "several heads", "max_error", 0.5),
        ("entropy_collapse", "rate x16", "least_loss", 2.0),
        ("sigma_reparam_prevents", "rate x16", "least_loss", 2.0),
        ("collapse_is_unstable", "rate x4", "least_entropy", 2.0),
        ("bos_removed", "baseline", RATE, 0.0),
        ("sinks_and_outliers_part", "baseline", "massive_ratio", 10.0),
        ("gate_positions", "baseline", RATE, 0.0),
        ("softpick_table", "baseline", RATE, 0.0),
        ("adam_against_sgd", "baseline", "hidden_ratio", 1.0),
        ("adam_against_sgd", "sgd", "held_out_loss", 3.0),
        ("sgd_keeps_the_sink", "sgd", "held_out_loss", 3.0),
        ("context_length", "baseline", RATE, 0.0),
        ("backcopy_dormant", "softmax", "trigger_excess", 2.0),
        ("backcopy_dormant_among_heads", "baseline", "previous_at_trigger", 0.1),
        ("massive_mean_against_zero", "baseline", "massive", 0.0),
        ("massive_mean_against_zero", "baseline", "deviation", 0.0),
    ],
)
def test_a_claim_about_nothing_is_not_tested(name, label, metric, value):
    claim = claim_called(name)
    judgement = judge(claim.parts, claim.presupposes, changed(name, label, metric, value))
    assert judgement.verdict == "not tested at this scale"


@pytest.mark.parametrize("name", PUBLISHED)
def test_variants_are_configurations_at_every_scale(name):
    claim = claim_called(name)
    for scale in claim.costs:
        assert scale in SCALES
        base = base_config(scale)
        made = {variant.label: configure(base, variant).model_dump_json() for variant in claim.variants}
        assert len(set(made.values())) == len(made), "two variants are the same run"
        if "baseline" in made:
            assert made["baseline"] == base.model_dump_json()


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
    short = Setting(width=8, length=8, batch=2, steps=2, readouts=2)
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
