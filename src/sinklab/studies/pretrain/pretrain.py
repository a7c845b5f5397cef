"""pretrain(): a recipe with changes, trained from scratch while its sinks are watched; one folder with all that came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sinklab.results.folder import default_out, from_outside
from sinklab.studies.arguments import WHOLE, Known, Quiet, command

if TYPE_CHECKING:
    from sinklab.results.run import Result
    from sinklab.training.config import PretrainingConfig


@command
def pretrain(
    recipe: Annotated[str | PretrainingConfig, Known("recipes")],
    *,
    changes: Annotated[list[str] | None, "--set", WHOLE] = None,
    out: Path | None = None,
    resume: bool = False,
    init_from: Path | None = None,
    overwrite: bool = False,
    cache: Path | None = None,
    quiet: Quiet = False,
) -> Result:
    """Train a small model from scratch and watch its sinks appear: one recipe, one folder.

    Writes run.json, table.parquet, checkpoints/ and model/ into the output directory. Status 3: the training diverged.

    'sinklab show RECIPE' lists the fields for --set; 'sinklab audit OUT/model' audits the result.

    Args:
        recipe: A name from 'sinklab list recipes', or the run.json or YAML of a run.
        changes: Change a field, such as training.steps=500; repeatable.
        out: Output directory; by default sinklab-runs/<recipe>.
        resume: Continue the run in the output directory, if there is one.
        init_from: Start from the weights of a run, a checkpoint or a model; its operation may differ.
        overwrite: Replace an earlier run in the output directory.
        cache: Directory for encoded text, shared by runs; by default ~/.cache/sinklab.

    In Python:
        ``recipe`` may be a configuration.

    Raises:
        ConfigurationError: fields that cannot take effect here, or a run to resume that has another configuration.
        InputError: text, weights, a folder or a disk that cannot be used.

    Examples:
        sinklab pretrain tiny
        sinklab pretrain emergence --set model.operation.name=sigmoid --out runs/sigmoid
        sinklab pretrain emergence --set training.steps=500 --set optimizer.learning_rate=1e-3 --set data.corpus=./texts
        sinklab pretrain emergence --resume  (after a crash: the same numbers as without it)
        sinklab pretrain emergence --init-from runs/emergence --set model.operation.name=sigmoid --out runs/dissolve
        torchrun --nproc-per-node 4 -m sinklab pretrain gu2024_60m --set data.corpus=ORG/DATASET
    """
    from sinklab.configuration import with_overrides
    from sinklab.training.checkpoints import saved_steps
    from sinklab.training.config import resolve_recipe
    from sinklab.training.train import is_unfinished, run_training

    config = with_overrides(resolve_recipe(recipe), changes or [])
    folder = default_out("sinklab-runs", config.name) if out is None else out
    try:
        return run_training(
            config, folder, resume=resume, init_from=init_from, overwrite=overwrite, cache=cache, progress=not quiet
        )
    except BaseException as stop:
        steps = saved_steps(folder / "checkpoints") if from_outside(stop) and is_unfinished(folder) else []
        if steps:
            stop.add_note(f"checkpoint-{steps[0]} is kept in {folder}: go on with `resume`")
        raise
