"""plot(): curves and maps of training runs, from their tables."""

from __future__ import annotations

from pathlib import Path

from sinklab.errors import InputError
from sinklab.results.file import check_file, write_file
from sinklab.results.progress import say
from sinklab.studies.arguments import OverwriteFile, command


@command
def plot(folders: list[Path], *, out: Path | None = None, overwrite: OverwriteFile = False) -> Path:
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
    from sinklab.report.curves import draw_runs, notes_of, read_runs

    if not folders:
        raise InputError("give the output directory of at least one run or sweep")
    path = out or folders[0] / "curves.png"  # which is a name in a folder that is ours
    runs, missing = read_runs(folders)
    notes = notes_of(runs, missing)
    figure, suffix = draw_runs(runs, notes), path.suffix.lstrip(".")
    if suffix not in figure.canvas.get_supported_filetypes():
        raise InputError(f"cannot write {path.name!r}: give a name that ends in .png, .svg or .pdf")
    write_file(path, lambda temporary: figure.savefig(temporary, format=suffix), overwrite=overwrite or out is None)
    for note in notes:
        say(note)
    return path
