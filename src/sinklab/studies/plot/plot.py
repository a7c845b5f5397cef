"""plot(): curves and maps of training runs, from their tables."""

from __future__ import annotations

import sys
from pathlib import Path

from sinklab.errors import InputError
from sinklab.results.file import check_file
from sinklab.studies.arguments import OverwriteFile, command


@command
def plot(
    folders: list[Path],
    *,
    out: Path | None = None,
    overwrite: OverwriteFile = False,
) -> Path:
    """Draw loss, sink rate and loss gap over steps and per layer, and heat maps of heads and positions over time.

    Works while a run is still training; needs only the tables, no model. Cells of a sweep without numbers yet are listed, and
    more than 28 runs are refused.

    Args:
        folders: Output directories of 'sinklab pretrain' or a sweep.
        out: .png, .svg or .pdf; by default curves.png in the first folder, which is replaced.

    Examples:
        sinklab plot sinklab-runs/emergence
        sinklab plot runs/softmax runs/sigmoid --out emergence.svg
        sinklab plot sinklab-sweeps/lr  (a sweep stands for its runs)
        sinklab plot sinklab-sweeps/lr/*seed=0*  (some of them)
    """
    check_file(out, overwrite)
    from sinklab.report.curves import write_plot

    if not folders:
        raise InputError("give the output directory of at least one run or sweep")

    def note(text: str) -> None:
        print(text, file=sys.stderr)

    if out is None:  # a name in a folder that is ours
        return write_plot(folders, folders[0] / "curves.png", overwrite=True, note=note)
    return write_plot(folders, out, overwrite=overwrite, note=note)
