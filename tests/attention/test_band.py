"""Bands of visible keys: their bounds are those of the rule, and counts taken from them are those of the mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.attention.column_calls import cases, make_call

from sinklab.attention.statistics.tiles import visible_counts
from sinklab.attention.visibility import Causal, Dense, Everything, Keys, Visibility, Window

VALID = torch.rand(2, 29, generator=torch.Generator().manual_seed(0)) < 0.7
RULES: dict[str, Visibility] = {
    "everything": Everything(),
    "causal": Causal(16),
    "window alone": Window(5, 16),
    "causal window": Causal(16) & Window(5, 16),
    "valid keys": Keys(VALID),
    "all of them": Causal(16) & Window(7, 16) & Keys(VALID),
    "more queries than keys": Causal(-4),
    "two windows": Window(9, 16) & Window(4, 16),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_a_band_is_the_rule(rule):
    band = rule.band()
    query, key = torch.arange(13)[:, None], torch.arange(29)[None]
    seen = torch.ones(2, 13, 29, dtype=torch.bool)
    if band.low is not None:
        seen &= key >= query + band.low
    if band.high is not None:
        seen &= key <= query + band.high
    if band.valid is not None:
        seen &= band.valid[:, None]
    assert torch.equal(seen, rule.block(0, 13, 0, 29).expand(2, 1, 13, 29)[:, 0])


def test_what_is_no_band_says_so():
    mask = Dense(torch.ones(1, 1, 13, 29, dtype=torch.bool))
    assert mask.band() is None
    assert (Causal() & mask).band() is None
    assert (Causal() | Window(3)).band() is None


@pytest.mark.parametrize("counted", [None, torch.rand(2, 13, generator=torch.Generator().manual_seed(1)) < 0.6])
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_counts_of_a_band_are_those_of_its_mask(rule, counted):
    call = make_call(q_len=13, kv_len=29, visible=rule, counted=counted)
    dense = dataclasses.replace(call, visible=Dense(rule.block(0, 13, 0, 29)))
    for found, expected in zip(visible_counts(call), visible_counts(dense), strict=True):
        assert torch.equal(found.expand_as(expected), expected) or torch.equal(found, expected.expand_as(found))
        assert found.dtype == torch.float32


def test_the_cases_of_the_statistics_have_both():
    """Calls of both kinds are held to the oracle in test_columns.py."""
    bands = [call.visible.band() is not None for call, _ in cases().values()]
    assert any(bands)
    assert not all(bands)
