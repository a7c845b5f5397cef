"""Claims of Gu et al. 2024 about optimisation, data and loss: published numbers pass, reversed ones fail; their read-outs."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from tests.claims.made_numbers import over_seeds

from sinklab.attention.call import Statistics
from sinklab.claims.fixed_token import TOKEN
from sinklab.claims.prefix_lm import PREFIX, RowRates, prefix_rates
from sinklab.claims.unique_data import overfitting
from sinklab.claims.window_attention import ExcessOfOldest, excess_weights
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.reproduction.cells import configure, resolved_changes
from sinklab.reproduction.claim import SCALES
from sinklab.reproduction.scales import base_config
from sinklab.reproduction.verdict import judge
from sinklab.reproduction.work import claim_called

RATE = "sink_rate"

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    # The rate at a quarter of the steps is not published; it is near 0 shortly before.
    "emergence": {"baseline": {"sink_rate_start": 0, "sink_rate_quarter": 9, "sink_rate_end": 18.18}},
    "learning_rate": {"rate x1/4": {RATE: 2.90}, "baseline": {RATE: 18.18}, "rate x2": {RATE: 32.23}},
    "equal_learning_rate_times_steps": {
        "rate x2, steps x1/2": {RATE: 23.44, "held_out_loss": 3.79},
        "rate x1/2, steps x2": {RATE: 16.81, "held_out_loss": 3.68},
    },
    "batch_size": {"batch x1/2": {RATE: 17.19}, "baseline": {RATE: 18.18}, "batch x2": {RATE: 16.19}},
    "unique_data": {"baseline": {RATE: 18.18}, "0.05 of the rows": {RATE: 15}, "0.005 of the rows": {RATE: 0.9}},
    "fixed_token": {
        "fixed_first": {RATE: 74.11, "sink_rate_1": 0, "sink_rate_2": 0},
        "fixed_second": {RATE: 0, "sink_rate_1": 69.03, "sink_rate_2": 0},
        "fixed_third": {RATE: 0, "sink_rate_1": 0, "sink_rate_2": 69.64},
    },
    "random_first_tokens": {
        "no_bos": {RATE: 18.18, "sink_rate_max": 18.18},
        "random_first": {RATE: 27.03, "sink_rate_max": 27.03},
        "random_first_two": {RATE: 1.98, "sink_rate_1": 14.08, "sink_rate_max": 14.08},
    },
    "weight_decay": {"decay 0": {RATE: 15.20}, "baseline": {RATE: 18.18}, "decay 1": {RATE: 37.71}, "decay 10": {RATE: 0.01}},
    "prefix_lm": {"baseline": {RATE: 18.18}, "prefix of 5": {"prefix_largest": 21, "prefix_second": 0}},
    # Not published as numbers.
    "window_attention": {
        "baseline": {RATE: 18.18},
        "window of 1/2": {"excess_of_first": 0.2, "excess_inside": 0.0},
        "window of 1/16": {"excess_of_first": 0.0},
    },
}

REVERSED: list[tuple[str, str, str, float]] = [
    ("emergence", "baseline", "sink_rate_start", 18),
    ("emergence", "baseline", "sink_rate_end", 3),
    ("emergence", "baseline", "sink_rate_quarter", 18),
    ("learning_rate", "rate x1/4", RATE, 25),
    ("learning_rate", "rate x2", RATE, 10),
    ("equal_learning_rate_times_steps", "rate x1/2, steps x2", RATE, 25),
    ("equal_learning_rate_times_steps", "rate x1/2, steps x2", "held_out_loss", 3.9),
    ("batch_size", "batch x1/2", RATE, 30),
    ("batch_size", "batch x2", RATE, 8),
    ("unique_data", "0.005 of the rows", RATE, 18),
    ("unique_data", "0.005 of the rows", RATE, 10),  # weaker, and still more than half
    ("fixed_token", "fixed_first", RATE, 0),
    ("fixed_token", "fixed_second", "sink_rate_1", 0),
    ("fixed_token", "fixed_third", "sink_rate_2", 0),
    ("fixed_token", "fixed_first", "sink_rate_1", 20),
    ("fixed_token", "fixed_first", "sink_rate_2", 20),
    ("fixed_token", "fixed_second", RATE, 20),
    ("fixed_token", "fixed_second", "sink_rate_2", 20),
    ("fixed_token", "fixed_third", RATE, 20),
    ("fixed_token", "fixed_third", "sink_rate_1", 20),
    ("random_first_tokens", "random_first", RATE, 10),
    ("random_first_tokens", "random_first_two", RATE, 20),
    ("weight_decay", "decay 0", RATE, 40),
    ("weight_decay", "decay 10", RATE, 40),
    ("prefix_lm", "prefix of 5", "prefix_largest", 1),
    ("prefix_lm", "prefix of 5", "prefix_second", 15),
    ("window_attention", "window of 1/2", "excess_of_first", 0),
    ("window_attention", "window of 1/2", "excess_inside", 0.2),
    ("window_attention", "window of 1/16", "excess_of_first", 0.2),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_a_reproduction(name):
    claim = claim_called(name)
    judgement = judge(claim.parts, claim.presupposes, over_seeds(PUBLISHED[name]))
    assert judgement.verdict == "reproduced", judgement.reason


@pytest.mark.parametrize(("name", "label", "metric", "value"), REVERSED)
def test_a_reversed_part_is_no_reproduction(name, label, metric, value):
    claim, published = claim_called(name), PUBLISHED[name]
    changed = published | {label: published[label] | {metric: value}}
    assert judge(claim.parts, claim.presupposes, over_seeds(changed)).verdict == "not reproduced"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_part_has_a_reversal(name):
    claim, reached = claim_called(name), set()
    for reversed_name, label, metric, value in REVERSED:
        if reversed_name == name:
            changed = PUBLISHED[name] | {label: PUBLISHED[name][label] | {metric: value}}
            findings = judge(claim.parts, claim.presupposes, over_seeds(changed)).findings
            reached |= {finding.part for finding in findings if finding.verdict == "not reproduced"}
    assert reached == set(claim.parts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_without_what_it_presupposes_a_claim_is_not_tested(name):
    claim = claim_called(name)
    nothing = {label: dict.fromkeys(of, 0.0) for label, of in PUBLISHED[name].items()}
    judgement = judge(claim.parts, claim.presupposes, over_seeds(nothing))
    assert judgement.verdict == ("not tested at this scale" if claim.presupposes else "not reproduced")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_variants_are_configurations_at_every_scale(name, scale):
    claim, base = claim_called(name), base_config(scale)
    made = {variant.label: configure(base, variant).model_dump_json() for variant in claim.variants}
    assert len(set(made.values())) == len(made), "two variants are the same run"
    for variant in claim.variants:
        if variant.label == "baseline":
            assert resolved_changes(base, variant) == {}


def test_rate_times_steps_is_one_number():
    base = base_config("tiny")
    for variant in claim_called("equal_learning_rate_times_steps").variants:
        config = configure(base, variant)
        assert config.optimizer.learning_rate * config.training.steps == base.optimizer.learning_rate * base.training.steps


def test_fixed_token_is_no_special_one():
    assert TOKEN > 1  # BOS and EOS of the trained tokenizers; padding in that of the Pile
    assert base_config("tiny").data.vocab_size > TOKEN


def test_excess_of_weights_by_hand():
    """A window of 2 and three queries. Head 1 looks at the oldest key that it sees, head 2 at all evenly, head 3 at itself."""
    oldest = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    even = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    own = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    for heads, expected in (([oldest], 1.0), ([even], 0.0), ([own], -1.0), ([oldest, even], 0.5)):
        weights = torch.tensor(heads)[None]
        watcher = ExcessOfOldest(window=2)
        watcher.block = 2  # the last query is in a block of its own
        watcher.update(SimpleNamespace(q_len=3, weights=lambda start, stop, weights=weights: weights[:, :, start:stop]), None)
        assert watcher.by_query[0][1:].tolist() == [expected, expected]


def test_rates_of_single_rows_by_hand():
    """Two layers of two heads, two rows. The first row's sink is on token 0 in three heads, the second's on token 1 in two."""
    count = torch.tensor([4.0, 3.0, 2.0]).expand(1, 1, 3)
    first_layer = torch.tensor([[[0.9, 0.0, 0.5], [0.9, 0.0, 0.5]], [[0.1, 0.5, 0.9], [0.1, 0.3, 0.9]]])
    second_layer = torch.tensor([[[0.4, 0.0, 0.5], [0.2, 0.0, 0.5]], [[0.1, 0.5, 0.9], [0.29, 0.1, 0.9]]])
    watcher = RowRates(prefix=2)
    for mean in (first_layer, second_layer):
        watcher.update(SimpleNamespace(), Statistics(column_share=mean * count, column_count=count))
    assert watcher.rates().tolist() == [[75.0, 0.0], [0.0, 50.0]]


def trained_like(**fields):
    """What the read-outs ask of a trained model, with random weights and random rows."""
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SinkLM(SinkLMConfig(**shape, max_position_embeddings=64, **fields)).eval()
    config = SimpleNamespace(model=model.config, data=SimpleNamespace(held_out_rows=8))
    rows = torch.randint(40, (8, 64))
    return SimpleNamespace(
        config=config, loaded=SimpleNamespace(model=model), rows=lambda samples, length: rows[:samples, :length]
    )


def test_window_read_out_of_a_model_that_attends_evenly():
    trained = trained_like(window=8)
    for name, weight in trained.loaded.model.named_parameters():
        if "q_proj" in name:
            weight.data.zero_()
    # Float32 weights of at most 1, off by a few units of 6e-8, over 1 - 1/n of at least a half.
    assert excess_weights(trained) == {
        "excess_of_first": pytest.approx(0, abs=1e-6),
        "excess_inside": pytest.approx(0, abs=1e-6),
    }
    assert excess_weights(trained_like()) == {}


def test_prefix_read_out_of_a_model_without_a_sink():
    numbers = prefix_rates(trained_like(**{key.removeprefix("model."): value for key, value in PREFIX.changes.items()}))
    assert numbers == {"prefix_largest": 0.0, "prefix_second": 0.0}  # 64 queries over 40 random tokens: about 1/20 each
    assert prefix_rates(trained_like()) == {}


def test_overfitting_is_the_rise_since_the_least_loss():
    table = pd.DataFrame(
        {
            "probe": ["sink_readout"] * 4 + ["training"],
            "metric": ["loss", "loss", "loss", "sink_loss_gap", "train_loss"],
            "step": [600, 200, 400, 400, 400],
            "value": [2.5, 3.0, 2.25, 0.2, 0.1],
        }
    )
    assert overfitting(SimpleNamespace(table=table)) == {"overfitting": 0.25}
