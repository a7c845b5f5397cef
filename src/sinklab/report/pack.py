"""Arrays to text that a page can hold: quantised, compressed with zlib, written in base64; maps shrink to a byte budget."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import zlib

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MapPlan",
    "PackedMaps",
    "bins_of",
    "pack_bytes",
    "pack_maps",
    "pack_unsigned",
    "pool_positions",
    "pool_tiles",
    "round_list",
    "round_matrix",
    "rounded",
]

MAX_BINS = 256
"""Most positions that a curve shows one by one or in groups."""


def pack_bytes(data: bytes) -> str:
    """zlib, then base64; ``DecompressionStream("deflate")`` is the inverse in the page."""
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def bins_of(num_positions: int, exact: set[int] | frozenset[int] = frozenset(), most: int = MAX_BINS) -> list[tuple[int, int]]:
    """Half-open groups of consecutive positions that cover ``[0, num_positions)``, at most about ``most``.

    Up to ``most`` positions, every position is a group of its own; beyond, the first quarter of ``most`` and those in ``exact``
    still are, and the rest is divided evenly.
    """
    if num_positions <= most:
        return [(position, position + 1) for position in range(num_positions)]
    start = most // 4  # that is where most sinks are
    evenly = np.linspace(start, num_positions, most - start + 1).round().astype(int)
    # A cap on the exceptions keeps the number of groups bounded, whatever the model does.
    singles = sorted(position for position in exact if start <= position < num_positions)[:32]
    edges = {*range(start), *evenly.tolist(), *singles, *(position + 1 for position in singles)}
    ordered = sorted(edges)
    return list(itertools.pairwise(ordered))


def pool_positions(values: NDArray[np.float64], bins: list[tuple[int, int]]) -> NDArray[np.float64]:
    """The largest value of each group along the last axis; a sink of one position survives. NaN only where all are NaN."""
    if not bins:
        return values[..., :0]
    filled = np.where(np.isnan(values), -np.inf, values)
    pooled = np.maximum.reduceat(filled, [start for start, _ in bins], axis=-1)
    return np.where(np.isneginf(pooled), np.nan, pooled)


def pack_unsigned(values: NDArray[np.float64]) -> tuple[str, float]:
    """Non-negative values as uint16: ``code / 65534 * scale``; 65535 stands for NaN. Returns the text and the scale.

    The error is at most ``scale / 131068``.
    """
    scale = float(np.nanmax(values, initial=0.0)) or 1.0
    codes = np.clip(np.round(values / scale * 65534), 0, 65534)
    return pack_bytes(np.where(np.isnan(values), 65535, codes).astype("<u2").tobytes()), scale


@dataclasses.dataclass(frozen=True)
class MapPlan:
    """How maps are made smaller: ``pool`` tiles a side become one, scores keep ``score_bits`` bits."""

    pool: int
    score_bits: int


@dataclasses.dataclass(frozen=True)
class PackedMaps:
    """Maps as text.

    Attributes:
        texts: for each sample kept, for each module: the compressed bytes of ``weights (heads, rows, columns)`` followed by
            those of ``scores``.
        plan: what was done to them.
        shape: ``(samples kept, modules, heads, rows, columns)``.
    """

    texts: list[list[str]]
    plan: MapPlan
    shape: tuple[int, int, int, int, int]

    @property
    def size(self) -> int:
        """Characters of all texts."""
        return sum(len(text) for sample in self.texts for text in sample)


def pool_tiles(maps: NDArray[np.uint8], pool: int) -> NDArray[np.uint8]:
    """The largest of each ``pool × pool`` tiles of the last two axes; the edge is filled with zeros."""
    if pool == 1:
        return maps
    rows, columns = maps.shape[-2:]
    margins = [(0, 0)] * (maps.ndim - 2) + [(0, -rows % pool), (0, -columns % pool)]
    padded = np.pad(maps, margins)
    tiles = padded.reshape(*maps.shape[:-2], padded.shape[-2] // pool, pool, padded.shape[-1] // pool, pool)
    return tiles.max(axis=(-3, -1))


def coarse_scores(scores: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Scores rounded to ``2**bits - 1`` levels between 1 and 255; 0 stays 0 (hidden) and nothing else becomes it."""
    if bits == 8:
        return scores
    steps = 2**bits - 2
    levels = np.round((scores.astype(np.float32) - 1) / 254 * steps) / steps * 254 + 1
    return np.where(scores == 0, 0, np.round(levels)).astype(np.uint8)


def _pack_one(weights: NDArray[np.uint8], scores: NDArray[np.uint8]) -> str:
    return pack_bytes(weights.tobytes() + scores.tobytes())


def pack_maps(weights: NDArray[np.uint8], scores: NDArray[np.uint8], budget: int) -> PackedMaps | None:
    """Maps within ``budget`` characters, as fine as they fit; ``None`` when even one value a map does not fit.

    Two samples in full resolution are worth more than many in a coarse one; so resolution goes down only when two samples do
    not fit, and as many samples stay as there is room for.
    """
    samples, modules, heads, rows, columns = weights.shape
    if not weights.size:
        return None
    pool, plans = 1, [MapPlan(1, 8), MapPlan(1, 6), MapPlan(1, 5)]
    while pool < max(rows, columns):
        pool *= 2
        plans.append(MapPlan(pool, 6))
    for plan in plans:
        small_weights, small_scores = (
            pool_tiles(weights, plan.pool),
            coarse_scores(pool_tiles(scores, plan.pool), plan.score_bits),
        )
        needed_samples = min(samples, 2) if plan.pool < max(rows, columns) else 1

        some = range(0, modules, 8)
        guess = (
            sum(len(_pack_one(small_weights[0, module], small_scores[0, module])) for module in some)
            / len(some)
            * modules
            * needed_samples
        )
        if guess > 1.2 * budget and plan is not plans[-1]:
            continue  # eight times cheaper than to find out by packing all
        texts: list[list[str]] = []
        room = budget
        for sample in range(samples):
            packed = [_pack_one(small_weights[sample, module], small_scores[sample, module]) for module in range(modules)]
            room -= sum(map(len, packed))
            if room < 0:
                break
            texts.append(packed)
        if len(texts) >= needed_samples:
            return PackedMaps(texts, plan, (len(texts), modules, heads, *small_weights.shape[-2:]))
    return None


def round_matrix(values: NDArray[np.float64]) -> list[list[float | None]]:
    """Rows of numbers with five significant digits; ``None`` for NaN."""
    return [round_list(row) for row in values]


def round_list(values: NDArray[np.float64]) -> list[float | None]:
    """Numbers with five significant digits; ``None`` for NaN."""
    return [rounded(float(value)) for value in values]


def rounded(value: float | None) -> float | None:
    """Five significant digits; ``None`` for what is no finite number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
