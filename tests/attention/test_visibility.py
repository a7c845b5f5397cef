"""Rules of visibility, their bounds and tiles: the drawn masks, counts, and states that claim no more than the block."""

from __future__ import annotations

import dataclasses
import re
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.column_calls import cases, make_call

from sinklab.attention import visibility
from sinklab.attention.editing import ByHead, OfHeads
from sinklab.attention.statistics import blocked
from sinklab.attention.statistics.blocked import plan_tiles, visible_counts
from sinklab.attention.visibility import Causal, Dense, Everything, Keys, Visibility, Window
from sinklab.interventions.hide_key import Without


def _drawn() -> dict[str, torch.Tensor]:
    """The masks of the module's docstring, read off the drawing."""
    lines = (visibility.__doc__ or "").splitlines()
    heads = next(line for line in lines if "causal" in line and "window" in line)
    names = re.findall(r"\w+(?:=\d+)?(?: \([^)]*\))?", heads)
    rows = [re.findall(r"(?:[■⬚] ){4}[■⬚]", line) for line in lines if "■" in line]
    return {name: torch.tensor([[c == "■" for c in row[i].split()] for row in rows]) for i, name in enumerate(names)}


def test_rules_are_as_drawn() -> None:
    drawn = _drawn()
    assert list(drawn) == ["causal", "window=3", "padding (left, 2)"]
    padding = Keys(torch.tensor([[False, False, True, True, True]]))
    assert torch.equal(Causal().block(0, 5, 0, 5)[0, 0], drawn["causal"])
    assert torch.equal((Causal() & Window(3)).block(0, 5, 0, 5)[0, 0], drawn["window=3"])
    assert torch.equal(padding.block(0, 5, 0, 5)[0, 0], drawn["padding (left, 2)"])


def test_cached_keys_shift_the_diagonal() -> None:
    assert Causal(2).block(0, 2, 0, 4)[0, 0].tolist() == [[True, True, True, False], [True, True, True, True]]
    assert Window(2, 2).block(0, 2, 0, 4)[0, 0].tolist() == [[False, True, True, True], [False, False, True, True]]


def test_everything_is_neutral() -> None:
    rule = Causal()
    assert (rule & Everything()) is rule
    assert (Everything() & rule) is rule


@st.composite
def rules(draw: st.DrawFn, depth: int = 2) -> Visibility:
    kinds = ["causal", "window", "everything", "keys", "dense"] + (["and"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "causal":
        return Causal(draw(st.integers(0, 8)))
    if kind == "window":
        return Window(draw(st.integers(1, 12)), draw(st.integers(0, 8)))
    if kind == "everything":
        return Everything()
    bits = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    if kind == "keys":
        return Keys(torch.rand(2, 20, generator=bits) < share)
    if kind == "dense":
        return Dense(torch.rand(draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), 12, 20, generator=bits) < share)
    left, right = draw(rules(depth - 1)), draw(rules(depth - 1))
    return left & right


def _ranges(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(lambda r: (r[0], min(size, r[0] + r[1])))


@settings(max_examples=300, deadline=None)
@given(rules(), _ranges(12), _ranges(20))
def test_blocks_are_parts_of_the_whole_and_states_are_true(
    rule: Visibility, queries: tuple[int, int], keys: tuple[int, int]
) -> None:
    whole = rule.block(0, 12, 0, 20)
    block = rule.block(*queries, *keys)
    assert block.dtype == torch.bool
    assert torch.equal(block, whole[:, :, slice(*queries), slice(*keys)])
    state = rule.state(*queries, *keys)
    if state != "some":
        assert bool(block.all() if state == "all" else ~block.any())


def _indices(size: int) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.integers(0, size - 1), max_size=5).map(lambda chosen: torch.tensor(chosen, dtype=torch.int64))


@settings(max_examples=300, deadline=None)
@given(rules(), _indices(12), _indices(20), st.sampled_from(["as it is", "of heads", "by head", "without"]))
def test_pairs_are_entries_of_the_whole(rule: Visibility, queries: torch.Tensor, keys: torch.Tensor, inside: str) -> None:
    if inside == "of heads":
        rule = OfHeads(rule, torch.tensor([2, 0]))
    elif inside == "by head":
        rule = ByHead(rule, [([1], Causal(8)), ([0, 2], Window(3, 2))], 3)
    elif inside == "without":
        rule = Without(rule, torch.arange(20)[None] % 7 == 3, 20, (torch.arange(12)[None], torch.arange(20)[None]), 3)
    whole = rule.block(0, 12, 0, 20)
    assert torch.equal(rule.pairs(queries, keys), whole[:, :, queries[:, None], keys])


@settings(max_examples=100, deadline=None)
@given(rules(), st.integers(1, 13), st.integers(1, 21), st.sampled_from([2, 4, 256]))
def test_tiles_cover_every_visible_pair_once(rule: Visibility, rows: int, columns: int, grain: int) -> None:
    covered = torch.zeros(12, 20, dtype=torch.int)
    with mock.patch.object(blocked, "_GRAIN", grain):
        tiles = plan_tiles(rule, 12, 20, rows, columns)
    for tile in tiles:
        place = (slice(tile.query_start, tile.query_stop), slice(tile.key_start, tile.key_stop))
        assert 0 < covered[place].shape[0] <= rows
        assert 0 < covered[place].shape[1] <= columns
        covered[place] += 1
        if tile.whole:
            assert rule.block(tile.query_start, tile.query_stop, tile.key_start, tile.key_stop).all()
    assert covered.max() <= 1
    assert (covered.bool() | ~rule.block(0, 12, 0, 20).any(dim=0).any(dim=0)).all()


def test_partly_visible_tiles_of_many_queries_are_halved_once():
    """512 queries on the diagonal are two tiles, 256 of them one; in a half, whole strips join partly visible neighbours."""

    def plan(length: int) -> list[tuple[int, int, int, int, bool]]:
        found = blocked.plan_tiles(Causal(0), length, length, length, length)
        return [(tile.query_start, tile.query_stop, tile.key_start, tile.key_stop, tile.whole) for tile in found]

    assert plan(512) == [(0, 256, 0, 256, False), (256, 512, 0, 512, False)]
    assert plan(256) == [(0, 256, 0, 256, False)]


def test_a_uniform_strip_is_asked_about_once():
    """Keys 0 to 511 are seen by all of the queries 512 to 767, and keys from 1,024 by none."""
    asked: list[tuple[int, int]] = []

    class Counted(Causal):
        def state(self, query_start, query_stop, key_start, key_stop):
            asked.append((key_start, key_stop))
            return super().state(query_start, query_stop, key_start, key_stop)

    found = list(blocked._strips(Counted(0), 512, 768, 0, 1536, 512))
    assert [state for _, _, state in found] == ["all", "some", "none", "none"]
    assert asked == [(0, 512), (512, 1024), (512, 768), (768, 1024), (1024, 1536)]
    assert [(start, stop) for start, stop, _ in found] == [(0, 512), (512, 768), (768, 1024), (1024, 1536)]


VALID = torch.rand(2, 29, generator=torch.Generator().manual_seed(0)) < 0.7
RULES: dict[str, Visibility] = {
    "everything": Everything(),
    "causal": Causal(16),
    "window alone": Window(5, 16),
    "causal window": Causal(16) & Window(5, 16),
    "valid keys": Keys(VALID),
    "all of them": Causal(16) & Window(7, 16) & Keys(VALID),
    "more queries than keys": Causal(-4),
    "more keys than that": Causal(60),
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
