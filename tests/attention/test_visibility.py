"""Rules of visibility: the drawn masks, and states that never claim more than the block shows."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.attention import visibility
from sinklab.attention.editing import ByHead, OfHeads
from sinklab.attention.statistics.tiles import plan_tiles
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
    kinds = ["causal", "window", "everything", "keys", "dense"] + (["and", "or"] if depth else [])
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
    return left & right if kind == "and" else left | right


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
        rule = Without(rule, torch.arange(20)[None] % 7 == 3, 20)
    whole = rule.block(0, 12, 0, 20)
    assert torch.equal(rule.pairs(queries, keys), whole[:, :, queries[:, None], keys])


@pytest.mark.parametrize("rule", [Causal(), Causal(3), Window(4), Window(4, 2)], ids=str)
def test_simple_rules_know_their_states(rule: Visibility) -> None:
    """Answering "some" everywhere would be correct and useless: these rules answer exactly."""
    for start in range(0, 12, 3):
        for first in range(0, 20, 4):
            tile = (start, start + 3, first, first + 4)
            block = rule.block(*tile)
            assert rule.state(*tile) == ("all" if block.all() else "some" if block.any() else "none")


@settings(max_examples=100, deadline=None)
@given(rules(), st.integers(1, 13), st.integers(1, 21))
def test_tiles_cover_every_visible_pair_once(rule: Visibility, rows: int, columns: int) -> None:
    covered = torch.zeros(12, 20, dtype=torch.int)
    for tile in plan_tiles(rule, 12, 20, rows, columns):
        place = (slice(tile.query_start, tile.query_stop), slice(tile.key_start, tile.key_stop))
        assert 0 < covered[place].shape[0] <= rows
        assert 0 < covered[place].shape[1] <= columns
        covered[place] += 1
        if tile.whole:
            assert rule.block(tile.query_start, tile.query_stop, tile.key_start, tile.key_stop).all()
    assert covered.max() <= 1
    assert (covered.bool() | ~rule.block(0, 12, 0, 20).any(dim=0).any(dim=0)).all()


def test_causal_tiles_leave_the_hidden_half_out() -> None:
    """Of 4096² pairs the diagonal and below are visible; tiles of 512 halved at the diagonal compute 10 % more than that."""
    tiles = plan_tiles(Causal(), 4096, 4096, 512, 1024)
    computed = sum((t.query_stop - t.query_start) * (t.key_stop - t.key_start) for t in tiles)
    assert computed < 1.11 * 4096 * 4097 / 2
    assert any(t.whole and t.key_stop - t.key_start > 512 for t in tiles)


def test_rules_are_values() -> None:
    assert Causal(3) == Causal(3) != Causal(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Causal().offset = 1  # type: ignore[misc]
