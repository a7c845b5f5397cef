"""Packing: the inverse gives the values back, one-pixel columns survive, budgets are kept."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest

from sinklab.report.pack import (
    MAX_BINS,
    MapPlan,
    bins_of,
    coarse_scores,
    pack_maps,
    pack_unsigned,
    pool_positions,
    pool_tiles,
)


def test_unsigned_round_trip_with_gaps() -> None:
    values = np.array([0.0, 0.25, 1.0, np.nan, 3.0])
    text, scale = pack_unsigned(values)
    codes = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2")
    assert scale == 3.0
    assert codes.tolist() == [0, 5461, 21845, 65535, 65534]
    assert np.abs(codes[[0, 1, 2, 4]] / 65534 * scale - values[[0, 1, 2, 4]]).max() <= scale / 131068


def test_nothing_but_zeros_has_a_scale() -> None:
    assert pack_unsigned(np.zeros(3))[1] == 1.0


@pytest.mark.parametrize("length", [1, 64, MAX_BINS, MAX_BINS + 1, 4096, 100_000])
def test_bins_cover_every_position_once(length: int) -> None:
    bins = bins_of(length, {777, length - 1})
    assert [position for start, stop in bins for position in range(start, stop)] == list(range(length))
    assert len(bins) <= MAX_BINS + 2 * 32
    assert all(stop - start == 1 for start, stop in bins[:64])
    if length > 777:
        assert (777, 778) in bins


def test_no_positions_have_no_bins() -> None:
    assert bins_of(0) == []
    assert pool_positions(np.zeros((2, 0)), []).shape == (2, 0)


def test_a_lone_sink_survives_pooling() -> None:
    values = np.full(4096, 0.001)
    values[3001] = 0.9
    pooled = pool_positions(values, bins_of(4096))
    assert pooled.max() == 0.9
    assert np.isnan(pool_positions(np.full(4, np.nan), [(0, 2), (2, 4)])).all()


def test_a_one_pixel_column_survives_pooling() -> None:
    maps = np.zeros((1, 5, 5), np.uint8)
    maps[0, :, 3] = 200
    pooled = pool_tiles(maps, 2)
    assert pooled.shape == (1, 3, 3)
    assert (pooled[0, :, 1] == 200).all()
    assert (pooled[0, :, [0, 2]] == 0).all()
    assert pool_tiles(maps, 1) is maps


def test_coarse_scores_keep_hidden_tiles_and_the_ends() -> None:
    scores = np.arange(256, dtype=np.uint8)
    coarse = coarse_scores(scores, 6)
    assert coarse[0] == 0
    assert (coarse[1:] >= 1).all()
    assert (coarse[1], coarse[255]) == (1, 255)
    assert len(set(coarse[1:].tolist())) == 63
    # Levels are 254 / 62 apart: half of it, and half a unit of rounding.
    assert np.abs(coarse.astype(int) - scores).max() <= 254 / 62 / 2 + 0.5
    assert coarse_scores(scores, 8) is scores


class TestBudget:
    weights = np.random.default_rng(0).integers(0, 256, (4, 3, 2, 32, 32), dtype=np.uint8)
    scores = np.random.default_rng(1).integers(1, 256, (4, 3, 2, 32, 32), dtype=np.uint8)

    def test_everything_when_it_fits(self) -> None:
        packed = pack_maps(self.weights, self.scores, 10**9)
        assert packed is not None
        assert (packed.plan, packed.shape) == (MapPlan(1, 8), (4, 3, 2, 32, 32))

    @pytest.mark.parametrize("budget", [60_000, 40_000, 20_000, 10_000, 3_000, 300])
    def test_never_more_than_the_budget(self, budget: int) -> None:
        packed = pack_maps(self.weights, self.scores, budget)
        assert packed is not None
        assert packed.size <= budget
        # Two samples stay as long as anything but a single value a map does.
        assert packed.shape[0] >= 2 or packed.shape[3] == 1

    def test_resolution_before_samples(self) -> None:
        one = pack_maps(self.weights[:1], self.scores[:1], 10**9)
        assert one is not None
        packed = pack_maps(self.weights, self.scores, int(2.5 * one.size))
        assert packed is not None
        assert packed.plan.pool == 1
        assert packed.shape[0] == 2

    def test_nothing_fits_in_nothing(self) -> None:
        assert pack_maps(self.weights, self.scores, 10) is None
        assert pack_maps(self.weights[:0], self.scores[:0], 10**9) is None
