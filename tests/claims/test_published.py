"""Of every claim: published numbers are a reproduction, reversed ones refute it, and without its premise it is not tested."""

from __future__ import annotations

import pytest
from tests.claims.published_numbers import ABOUT_NOTHING, PUBLISHED, REVERSED

from sinklab.registry import claims
from sinklab_claims.reproduce.cells import base_config, configure, resolved_changes
from sinklab_claims.reproduce.store import claim_called
from sinklab_claims.verdict.rule import PLAIN, Conclusion, judge

WHOLE_TABLE = {"softpick": 34.89, "gate, element-wise": 16.36, "sink logit": 8.78, "softmax plus one": 2.0, "baseline": 0.1}
"""What turns round the order of ``softpick_table``, for which it takes more than one number."""

SAME_WORDS = ("position_schemes", "operations_that_fail", "learnable_coordinates")
"""Claims with several parts of one kind, of which not every one has a reversal."""

SAME_RUNS = ("position_schemes", "number_of_heads", "inputs_by_position", "inputs_with_rotary_positions")
"""Claims in which a variant may be the scale's own configuration."""


def judged(name: str, *changes: tuple[str, str, float], numbers: dict[str, dict[str, float]] | None = None) -> Conclusion:
    """A claim on published numbers with changes, at forty seeds that differ by a hundred-thousandth."""
    numbers = {label: dict(of) for label, of in (PUBLISHED[name] if numbers is None else numbers).items()}
    for label, metric, value in changes:
        numbers[label][metric] = value
    claim = claim_called(name)
    seeds = {
        seed: {label: {metric: value * (1 - seed / 100_000) for metric, value in of.items()} for label, of in numbers.items()}
        for seed in range(40)
    }
    return judge(claim.parts, claim.presupposes, seeds)


def test_every_claim_with_published_numbers_is_here():
    assert set(claims.names()) - set(PUBLISHED) == {"repeated_token_laws"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_a_reproduction(name):
    found = judged(name)
    assert PLAIN.get(found.verdict, found.verdict) == "reproduced", found


@pytest.mark.parametrize(("name", "label", "metric", "value"), REVERSED)
def test_a_reversed_number_is_no_reproduction(name, label, metric, value):
    found = judged(name, (label, metric, value)).verdict
    assert PLAIN.get(found, found) == "not reproduced"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_part_has_a_reversal(name):
    found = [judged(name, row[1:]) for row in REVERSED if row[0] == name]
    if name == "softpick_table":
        found.append(judged(name, numbers={label: {"sink_rate": rate} for label, rate in WHOLE_TABLE.items()}))
    refuted = {finding.part for one in found for finding in one.findings if finding.verdict == "not reproduced"}
    parts = set(claim_called(name).parts)
    assert refuted <= parts if name in SAME_WORDS else refuted == parts
    assert refuted


@pytest.mark.parametrize(("name", "label", "metric", "value"), ABOUT_NOTHING)
def test_a_claim_about_nothing_is_not_tested(name, label, metric, value):
    assert judged(name, (label, metric, value)).verdict == "not tested at this scale"


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in {row[0] for row in ABOUT_NOTHING}])
def test_of_models_without_anything_a_claim_presupposes_too_much_or_is_refuted(name):
    presupposes, nothing = (
        claim_called(name).presupposes,
        {label: dict.fromkeys(of, 0.0) for label, of in PUBLISHED[name].items()},
    )
    assert (judged(name, numbers=nothing).verdict == "not tested at this scale") == bool(presupposes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_variants_are_configurations_at_every_scale(name):
    claim = claim_called(name)
    for scale in claim.costs:
        base = base_config(scale)
        made = {variant.label: configure(base, variant).model_dump_json() for variant in claim.variants}
        assert name in SAME_RUNS or len(set(made.values())) == len(made), "two variants are the same run"
        assert all(resolved_changes(base, variant) == {} for variant in claim.variants if variant.label == "baseline")
