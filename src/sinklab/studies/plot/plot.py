"""plot(): curves and maps of training runs, from their tables."""

from __future__ import annotations

from pathlib import Path

from sinklab.studies.arguments import command

__all__ = ["plot"]


@command
def plot(
    folders: list[Path],
    *,
    out: Path | None = None,
) -> Path:
    """Draw loss, sink rate and loss gap over steps, per layer, and heat maps of heads and positions over time.

    Works while a run is still going; needs the tables only, no model.

    Args:
        folders: Output directories of 'sinklab pretrain' or a sweep.
        out: .png, .svg or .pdf; by default curves.png in the first RUN.

    Examples:
        sinklab plot sinklab-runs/emergence
        sinklab plot runs/softmax runs/sigmoid --out emergence.svg
        sinklab plot sinklab-sweeps/lr  (a sweep stands for its runs)
    """
    from sinklab.report.curves import write_plot

    return write_plot(folders, folders[0] / "curves.png" if out is None else out)
