"""Attention maps and pictures of an audit as they lie in its folder, and what the script of a page draws from them."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sinklab.errors import ResultError
from sinklab.report.pack import pack_maps, round_matrix

__all__ = ["HEAD_NUMBERS", "PICTURES_FILE", "Maps", "add_maps", "data_address", "picture_data", "read_maps"]

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
    """Attention maps of a few samples, pooled to tiles by the largest value.

    Attributes:
        weights: uint8 ``(samples, modules, heads, query_tiles, key_tiles)``: ``round(255 * sqrt(weight))``.
        scores: uint8, same shape: 0 where the tile is hidden, 1…255 linear between ``ranges``.
        ranges: float32 ``(samples, modules, heads, 2)``: smallest and largest score.
        tokens: the token texts of each sample; may be empty.
        modules: the name of each module.
        seq_len: tokens in a sample.
        targets: of an encoder–decoder, the token texts that the decoder reads.
    """

    weights: NDArray[np.uint8]
    scores: NDArray[np.uint8]
    ranges: NDArray[np.float32]
    tokens: list[list[str]]
    modules: list[str]
    seq_len: int
    targets: list[list[str]] = dataclasses.field(default_factory=list)


def read_maps(path: Path) -> Maps | None:
    """Read ``maps.safetensors``; ``None`` where there is none.

    Raises:
        ResultError: the file is not what an audit writes.
    """
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
    """Add the attention maps, and the tokens unless they are there, to what :func:`head_data` gave.

    Args:
        data, blobs: changed in place.
        maps: what to add, as finely as the budget allows.
        budget: characters that the packed maps may take.
        scores: keep them; without, all that is kept of them is which tiles no query sees.
    """
    if not scores:
        maps = dataclasses.replace(maps, scores=np.where(maps.scores > 0, 255, 0).astype(np.uint8))
    packed = pack_maps(maps.weights, maps.scores, budget)
    if packed is None:
        return
    samples, modules, heads, rows, columns = packed.shape
    for sample, texts in enumerate(packed.texts):
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
        "tile": -(-maps.seq_len // maps.weights.shape[-1]) * packed.plan.pool,
        "place": by_name if any(index >= 0 for index in by_name) else by_order,
        "ranges": [[round_matrix(module) for module in sample] for sample in maps.ranges[:samples].astype(float)]
        if scores
        else None,
        "reduced": _reduction(maps, samples, packed.plan.pool, packed.plan.score_bits if scores else 8),
    }
    data["tokens"] = data["tokens"] or maps.tokens[:samples]
    data["targets"] = data["targets"] or maps.targets[:samples]


def _reduction(maps: Maps, samples: int, pool: int, bits: int) -> str:
    parts = []
    if samples < maps.weights.shape[0]:
        parts.append(f"{samples} of {maps.weights.shape[0]} samples")
    if pool > 1:
        parts.append("tiles twice as wide" if pool == 2 else f"tiles {pool} times as wide")
    if bits < 8:
        parts.append(f"scores in {2**bits - 1} steps")
    return f"To keep this page small it shows {', '.join(parts)}." if parts else ""


PICTURES_FILE = "pictures.safetensors"
"""In the folder of an audit of a model of pictures whose patches have places."""

LARGEST = 336
"""Edge in pixels of the largest picture on a page."""

MOST_NUMBERS = 600_000
"""Weights on a page; where there are more, heads are averaged."""


def picture_data(folder: Path) -> dict[str, Any] | None:
    """What the page draws; ``None`` where no pictures were recorded.

    Returns:
        ``images`` (data addresses), ``grid`` (rows and columns), ``names`` of all positions, patches last, ``received`` in
        ten-thousandths by sample, layer, head and position, ``norms`` by sample, layer (the first is the input) and position,
        ``averaged``: whether heads were.

    Raises:
        ResultError: the file does not hold what it should.
    """
    path = folder / PICTURES_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            about = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            pictures, received, norms = (file.get_tensor(name) for name in ("pictures", "received", "norms"))
        if (
            pictures.ndim != 4
            or not len(pictures) == len(received) == len(norms)
            or not received.shape[-1] == norms.shape[-1] == len(about["names"])
        ):
            raise ValueError(f"pictures {pictures.shape}, received {received.shape} and norms {norms.shape} differ")
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ResultError(f"{path} cannot be read: {error}; audit again") from error
    averaged = received.size > MOST_NUMBERS
    if averaged:
        received = received.mean(2, keepdims=True)
    return {
        "images": [data_address(picture) for picture in pictures],
        "sources": about["sources"],
        "grid": about["grid"],
        "names": about["names"],
        "received": np.rint(1e4 * np.nan_to_num(received)).astype(int).tolist(),
        "norms": [[[float(f"{value:.3g}") for value in row] for row in sample] for sample in np.nan_to_num(norms).tolist()],
        "averaged": averaged,
    }


def data_address(picture: np.ndarray) -> str:
    """A picture as a data address, small enough for a page."""
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail((LARGEST, LARGEST))
    content = io.BytesIO()
    image.save(content, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
