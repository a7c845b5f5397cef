"""Figures as files: in the format that the suffix says, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.results.file import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_image"]


def write_image(figure: Figure, path: Path, *, dpi: float | None = None, metadata: dict[str, str | None] | None = None) -> None:
    """Draw a figure into a file of a folder that is ours; a file there is replaced.

    Args:
        dpi: dots per inch; by default that of the figure.
        metadata: what the file says of itself; ``None`` for an entry leaves it out.

    Raises:
        InputError: what is there is no regular file.
    """
    write_atomically(
        path,
        lambda temporary: figure.savefig(
            temporary, format=path.suffix.lstrip("."), dpi="figure" if dpi is None else dpi, metadata=metadata
        ),
    )
