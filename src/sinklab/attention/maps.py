"""Attention maps small enough to show: weights and scores of every head, max-pooled so that a one-pixel column survives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Part, Statistics
from sinklab.attention.probe import Probe, filled
from sinklab.errors import SessionError
from sinklab.results.environment import require_whole
from sinklab.results.metric import Metric, Row

_LEAST = 1e-12
"""Of which the logarithm is shown in place of that of 0."""


class AttentionMaps(Probe):
    """Keeps one tile map per sample and head of self-attention, and of an encoder–decoder's cross-attention.

    Tokens stand where they stand in their document, and padding behind them, on whichever side the model was given it.

    State is samples × heads × (tiles² + keys); no matrix of queries by keys is kept. Nothing goes into the table: a page draws
    what it has (:meth:`~sinklab.attention.session.Session.show`, the report of an audit).

    Args:
        tiles: most rows and columns of a map; a shorter sequence has one tile per token.
        length: of the longest side of a sample, which all tiles are made for; that of each call by default.

    Attributes:
        ids: of the tokens that are the keys of self-attention, int64 ``(samples, keys)``, by part of the model (``""`` but for
            an encoder–decoder), -1 for padding and learned tokens in front; empty where the model was given no ids.
        front: how many of these learned tokens there are, before all others.
        lengths: of the longer side of the calls that were seen.
    """

    name: ClassVar[str] = "attention_maps"
    needs: ClassVar[frozenset[str]] = frozenset({"columns", "mass"})
    metrics: ClassVar[tuple[Metric, ...]] = ()

    def __init__(self, tiles: int = 64, length: int = 0) -> None:
        require_whole("tiles", tiles, 1)
        require_whole("length", length, 0)
        self.tiles, self.length = tiles, length
        self._weights: dict[str, Tensor] = {}
        self._scores: dict[str, Tensor] = {}
        self._columns: dict[str, dict[str, Tensor]] = {name: {} for name in ("received", "share", "seen", "queries", "null")}
        self.ids: dict[Part, Tensor] = {}
        self.front = 0
        self.lengths: set[int] = set()

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self" and not call.site.part:
            return
        if call.cached_keys or call.site.module in self._weights:
            raise SessionError(f"{call.site.module}: attention maps are made from one forward without a cache")
        if bool((call.key_documents > 0).any()):
            raise SessionError(
                f"{call.site.module}: a row holds several documents, whose positions an attention map cannot tell apart; give "
                "every document a row of its own"
            )
        self.lengths.add(max(call.kv_len, call.q_len, self.length))
        self.front = max(self.front, call.front)
        tile = math.ceil(max(call.kv_len, self.length) / self.tiles)
        rows = math.ceil(call.q_len / tile)
        batch, heads = call.queries.shape[:2]
        weights = torch.zeros(batch, heads, rows, math.ceil(call.kv_len / tile))
        scores = torch.full_like(weights, -math.inf)
        queries, keys = _tokens_first(call.query_positions), _tokens_first(call.key_positions)
        row_of = queries.argsort(dim=1) // tile  # of every query, the row of tiles that it is in
        for start, stop in call.blocks(tile):
            visible = call.visible.block(start, stop, 0, call.kv_len) & call.counted[:, None, start:stop, None]
            raw = call.scores(start, stop) if call.has_scores else None
            shown = call.weights(start, stop, raw).masked_fill(~visible, 0.0)
            # Where only weights are known, their logarithms: scores but for a constant of the row.
            raw = (shown.clamp_min(_LEAST).log() if raw is None else raw).masked_fill(~visible, -math.inf)
            into = row_of[:, None, start:stop, None].cpu()
            for whole, block, fill in ((weights, shown, 0.0), (scores, raw, -math.inf)):
                pooled = _max_pool(block.gather(3, keys[:, None, None].expand(block.shape)), tile, fill)
                whole.scatter_reduce_(2, into.expand(pooled.shape), pooled, "amax")
        self._weights[call.site.module] = weights
        self._scores[call.site.module] = scores
        self._keep_columns(call, statistics, keys)
        if call.site.kind == "self" and call.key_tokens is not None:
            self.ids.setdefault(call.site.part, call.key_tokens.gather(1, keys).cpu())

    def _keep_columns(self, call: AttentionCall, statistics: Statistics, keys: Tensor) -> None:
        received, share, seen = filled(statistics, "column_sum", "column_share", "column_count")
        kept = {"seen": seen.amax(1).expand(len(received), -1).gather(1, keys), "queries": call.counted.sum(-1)}
        for name, sums in (("received", received), ("share", share)):
            mean = torch.where(seen > 0, sums / seen.clamp_min(1), torch.nan)
            kept[name] = mean.gather(2, keys[:, None].expand(mean.shape))
        # What clipping or rectifying leaves is no place that a head gives its attention to.
        if statistics.null_mass is not None and call.sink_scores is not None:
            counted = call.counted[:, None].to(statistics.null_mass.dtype)
            kept["null"] = (statistics.null_mass * counted).sum(-1) / counted.sum(-1).clamp_min(1)
        for name, values in kept.items():
            self._columns[name][call.site.module] = values.float().cpu()

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
            Layers with fewer heads, queries or keys are filled with hidden tiles. Empty where nothing was seen, and where
            modules differ in how many samples they have, as where windows stand in the batch (Swin).
        """
        if len({len(maps) for maps in self._weights.values()}) != 1:
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

    def columns(self) -> dict[str, np.ndarray]:
        """What every key, and no key, receives of every head.

        Returns:
            ``received`` float32 ``(samples, layers, heads, keys)``: mean weight over the counted queries that see the key, the
            weight itself and not its share of the row; NaN where no query sees it, and where a layer has no such head or key.
            ``share``: the same of rows divided by their sums; ``received`` again where rows sum to one with their null mass.
            ``seen`` float32 ``(samples, layers, keys)``: queries that see the key. ``queries`` float32 ``(samples,
            layers)``: how many there are. ``null`` float32 ``(samples, layers, heads)``: mean mass on the null score; NaN for
            operations that have none.
        """
        heads, keys = (max((maps.shape[axis] for maps in self._columns["received"].values()), default=0) for axis in (1, 2))
        shapes: dict[str, tuple[int, ...]] = {
            "received": (heads, keys), "share": (heads, keys), "seen": (keys,), "queries": (), "null": (heads,)
        }  # fmt: skip
        samples = max((len(maps) for maps in self._weights.values()), default=0)
        kept = {}
        for name, shape in shapes.items():
            whole = np.full(
                (samples, len(self._weights), *shape), 0.0 if name in ("seen", "queries") else np.nan, dtype=np.float32
            )
            for layer, module in enumerate(self._weights):
                values = self._columns[name].get(module)
                if values is not None:
                    inner: tuple[slice, ...] = tuple(slice(size) for size in values.shape[1:])
                    whole[:, layer][(slice(len(values)), *inner)] = values.numpy()
            kept[name] = whole
        return kept


