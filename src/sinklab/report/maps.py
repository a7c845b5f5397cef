"""Attention maps and pictures of an audit as they lie in its folder, and what the script of a page draws from them."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sinklab.errors import ResultError

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


def pool_tiles(maps: NDArray[np.uint8], pool: int) -> NDArray[np.uint8]:
    """The largest of each ``pool × pool`` tiles of the last two axes; the edge is filled with zeros."""
    if pool == 1:
        return maps
    rows, columns = maps.shape[-2:]
    margins = [(0, 0)] * (maps.ndim - 2) + [(0, -rows % pool), (0, -columns % pool)]
    padded = np.pad(maps, margins)
    tiles = padded.reshape(*maps.shape[:-2], padded.shape[-2] // pool, pool, padded.shape[-1] // pool, pool)
    return tiles.max(axis=(-3, -1))


def pack_maps(
    weights: NDArray[np.uint8], scores: NDArray[np.uint8], budget: int
) -> tuple[list[list[str]], int, tuple[int, ...]] | None:
    """Maps within ``budget`` characters, as fine as they fit; ``None`` when even one value a map does not fit.

    Two samples in full resolution are worth more than many in a coarse one; so tiles are pooled only when two samples do not
    fit, and as many samples stay as there is room for.

    Returns:
        For each sample kept, for each module, the compressed bytes of ``weights (heads, rows, columns)`` followed by those of
        ``scores``; how many tiles a side have become one; and ``(samples kept, modules, heads, rows, columns)``.
    """
    if not weights.size:
        return None
    samples, modules, heads = weights.shape[:3]
    pool = 1
    while True:
        small = pool_tiles(weights, pool), pool_tiles(scores, pool)
        coarsest = max(small[0].shape[-2:]) == 1
        needed = 1 if coarsest else min(samples, 2)
        some = range(0, modules, 8)  # eight times cheaper than to find out by packing all
        guess = sum(len(_pack_one(small, 0, module)) for module in some) / len(some) * modules * needed
        if guess <= 1.2 * budget or coarsest:
            texts: list[list[str]] = []
            room = budget
            for sample in range(samples):
                packed = [_pack_one(small, sample, module) for module in range(modules)]
                room -= sum(map(len, packed))
                if room < 0:
                    break
                texts.append(packed)
            if len(texts) >= needed:
                return texts, pool, (len(texts), modules, heads, *small[0].shape[-2:])
        if coarsest:
            return None
        pool *= 2


def _pack_one(maps: tuple[NDArray[np.uint8], NDArray[np.uint8]], sample: int, module: int) -> str:
    return pack_bytes(b"".join(each[sample, module].tobytes() for each in maps))


def round_matrix(values: NDArray[np.float64]) -> list[list[float | None]]:
    """Rows of numbers with five significant digits; ``None`` for NaN."""
    return [round_list(row) for row in values]


def round_list(values: NDArray[np.float64]) -> list[float | None]:
    """Numbers with five significant digits; ``None`` for NaN."""
    return [rounded(float(value)) for value in values]


def rounded(value: float | None) -> float | None:
    """Five significant digits; ``None`` for what is no finite number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


HEAD_NUMBERS: list[tuple[str, str, str, str, str]] = [
    ("Sink score", "score_gap", "sink_score", "", "before the softmax"),
    ("Other scores", "score_gap", "other_score", "", "mean, before the softmax"),
    ("Gap", "score_gap", "gap", "", "sink score minus the others"),
    ("Sink weight", "score_gap", "sink_weight", "", "after the softmax"),
    ("Entropy", "entropy", "entropy", "nats", "of a row of weights"),
    ("Entropy without sink", "entropy", "entropy_without_sink", "nats", "renormalised"),
    ("Null mass", "null_mass", "null_mass", "", "goes to no key"),
    ("Mass on keys", "null_mass", "row_mass", "", "sum of a row of weights"),
    ("Gate", "null_mass", "output_gain", "", "mean factor on the head's output"),
    ("Output / residual", "head_output", "relative_norm", "", "near 0: nearly a no-op"),
    ("Output norm", "head_output", "output_norm", "", "after the output projection"),
    ("First-token share", "sink_rate", "first_token_share", "unit", ""),
    ("Arg-max is first", "sink_rate", "kaul2024_first_argmax", "unit", "share of queries"),
]
"""Label, probe, metric, unit ("unit": the table's own), note."""


