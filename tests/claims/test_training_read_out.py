"""Numbers of a training from its table: curves made by hand, and the real table of a short run."""

from __future__ import annotations

import math
from types import SimpleNamespace

from sinklab.results.table import make_table
from sinklab_claims.numbers.losses import curve_of, training


def read(rates, warmup: int, front: int = 0) -> dict[str, float]:
    """From ``(step, value)`` pairs, with rows of heads and of other positions that must not be taken."""
    rows = [{"step": step, "metric": "gu2024", "value": value, "key_position": front} for step, value in rates]
    rows += [{**row, "value": 99.0, "key_position": front + 1} for row in rows]
    rows += [{**row, "value": 88.0, "layer": 0, "head": 0} for row in rows]
    rows.append({"step": 0, "metric": "entropy", "value": 3.0})
    table = make_table(({**row, "unit": "x"} for row in rows), probe="by hand", version=1)
    config = SimpleNamespace(schedule=SimpleNamespace(warmup_steps=warmup), model=SimpleNamespace(tokens_in_front=front))
    return training(SimpleNamespace(table=table, config=config))


def test_the_course_of_the_rate():
    rates = [(0, 1.0), (20, 2.0), (40, 9.0), (60, 12.0), (80, 8.0), (100, 16.0)]
    # Of step 20, the first behind step 10.
    assert read(rates, 10) == {"sink_rate_start": 1.0, "sink_rate_warm": 2.0, "sink_rate_end": 16.0}
    assert read(rates, 10, front=2) == read(rates, 10)  # tokens in front are not the first


def test_what_an_early_end_has_not_reached_is_absent():
    assert read([(0, 0.0), (30, 4.0)], 50) == {"sink_rate_start": 0.0, "sink_rate_end": 4.0}
    assert read([], 0) == {}


def test_a_curve_is_in_order_and_what_is_no_number_is_none():
    rows = [{"step": step, "metric": "train_loss", "value": value} for step, value in ((20, 6.0), (10, 9.0), (30, math.nan))]
    table = make_table(({**row, "unit": "nats"} for row in rows), probe="by hand", version=1)
    found = curve_of(table, "train_loss")
    assert list(found) == [10, 20, 30]
    assert math.isnan(found[30])


def test_of_a_real_run(trained):
    assert training.of_diverged  # the table says most about runs that broke
    found, table = training(trained), trained.table
    last = table[(table["metric"] == "gu2024") & table["layer"].isna() & (table["key_position"] == 0) & (table["step"] == 12)]
    assert found["sink_rate_end"] == last["value"].item()
    assert set(found) == {"sink_rate_start", "sink_rate_warm", "sink_rate_end"}