def _tokens_first(positions: Tensor) -> Tensor:
    """Indices of the tokens of each row in their order, and behind them those of its padding, int64 ``(batch, length)``."""
    return (positions < 0).byte().argsort(dim=1, stable=True)


def _max_pool(block: Tensor, tile: int, fill: float) -> Tensor:
    """The largest of every ``tile`` columns."""
    columns = math.ceil(block.shape[3] / tile)
    padded = torch.full((*block.shape[:3], columns * tile), fill, dtype=torch.float32)
    padded[..., : block.shape[3]] = block.float().cpu()
    return padded.unflatten(3, (columns, tile)).amax(4)


def _widen(maps: Tensor, shape: list[int], fill: float) -> Tensor:
    """Filled up to a number of heads, rows and columns."""
    margins = [margin for axis in (3, 2, 1) for margin in (0, shape[axis - 1] - maps.shape[axis])]
    return torch.nn.functional.pad(maps, margins, value=fill)


SPACE = "▁"
"""How SentencePiece writes a space."""


class Decoder(Protocol):
    """What makes text of token ids: a tokenizer of transformers."""

    def decode(self, token_ids: list[int], /) -> str | list[str]:
        """The text of some ids."""
        ...


def token_text(tokenizer: Decoder | None, token: int) -> str:
    """A token as text; its number without a tokenizer.

    Alone, the space in front of a word (``▁``) and a byte that is a space decode to nothing, since decoding takes away the
    space in front of a text: these are given as the vocabulary writes them. A word keeps the space in front of it, which
    tells it from the same letters inside of a word.
    """
    if tokenizer is None:
        return str(token)
    text, pieces = str(tokenizer.decode([token])), getattr(tokenizer, "convert_ids_to_tokens", None)
    if pieces is None:
        return text
    piece = str(pieces(token))
    return f" {text}" if text and piece.startswith(SPACE) and not text.startswith(" ") else text or piece


