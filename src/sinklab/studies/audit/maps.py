"""Attention maps small enough to show: weights and scores of every head, max-pooled so that a one-pixel column survives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, LayerOutput, Statistics
from sinklab.attention.probe import Probe, Watcher
from sinklab.errors import SessionError
from sinklab.results.metric import Row

__all__ = ["AttentionMaps", "OnPatches"]

_LEAST = 1e-12
"""Of which the logarithm is shown in place of that of 0."""


class AttentionMaps(Probe):
    """Keeps one tile map per sample and head of self-attention, and of an encoder–decoder's cross-attention.

    State is samples × heads × tiles², whatever the length.

    Args:
        tiles: most rows and columns of a map; a shorter sequence has one tile per token.
        length: of the longest side of a sample, which all tiles are made for; that of each call by default.
    """

    name: ClassVar[str] = "attention_maps"
    needs: ClassVar[frozenset[str]] = frozenset({"columns"})

    def __init__(self, tiles: int = 64, length: int = 0) -> None:
        self.tiles, self.length = tiles, length
        self._weights: dict[str, Tensor] = {}
        self._scores: dict[str, Tensor] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self" and not call.site.part:
            return
        if call.cached_keys or call.site.module in self._weights:
            raise SessionError(f"{call.site.module}: attention maps are made from one forward without a cache")
        tile = math.ceil(max(call.kv_len, self.length) / self.tiles)
        rows = math.ceil(call.q_len / tile)
        batch, heads = call.queries.shape[:2]
        weights = torch.zeros(batch, heads, rows, math.ceil(call.kv_len / tile))
        scores = torch.full_like(weights, -math.inf)
        for start, stop in call.blocks(tile):
            visible = call.visible.block(start, stop, 0, call.kv_len)
            # Where only weights are known, their logarithms: scores but for a constant of the row.
            raw = call.scores(start, stop) if call.has_scores else call.weights(start, stop).clamp_min(_LEAST).log()
            raw = raw.masked_fill(~visible, -math.inf)
            into = slice(start // tile, math.ceil(stop / tile))
            weights[:, :, into] = _max_pool(call.weights(start, stop), tile, 0.0)
            scores[:, :, into] = _max_pool(raw, tile, -math.inf)
        self._weights[call.site.module] = weights
        self._scores[call.site.module] = scores

    def merge(self, other: Self) -> None:
        """Samples of the other one below ours."""
        for own, added in ((self._weights, other._weights), (self._scores, other._scores)):
            for module, maps in added.items():
                own[module] = torch.cat((own[module], maps)) if module in own else maps

    def rows(self) -> Iterator[Row]:
        """No rows: maps are not numbers of the table; see :meth:`arrays`."""
        return iter(())

    @property
    def modules(self) -> list[str]:
        """Modules in the order of the layer axis."""
        return list(self._weights)

    def arrays(self) -> dict[str, np.ndarray]:
        """Maps as the report reads them.

        Returns:
            ``weights`` uint8 ``(samples, layers, heads, rows, columns)``, ``round(255 · sqrt(weight))`` with weights above one
            (possible without normalisation) drawn as one; ``scores`` uint8 of the same shape, 0 where every key of the tile is
            hidden and 1..255 linear between the two values of ``scores_range``, float32 ``(samples, layers, heads, 2)``.
            Layers with fewer heads, queries or keys are filled with hidden tiles.
        """
        if not self._weights:
            return {}
        shape = [max(maps.shape[axis] for maps in self._weights.values()) for axis in (1, 2, 3)]
        weights = torch.stack([_widen(maps, shape, 0.0) for maps in self._weights.values()], dim=1)
        scores = torch.stack([_widen(maps, shape, -math.inf) for maps in self._scores.values()], dim=1)
        hidden = scores == -math.inf
        low = scores.masked_fill(hidden, math.inf).amin((-2, -1), keepdim=True)
        high = scores.amax((-2, -1), keepdim=True)
        low, high = low.nan_to_num(posinf=0.0, neginf=0.0), high.nan_to_num(posinf=0.0, neginf=0.0)
        level = 1 + 254 * (scores.masked_fill(hidden, 0.0) - low) / (high - low).clamp_min(1e-12)
        return {
            "weights": (255 * weights.clamp(0, 1).sqrt()).round().to(torch.uint8).numpy(),
            "scores": level.round().clamp(1, 255).masked_fill(hidden, 0).to(torch.uint8).numpy(),
            "scores_range": torch.cat((low, high), dim=-1).squeeze(-2).float().numpy(),
        }


def _max_pool(block: Tensor, tile: int, fill: float) -> Tensor:
    rows, columns = math.ceil(block.shape[2] / tile), math.ceil(block.shape[3] / tile)
    padded = torch.full((*block.shape[:2], rows * tile, columns * tile), fill, dtype=torch.float32)
    padded[:, :, : block.shape[2], : block.shape[3]] = block.float().cpu()
    return padded.view(*block.shape[:2], rows, tile, columns, tile).amax((3, 5))


def _widen(maps: Tensor, shape: list[int], fill: float) -> Tensor:
    """Filled up to a number of heads, rows and columns."""
    margins = [margin for axis in (3, 2, 1) for margin in (0, shape[axis - 1] - maps.shape[axis])]
    return torch.nn.functional.pad(maps, margins, value=fill)


class OnPatches(Watcher):
    """What every position receives in each head, and how long its hidden state is behind each layer, for every sample."""

    name: ClassVar[str] = "on_patches"
    needs: ClassVar[frozenset[str]] = frozenset({"columns", "hidden_states"})

    def __init__(self) -> None:
        self._received: dict[str, Tensor] = {}
        self._norms: dict[int, Tensor] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind == "self":
            assert statistics.column_share is not None  # asked for in ``needs``
            assert statistics.column_count is not None
            mean = statistics.column_share / statistics.column_count.clamp_min(1)
            self._received[call.site.module] = mean.float().cpu()

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind == "layer":
            self._norms[output.site.layer] = output.hidden_states.float().norm(dim=-1).cpu()

    def arrays(self) -> dict[str, np.ndarray]:
        """``received`` ``(samples, modules, heads, positions)`` and ``norms`` ``(samples, layers + 1, positions)``, float32.

        Nothing where modules differ in their heads or positions.
        """
        received, norms = list(self._received.values()), [self._norms[layer] for layer in sorted(self._norms)]
        if len({tensor.shape for tensor in received}) != 1 or len({tensor.shape for tensor in norms}) != 1:
            return {}
        return {"received": torch.stack(received, 1).numpy(), "norms": torch.stack(norms, 1).numpy()}
