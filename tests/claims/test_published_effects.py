"""The published numbers that stand beside effects: each is of an effect of its claim, and what the published table gives."""

from __future__ import annotations

import pytest
from tests.claims.published_numbers import PUBLISHED

from sinklab_claims.contract.claim import Part
from sinklab_claims.reproduce.store import claim_called
from sinklab_claims.verdict.records import Published, published_effect, published_effects

NO_TABLE = {("massive_mean_against_zero", "mean of baseline")}
"""A perplexity of 5.47 before and after, where the table of the tests has a number of the size of noise."""


def parts_of(claim: str) -> dict[str, Part]:
    stated = claim_called(claim)
    return {part.effect.words: part for part in (*stated.parts, *stated.presupposes)}


@pytest.mark.parametrize("claim", published_effects())
def test_a_published_number_is_the_effect_of_a_part_on_the_published_table(claim):
    parts = parts_of(claim)
    unknown = set(published_effects()[claim]) - set(parts)
    assert not unknown, f"no part of {claim} has the effect {unknown}; bring sinklab/claims/published.json to its words"
    for effect, published in published_effects()[claim].items():
        if (claim, effect) not in NO_TABLE:
            # The file has four digits.
            assert published.value == pytest.approx(parts[effect].effect(PUBLISHED[claim]), rel=6e-4, abs=1e-9), effect


def test_numbers_that_every_reader_knows():
    assert published_effect("sink_moves_to_bias", "sink_rate_star of key bias") == Published(73.34, "60 million parameters")
    assert published_effect("sigmoid_has_no_sink", "sink_rate of sigmoid").value == 0.44
    assert published_effect("window_fails_sinks_restore", "window_0 of baseline less window_4 of baseline").value == 6.862


def test_what_is_not_published_has_no_number():
    """Derived numbers, those of a similar quantity, and those that belong to another variant are not in the file."""
    assert published_effect("inputs_by_position", "sink_rate_repeated_no_bos of ALiBi") is None
    assert published_effect("cliff_at_the_cache_size", "held by the larger of larger cache") is None
    assert published_effect("position_schemes", "sink_rate of relative positions") is None
    assert published_effect("no_such_claim", "sink_rate of baseline") is None