Names = Sequence[str | None]
"""What positions are called that are no tokens of a text; ``None`` of one that is."""


def patch_names(rows: int, columns: int, of: str = "") -> list[str]:
    """``patch (row, column)`` from the top left; those at the corners are called so."""
    ends = {0, rows - 1}, {0, columns - 1}
    corners = rows > 2 and columns > 2
    return [
        f"{'corner ' if corners and row in ends[0] and column in ends[1] else ''}patch ({row}, {column}){of}"
        for row in range(rows)
        for column in range(columns)
    ]


def picture_names(config: object, arguments: Mapping[str, Any]) -> list[Names]:
    """Of a model that reads pictures among texts, what every token of a row stands for, padding left out.

    Patches that a model merges are one. No row where configuration and shapes do not account for all tokens of pictures:
    several crops of a picture, tokens that end a line of it, patches that are resampled.

    Args:
        arguments: of the forward, by name.
    """
    ids, mask, grids = arguments.get("input_ids"), arguments.get("attention_mask"), grids_of(config, arguments)
    mark = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if mark is None or not isinstance(ids, Tensor) or not grids:
        return []
    named: list[Names] = []
    for row, real in zip(ids, torch.ones_like(ids) if mask is None else mask, strict=True):
        of_picture, own = (row[real.bool()] == mark).tolist(), list[tuple[int, int]]()
        while grids and math.prod(grids[0]) + sum(map(math.prod, own)) <= sum(of_picture):
            own.append(grids.pop(0))
        several = len(own) > 1
        names = [name for at, grid in enumerate(own, 1) for name in patch_names(*grid, f" of picture {at}" if several else "")]
        if len(names) != sum(of_picture):
            return []
        patches = iter(names)
        named.append([next(patches) if is_patch else None for is_patch in of_picture])
    return [] if grids else named


def grids_of(config: object, arguments: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Rows and columns of the tokens of every picture, patches that are merged taken as one; none where they are not known."""
    eyes, pixels, sizes = getattr(config, "vision_config", None), arguments.get("pixel_values"), arguments.get("image_grid_thw")
    if sizes is not None:
        merged = getattr(eyes, "spatial_merge_size", 0)
        return [(rows // merged, columns // merged) for times, rows, columns in sizes.tolist() if merged and times == 1]
    edge, merged = getattr(eyes, "patch_size", None), getattr(config, "mm_tokens_per_image", None)
    if not isinstance(edge, int) or not isinstance(pixels, Tensor) or pixels.ndim != 4 or "image_sizes" in arguments:
        return []
    side = math.isqrt(merged or 0)
    return [(side, side) if merged else (pixels.shape[2] // edge, pixels.shape[3] // edge)] * len(pixels)


def shared_names(named: Sequence[Names]) -> tuple[str | None, ...] | None:
    """Names of the positions that are called the same in all rows; ``None`` without any."""
    names = tuple(found.pop() if len(found := {*row}) == 1 else None for row in zip_longest(*named))
    return names if any(names) else None


def called(named: Sequence[Names], tokens: Sequence[Sequence[str]]) -> list[list[str]]:
    """Names of the positions of every row, or else its tokens."""
    rows = zip_longest(named, tokens, fillvalue=())
    return [[name or token or "" for name, token in zip_longest(*row)] for row in rows]
