"""Numbers of a training from its table: curves made by hand, and the real table of a short run."""

from __future__ import annotations

import math

from sinklab.results.table import make_table
from sinklab_claims.numbers.training import numbers_of_table, training


def table_of(rates=(), losses=(), norms=(), weights=(), entropies=(), front: int = 0):
    """A long table from ``(step, value)`` pairs, with rows of heads and of other positions that must not be taken."""
    rows = [{"step": step, "metric": "gu2024", "value": value, "key_position": front} for step, value in rates]
    rows += [{**row, "value": 99.0, "key_position": front + 1} for row in rows]
    rows += [{**row, "value": 88.0, "layer": 0, "head": 0} for row in rows]
    for metric, pairs in (
        ("train_loss", losses),
        ("gradient_norm", norms),
        ("qiu2025_first_attention", weights),
        ("entropy", entropies),
    ):
        rows += [{"step": step, "metric": metric, "value": value} for step, value in pairs]
    return make_table(({**row, "unit": "x"} for row in rows), probe="by hand", version=1)


def test_the_course_of_the_rate():
    rates = [(0, 1.0), (20, 2.0), (40, 9.0), (60, 12.0), (80, 8.0), (100, 16.0)]
    found = numbers_of_table(table_of(rates, weights=[(0, 0.1), (40, 0.2), (100, 0.3)]), steps=100, warmup_steps=10)
    assert found == {
        "sink_rate_start": 1.0,
        "sink_rate_warm": 2.0,  # of step 20, the first behind step 10
        "sink_rate_quarter": 9.0,  # of step 40, the first behind step 25
        "sink_rate_half": 12.0,
        "sink_rate_end": 16.0,
        "first_attention_warm": 0.2,
        "first_attention_quarter": 0.2,
        "first_attention_half": 0.3,
        "first_attention_end": 0.3,
        "onset_share": 0.4,  # 9 is the first rate of at least 8
    }


def test_what_an_early_end_has_not_reached_is_absent():
    found = numbers_of_table(table_of([(0, 0.0), (30, 4.0)], losses=[(10, 5.0), (30, math.nan)]), steps=100, warmup_steps=0)
    assert found["sink_rate_quarter"] == found["sink_rate_end"] == 4.0
    assert "sink_rate_half" not in found
    assert found["loss_spikes"] == 1
    # A rate that ends at 0 has no onset, and an empty table has no numbers.
    found = numbers_of_table(table_of([(0, 0.0), (50, 3.0), (100, 0.0)]), steps=100, warmup_steps=0)
    assert found["sink_rate_end"] == 0
    assert "onset_share" not in found
    assert numbers_of_table(table_of(), steps=10, warmup_steps=0) == {}


def test_tokens_in_front_are_not_the_first():
    table = table_of([(0, 0.0), (100, 6.0)], weights=[(100, 0.9)], front=2)
    found = numbers_of_table(table, steps=100, warmup_steps=0, front=2)
    assert found["sink_rate_end"] == 6.0
    assert not any(metric.startswith("first_attention") for metric in found)  # the table has it of the learned token only


def test_spikes_are_counted_above_the_least_loss_so_far():
    losses = [(10, 9.0), (20, 6.0), (30, 6.5), (40, 6.6), (50, 5.0), (60, 5.6), (70, math.nan), (80, 5.4)]
    # Least before: 9, 6, 6, 6, 5, 5, 5. Above it by more than a half: 6.6 and 5.6; and what is no number.
    assert numbers_of_table(table_of(losses=losses), steps=80, warmup_steps=0)["loss_spikes"] == 3
    assert numbers_of_table(table_of(losses=losses), steps=80, warmup_steps=40)["loss_spikes"] == 2


def test_extremes():
    found = numbers_of_table(
        table_of(norms=[(10, 0.5), (20, 7.0), (30, math.nan)], entropies=[(0, 3.0), (10, 1.25), (20, 2.0)]),
        steps=30,
        warmup_steps=0,
    )
    assert found == {"grad_norm_largest": 7.0, "entropy_least": 1.25}


def test_of_a_real_run(trained):
    assert training.of_diverged  # the table says most about runs that broke
    found = training(trained)
    table = trained.table
    last = table[(table["metric"] == "gu2024") & table["layer"].isna() & (table["key_position"] == 0) & (table["step"] == 12)]
    assert found["sink_rate_end"] == last["value"].item()
    assert found["grad_norm_largest"] == table[table["metric"] == "gradient_norm"]["value"].max()
    assert {"sink_rate_start", "sink_rate_quarter", "first_attention_half", "entropy_least", "loss_spikes"} <= set(found)
