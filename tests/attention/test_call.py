"""A call's own definition of its outputs, against one dense sum, and the blocks in which its scores are held."""

from __future__ import annotations

import pytest
import torch
from tests.attention.column_calls import make_call

from sinklab.attention import call as module


@pytest.mark.parametrize("part", ["null_value", "output_bias", "gain"])
def test_what_is_added_and_what_is_multiplied(part):
    """``gain · (weights · values + null mass · null value + bias)``, with each part alone and a sink logit beside it."""
    generator = torch.Generator().manual_seed(1)
    shape = {"null_value": (4, 8), "output_bias": (4, 8), "gain": (2, 4, 37, 1)}[part]
    tensor = torch.randn(*shape, generator=generator, dtype=torch.float64)
    call = make_call(operation={"name": "sink_logit"}, sink_scores=torch.ones(1, 4, 1, dtype=torch.float64), **{part: tensor})
    weights, null = call.signed_weights(0, 37), call.null_mass(0, 37)
    torch.testing.assert_close(weights.sum(-1) + null, torch.ones_like(null))
    plain = weights @ call.values
    if part == "gain":
        expected = plain * tensor
    else:
        expected = plain + tensor[:, None] * (null[..., None] if part == "null_value" else 1.0)
    torch.testing.assert_close(call.outputs(0, 37), expected)
    torch.testing.assert_close(call.outputs(5, 9), expected[:, :, 5:9])


@pytest.mark.parametrize(
    ("at_once", "multiple", "sizes"), [(10**9, 1, [37]), (600, 1, [2] * 18 + [1]), (1, 1, [1] * 37), (2400, 4, [8] * 4 + [5])]
)
def test_blocks_hold_as_many_rows_as_fit_and_one_at_least(monkeypatch, at_once, multiple, sizes):
    """A row has 2 samples × 4 heads × 37 keys = 296 scores."""
    monkeypatch.setattr(module, "SCORES_AT_ONCE", at_once)
    blocks = list(make_call().blocks(multiple))
    assert [stop - start for start, stop in blocks] == sizes
    assert [start for start, _ in blocks[1:]] == [stop for _, stop in blocks[:-1]]
    assert (blocks[0][0], blocks[-1][1]) == (0, 37)


def test_one_key_and_one_head_make_blocks_of_all_that_fits(monkeypatch):
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 3)
    assert list(make_call(batch=1, heads=1, kv_heads=1, q_len=1, kv_len=1).blocks()) == [(0, 1)]
    call = make_call(batch=1, heads=1, kv_heads=1, q_len=3, kv_len=1, visible=None)
    assert list(call.blocks()) == [(0, 3)]


def test_a_call_has_no_cached_keys_and_holds_scores_of_16_megabytes():
    assert make_call().cached_keys == 0
    assert module.SCORES_AT_ONCE == 2**22
