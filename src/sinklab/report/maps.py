"""Attention maps of an audit, as they lie in ``maps.safetensors``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sinklab.errors import ResultError
from sinklab.report.numbers import RANGES

__all__ = ["Maps", "read_maps"]

_MAPS = {"weights": "U8", "scores": "U8", "scores_range": "F32"}
"""Tensors of ``maps.safetensors`` and their dtypes."""


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
    tensors, metadata = _contents(path)
    missing = [name for name in _MAPS if name not in tensors]
    if missing:
        raise ResultError(f"{path} does not hold {', '.join(missing)}; audit again")
    weights, scores, ranges = tensors["weights"], tensors["scores"], tensors["scores_range"]
    if weights.ndim != 5 or 0 in weights.shape or weights.shape != scores.shape or ranges.shape != (*weights.shape[:3], 2):
        raise ResultError(
            f"{path}: weights {weights.shape}, scores {scores.shape} and scores_range {ranges.shape} do not belong together; "
            "expected (samples, layers, heads, rows, columns) twice and (samples, layers, heads, 2)"
        )
    try:
        tokens, targets = (_token_texts(metadata.get(name, "[]")) for name in ("tokens", "targets"))
        modules = [str(name) for name in json.loads(metadata.get("modules", "[]"))]
        seq_len = int(metadata.get("seq_len", str(weights.shape[-1])))
    except (ValueError, TypeError, RecursionError) as error:
        raise ResultError(f"{path}: its metadata cannot be read: {error}") from error
    if not weights.shape[-1] <= seq_len <= RANGES["key_position"][1]:
        raise ResultError(f"{path}: {seq_len} tokens are said to be in maps of {weights.shape[-1]} columns; audit again")
    return Maps(weights, scores, ranges, tokens, modules, seq_len, targets)


def _contents(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors of :data:`_MAPS` that are there, and the metadata."""
    try:
        with safe_open(path, framework="numpy") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys() if name in _MAPS}  # noqa: SIM118  not a mapping
            if wrong := [name for name in dtypes if dtypes[name] != _MAPS[name]]:
                raise ResultError(f"{path}: {wrong[0]} is {dtypes[wrong[0]]}, expected {_MAPS[wrong[0]]}; audit again")
            return {name: file.get_tensor(name) for name in dtypes}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ResultError(f"{path} is not a safetensors file: {error}") from error


def _token_texts(text: str) -> list[list[str]]:
    return [[str(token) for token in sample] for sample in json.loads(text)]
