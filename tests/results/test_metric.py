"""Every number has one declaration, and whoever declares a second one under its name is told."""

from __future__ import annotations

import re

import pytest

from sinklab.cli.catalogue import every_metric
from sinklab.errors import ContractError
from sinklab.registry import KINDS
from sinklab.results.metric import (
    FRACTION,
    LOSS,
    PERCENTAGE,
    Metric,
    catalogue,
    declared,
    definitions,
    definitions_of,
    extremes_of,
    metrics_of,
)
from sinklab.results.table import make_table


@pytest.fixture(scope="module")
def found() -> dict[str, Metric]:
    return every_metric()


def test_the_whole_tree_has_one_definition_under_each_name(found):
    assert found["loss"] is LOSS
    assert found["gu2024"] in metrics_of("probes", "sink_rate")
    assert declared("gu2024") is found["gu2024"]
    assert declared("nobody_has_declared_it") is None
    of_tests = {"t", "mean row mass"}  # declared by tests that ran before in this process
    assert all(metric.unit and metric.text.endswith(".") for metric in found.values() if metric.text not in of_tests)


def test_a_share_is_declared_as_one(found):
    """Over seeds its interval stays between its ends, and does so by the declared range alone."""
    shares = {name for name, one in found.items() if one.unit in ("fraction", "percent")}
    ranged = {name for name, one in found.items() if one.range in (FRACTION, PERCENTAGE)}
    gained = {"freed_to_first", "freed_to_own", "freed_to_content"}  # by what it gains, a key can lose
    beyond = {"excess_of_first", "excess_inside", "left_by_one", "deviation"}  # less than an even share, quotients
    others = {"output_gain", "lm_eval_score"}  # of gates and of metrics that others write
    assert shares - ranged <= gained | beyond | others


def test_an_extreme_is_one_over_seeds(found):
    """What a text calls the largest or least of a run is that of all runs; a mean of extremes, or a spread, is a mean."""
    largest, least = (
        {name for name, metric in found.items() if re.match(begins, metric.text) or name.endswith(ends)}
        for begins, ends in (
            (r"(Largest|Highest|Maximum|Worst)\b", "_largest"),
            (r"(Least|Smallest|Lowest|Minimum)\b", "_smallest"),
        )
    )
    rates = {"sink_rate_max", "prefix_largest", "massive_ratio"}  # of shares and means over rows
    means = {"head_bos_weight_largest", "head_bos_weight_smallest"}  # of one head
    spreads = {"change_with_length", "rate_range"}
    violations = {"largest_violation", "bound_violation"} & found.keys()
    extremes = {how: {name for name, metric in found.items() if metric.over_seeds == how} for how in ("max", "min")}
    assert extremes == {"max": (largest | violations) - rates - spreads - means, "min": least - means}


@pytest.mark.parametrize("plural", ["probes", "read_outs"])
def test_a_plug_in_has_its_metrics(plural, found):
    for name in KINDS[plural]:
        assert metrics_of(plural, name)
        assert all(found[metric.name] is metric for metric in metrics_of(plural, name))


def test_a_name_is_declared_once():
    first = Metric("planted_once", "nats", "t")
    assert Metric("planted_once", "nats", "t") == first  # as where a file is imported again
    with pytest.raises(ContractError, match="metric 'planted_once' is declared twice, as 't' and as 'other'"):
        Metric("planted_once", "nats", "other")
    derived = first.bound("low"), first.of("bits"), first.named("planted_other")
    assert [(one.name, one.unit) for one in derived] == [
        ("planted_once_low", "nats"), ("planted_once", "bits"), ("planted_other", "nats")
    ]  # fmt: skip
    assert catalogue()["planted_once"] is first
    assert not {"planted_once_low", "planted_other"} & catalogue().keys()


def test_definitions_of_a_run():
    metric = Metric("planted_entry", "nats", "What.", paper="P", version=2)
    entry = {"probe": "p", "metric": "planted_entry", "version": 2, "text": "What.", "paper": "P", "unit": "nats"}
    assert definitions({"p": (metric,)}) == [entry]


def test_definitions_of_a_table_are_those_of_what_is_declared(found):
    names = ["gu2024", "loss", "max_abs", "loss_low"]
    table = make_table([{"probe": "p", "metric": found.get(name, LOSS.bound("low")), "value": 1.0} for name in names])
    assert definitions_of(table) == definitions({"p": [found[name] for name in names[:3]]})
    assert extremes_of(table) == {"max_abs": "max"}