@dataclasses.dataclass(frozen=True)
class Maps:
    """Attention maps of a few samples, pooled to tiles by the largest value, with the texts of their tokens.

    Attributes:
        weights: uint8 ``(samples, modules, heads, query_tiles, key_tiles)``: ``round(255 * sqrt(weight))``.
        scores: uint8, same shape: 0 where the tile is hidden, 1…255 linear between ``ranges``.
        ranges: float32 ``(samples, modules, heads, 2)``: smallest and largest score.
        targets: of an encoder–decoder, what the decoder reads.
    """

    weights: NDArray[np.uint8]
    scores: NDArray[np.uint8]
    ranges: NDArray[np.float32]
    tokens: list[list[str]]
    modules: list[str]
    seq_len: int
    targets: list[list[str]] = dataclasses.field(default_factory=list)


def read_maps(path: Path) -> Maps | None:
    """Read ``maps.safetensors``; ``None`` where there is none."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            weights, scores, ranges = (file.get_tensor(name) for name in ("weights", "scores", "scores_range"))
            about = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
        if weights.ndim != 5 or weights.shape != scores.shape or ranges.shape != (*weights.shape[:3], 2):
            raise ValueError(f"weights {weights.shape}, scores {scores.shape} and ranges {ranges.shape} do not belong together")
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ResultError(f"{path} cannot be read: {error}; audit again") from error
    return Maps(weights, scores, ranges, about["tokens"], about["modules"], int(about["seq_len"]), about.get("targets", []))


def add_maps(data: dict[str, Any], blobs: dict[str, str], maps: Maps, budget: int, *, scores: bool = True) -> None:
    """Add the attention maps, and the tokens unless they are there, to what :func:`head_data` gave."""
    if not scores:
        maps = dataclasses.replace(maps, scores=np.where(maps.scores > 0, 255, 0).astype(np.uint8))
    packed = pack_maps(maps.weights, maps.scores, budget)
    if packed is None:
        return
    texts_of_samples, pool, (samples, modules, heads, rows, columns) = packed
    for sample, texts in enumerate(texts_of_samples):
        for module, text in enumerate(texts):
            blobs[f"blob-map-{sample}-{module}"] = text
    names = {name: index for index, name in enumerate(maps.modules)}
    by_name = [names.get(row["module"], -1) for row in data["grid"]]
    # Layers may be named by the layer and not by its attention; as long as both lists are complete, order decides.
    by_order = list(range(len(data["grid"]))) if len(data["grid"]) == modules else by_name
    data["maps"] = {
        "samples": samples,
        "heads": heads,
        "rows": rows,
        "columns": columns,
        "seqLen": maps.seq_len,
        # Tiles are of one size; the last may be smaller. Each was pooled in the file, and here again when space was short.
        "tile": -(-maps.seq_len // maps.weights.shape[-1]) * pool,
        "place": by_name if any(index >= 0 for index in by_name) else by_order,
        "ranges": [[round_matrix(module) for module in sample] for sample in maps.ranges[:samples].astype(float)]
        if scores
        else None,
        "reduced": _reduction(maps, samples, pool),
    }
    data["tokens"] = data["tokens"] or maps.tokens[:samples]
    data["targets"] = data["targets"] or maps.targets[:samples]


def _reduction(maps: Maps, samples: int, pool: int) -> str:
    parts = []
    if samples < maps.weights.shape[0]:
        parts.append(f"{samples} of {maps.weights.shape[0]} samples")
    if pool > 1:
        parts.append("tiles twice as wide" if pool == 2 else f"tiles {pool} times as wide")
    return f"To keep this page small it shows {', '.join(parts)}." if parts else ""


LARGEST = 336
"""Edge in pixels of the largest picture on a page."""


def data_address(picture: np.ndarray) -> str:
    """A picture as a data address, small enough for a page."""
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail((LARGEST, LARGEST))
    content = io.BytesIO()
    image.save(content, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
