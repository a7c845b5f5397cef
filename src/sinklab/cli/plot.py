"""The command ``sinklab plot``: curves and maps of pre-training runs, from their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["EPILOG", "plot"]

EPILOG = (
    "Examples:\n\n"
    "sinklab plot sinklab-runs/emergence\n\n"
    "sinklab plot runs/softmax runs/sigmoid --out emergence.svg\n\n"
    "sinklab plot sinklab-sweeps/lr  (a sweep stands for its runs)"
)


def plot(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Output directories of 'sinklab pretrain' or a sweep.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help=".png, .svg or .pdf.", show_default="curves.png in the first RUN")
    ] = None,
) -> None:
    """Draw loss, sink rate and loss gap over steps, per layer, and heat maps of heads and positions over time.

    Works while a run is still going; needs the tables only, no model.
    """
    from sinklab.report.curves import write_plot

    typer.echo(str(write_plot(folders, folders[0] / "curves.png" if out is None else out)))
