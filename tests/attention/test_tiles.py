"""The plan of tiles: every visible pair in exactly one tile, and no more looks or tiles than the rule of the plan says."""

from __future__ import annotations

import pytest
import torch

from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.statistics import tiles
from sinklab.attention.visibility import And, Causal, Everything, Visibility, Window
from sinklab.registry import operations

LENGTH = 700


def seen(visible: Visibility, length: int = LENGTH) -> torch.Tensor:
    return visible.block(0, length, 0, length).expand(1, 1, length, length)[0, 0]


@pytest.mark.parametrize("visible", [Causal(0), And(Causal(0), Window(300))], ids=["causal", "window"])
@pytest.mark.parametrize(("rows", "columns"), [(512, 512), (300, 700), (700, 64)])
def test_every_visible_pair_is_in_one_tile(visible, rows, columns):
    covered = torch.zeros(LENGTH, LENGTH)
    for tile in tiles.plan_tiles(visible, LENGTH, LENGTH, rows, columns):
        assert tile.query_stop - tile.query_start <= rows
        assert tile.key_stop - tile.key_start <= columns
        part = (slice(tile.query_start, tile.query_stop), slice(tile.key_start, tile.key_stop))
        covered[part] += 1
        assert bool(seen(visible)[part].all()) >= tile.whole
        assert seen(visible)[part].any()
    assert covered.max() == 1
    assert (covered[seen(visible)] == 1).all()


def test_partly_visible_tiles_of_many_queries_are_halved_once():
    """512 queries on the diagonal are two tiles, 256 of them one; in a half, whole strips join partly visible neighbours."""

    def plan(length: int) -> list[tuple[int, int, int, int, bool]]:
        found = tiles.plan_tiles(Causal(0), length, length, length, length)
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

    found = list(tiles._strips(Counted(0), 512, 768, 0, 1536, 512))
    assert [state for _, _, state in found] == ["all", "some", "none", "none"]
    assert asked == [(0, 512), (512, 1024), (512, 768), (768, 1024), (1024, 1536)]
    assert [(start, stop) for start, stop, _ in found] == [(0, 512), (512, 768), (768, 1024), (1024, 1536)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("visible", [Causal(0), Causal(3), Causal(-5), Causal(60), Everything()], ids=str)
def test_counts_of_a_rule_are_those_of_its_tiles(visible, padded):
    """One rule is counted in closed form; joined with a window that hides nothing, it is counted tile by tile."""
    positions = torch.arange(50).expand(2, -1).clone()
    if padded:
        positions[0, -4:] = positions[1, :7] = -1
    states = torch.zeros(2, 1, 53, 8)

    def counts(rule):
        call = AttentionCall(
            site=Site("counted", 0),
            queries=states[:, :, :50],
            keys=states,
            values=states,
            scaling=1.0,
            visible=rule,
            operation=operations.make("softmax"),
            query_positions=positions,
            key_positions=torch.arange(53).expand(2, -1),
            query_documents=torch.zeros_like(positions),
            key_documents=torch.zeros(2, 53, dtype=torch.long),
        )
        return tiles.visible_counts(call)

    for found, expected in zip(counts(visible), counts(And(visible, Window(1000))), strict=True):
        assert torch.equal(found, expected)
