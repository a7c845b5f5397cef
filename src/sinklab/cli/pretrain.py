"""The command ``sinklab pretrain``: a recipe, changed by dotted paths, run into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sinklab.arguments import WHOLE, AsJson, command
from sinklab.cli import output
from sinklab.cli.quiet import quiet_libraries

__all__ = ["pretrain"]

DIVERGED = 3
"""Exit status of a run whose training went astray."""


@command
def pretrain(
    recipe: str,
    *,
    changes: Annotated[list[str] | None, "--set", WHOLE] = None,
    out: Path | None = None,
    resume: bool = False,
    init_from: Path | None = None,
    overwrite: bool = False,
    cache: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model from scratch and watch its sinks appear: one recipe, one folder.

    Writes run.json, table.parquet, checkpoints/ and model/ into the output directory. Status 3: the training diverged.

    Fields for --set: sinklab show RECIPE. What comes out: sinklab audit OUT/model.

    Args:
        recipe: A name from 'sinklab list recipes', FILE.py[:FUNCTION], or the run.json or YAML of a run.
        changes: Change a field, such as training.steps=500; repeatable.
        out: Output directory; by default sinklab-runs/<recipe>.
        resume: Go on with the run in the output directory, if there is one.
        init_from: Start from the weights of a run, a checkpoint or a model; its operation may differ.
        overwrite: Replace an earlier run in the output directory.
        cache: Directory for encoded text, shared by runs; by default ~/.cache/sinklab.

    Examples:
        sinklab pretrain tiny
        sinklab pretrain emergence --set model.operation.name=sigmoid --out runs/sigmoid
        sinklab pretrain emergence --set training.steps=500 --set optimizer.learning_rate=1e-3 --set data.corpus=./texts
        sinklab pretrain emergence --resume  (after a crash: the same numbers as without it)
        sinklab pretrain emergence --init-from runs/emergence --set model.operation.name=sigmoid --out runs/dissolve
        torchrun --nproc-per-node 4 -m sinklab pretrain gu2024_60m --set data.corpus=ORG/DATASET
    """
    quiet_libraries()
    from sinklab.configuration import with_overrides
    from sinklab.training.process import is_main
    from sinklab.training.resolve import resolve_recipe
    from sinklab.training.train import pretrain as run

    config = with_overrides(resolve_recipe(recipe), changes or [])
    folder = Path("sinklab-runs") / config.name if out is None else out
    result = run(config, folder, resume=resume, init_from=init_from, overwrite=overwrite, cache=cache)
    if is_main() and as_json:  # of several processes one speaks
        output.print_json(result.summary)
    elif is_main():
        result.show()
    if result.summary["status"] != "finished":
        raise SystemExit(DIVERGED if result.summary["status"] == "diverged" else 130)
