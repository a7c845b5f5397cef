"""The output directory of an audit, read for a page: run record, summary, numbers, attention maps and pictures."""

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
from sinklab.report.numbers import Numbers
from sinklab.report.schema import require_audit, require_kind
from sinklab.results.table import read_run

__all__ = ["PICTURES_FILE", "Audit", "Maps", "data_address", "picture_data", "read_audit", "read_maps"]


@dataclasses.dataclass(frozen=True)
class Audit:
    """Everything a page is made from."""

    folder: Path
    run: dict[str, Any]
    summary: dict[str, Any]
    numbers: Numbers
    maps: Maps | None

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""
        config = self.run.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def model(self) -> str:
        """The model's name; the folder's when nothing says it."""
        return str(self.summary.get("model") or self.config.get("model") or self.folder.name)

    @property
    def operation(self) -> str:
        """The attention operation's name."""
        return str(self.summary.get("operation") or self.config.get("operation") or "not recorded")

    @property
    def threshold(self) -> float:
        """Mean weight above which a head sinks."""
        value = self.config.get("threshold")
        return float(value) if isinstance(value, (int, float)) else 0.3

    @property
    def parts(self) -> list[tuple[str, Audit]]:
        """Of an encoder–decoder, each part by its name as an audit of its own; empty for other models.

        The loss is that of the decoder alone.
        """
        entries = self.summary.get("parts")
        entries = (
            [entry for entry in entries if isinstance(entry, dict) and entry.get("part")] if isinstance(entries, list) else []
        )
        return [
            (
                str(entry["part"]),
                dataclasses.replace(
                    self,
                    summary={**self.summary, "parts": [], **entry} | ({} if entry["part"] == "decoder" else {"loss": None}),
                    numbers=Numbers(self.folder / "table.parquet", self.config, str(entry["part"])),
                ),
            )
            for entry in entries
        ]

    @property
    def by_part(self) -> list[tuple[str, Audit]]:
        """:attr:`parts`, or the audit with the numbers of each part where sinks were looked for in all parts at once.

        That is so of older audits of encoder–decoders of pictures, such as a DETR. Of a model without parts it is the audit,
        without a name.
        """
        return self.parts or [("", self)]

    @property
    def num_positions(self) -> int:
        """Number of positions that the page must be able to show."""
        known = [self.numbers.max_position + 1, self.maps.seq_len if self.maps else 0]
        return max(known)


def read_audit(folder: Path) -> Audit:
    """Read the output directory of an audit.

    Raises:
        InputError: the run is of another command; a file is missing or is not what its name says (``maps.safetensors`` may be
            absent).
        ResultError: the summary, the table or the maps do not follow their schema.
    """
    folder = Path(folder)
    run = read_run(folder)
    require_kind(run, folder, "audit")
    summary = read_run(folder, "summary.json")
    require_audit(summary, folder / "summary.json")
    config = run.get("config")
    numbers = Numbers(folder / "table.parquet", config if isinstance(config, dict) else {})
    return Audit(folder, run, summary, numbers, read_maps(folder / "maps.safetensors"))


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
    if weights.shape[-1] > seq_len:
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
            metadata = file.metadata() or {}
            pictures, received, norms = (file.get_tensor(name) for name in ("pictures", "received", "norms"))
        grid, names = json.loads(metadata["grid"]), [str(name) for name in json.loads(metadata["names"])]
        sources = [str(name) for name in json.loads(metadata["sources"])]
        whole = (
            pictures.dtype == np.uint8
            and pictures.ndim == 4
            and received.ndim == 4
            and norms.ndim == 3
            and len(pictures) == len(received) == len(norms) == len(sources)
            and received.shape[-1] == norms.shape[-1] == len(names) >= grid[0] * grid[1] > 0
        )
    except (SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
        raise ResultError(f"{path} cannot be read: {error}; audit again") from error
    if not whole:
        raise ResultError(
            f"{path}: pictures {pictures.shape}, received {received.shape} and norms {norms.shape} do not belong together; "
            "audit again"
        )
    averaged = received.size > MOST_NUMBERS
    if averaged:
        received = received.mean(2, keepdims=True)
    return {
        "images": [data_address(picture) for picture in pictures],
        "sources": sources,
        "grid": [int(size) for size in grid],
        "names": names,
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
