"""Pictures on the page of an audit: what the model saw, with the attention that patches receive and their norms over it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from sinklab.errors import ResultError

__all__ = ["PICTURES_FILE", "data_address", "picture_data"]

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
