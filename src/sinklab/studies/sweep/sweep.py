"""sweep(): a recipe over a grid of settings and seeds, on this machine or on a Ray cluster; every cell a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sinklab.results.folder import default_out
from sinklab.studies.arguments import WHOLE, Jobs, Known, Quiet, Retries, command, parse_seeds

if TYPE_CHECKING:
    from sinklab.results.run import Result
    from sinklab.training.config import PretrainingConfig


@command
def sweep(
    recipe: Annotated[str | PretrainingConfig, Known("recipes")],
    *,
    grid: Annotated[list[str] | None, WHOLE] = None,
    seeds: str | None = None,
    changes: Annotated[list[str] | None, "--set", WHOLE] = None,
    out: Path | None = None,
    jobs: Jobs = None,
    retries: Retries = 2,
    ray: str | None = None,
    resume: bool = False,
    cache: Path | None = None,
    quiet: Quiet = False,
) -> Result:
    """Run a recipe over a grid of settings and seeds, and summarise over seeds.

    Writes a run folder for each cell, and table.parquet and cells.csv over all of them, into the output directory. A diverged
    cell is a result. Status 1: some cells failed; the results of the others are kept.

    Args:
        recipe: A name from 'sinklab list recipes', or the run.json or YAML of a run.
        grid: Values of a field, in YAML; repeatable, all combinations are run. lr, operation, position, optimizer, schedule,
            layers, heads and context are short names.
        seeds: Run every combination with each of these seeds (of initialisation and data), both ends included; by default the
            recipe's.
        changes: Change a field in all cells, such as training.steps=500; repeatable.
        out: Output directory; by default sinklab-sweeps/<recipe>.
        ray: Run on a Ray cluster; the output directory must be shared by its nodes.
        resume: Continue the sweep in the output directory; finished cells are kept.
        cache: Directory for encoded text; by default ~/.cache/sinklab, with --ray OUT/cache.

    In Python:
        ``recipe`` may be a configuration.

    Raises:
        ConfigurationError, InputError: as :func:`~sinklab.jobs.driver.run_sweep`, which also takes values that are no text.

    Examples:
        sinklab sweep tiny --grid lr=1e-3,4e-3 --seeds 0..2
        sinklab sweep emergence --grid operation=softmax,sigmoid --grid optimizer.weight_decay=0,0.1 --seeds 0..4 --jobs 2
        sinklab sweep emergence --grid 'model.operation={name: sigmoid, normalize: true},{name: softmax}'
        sinklab sweep emergence --grid lr=1e-3,4e-3 --seeds 0..9 --resume  (after Ctrl-C, or to add seeds)
        sinklab sweep emergence --grid lr=1e-3,4e-3 --seeds 0..4 --ray auto --out /shared/sweep
    """
    from sinklab.jobs.driver import run_sweep
    from sinklab.jobs.grid import parse_grid
    from sinklab.training.config import resolve_recipe

    config = resolve_recipe(recipe)
    return run_sweep(
        config,
        parse_grid(grid or []),
        default_out("sinklab-sweeps", config.name) if out is None else out,
        seeds=None if seeds is None else parse_seeds(seeds),
        changes=changes or [],
        jobs=jobs,
        retries=retries,
        ray=ray,
        resume=resume,
        cache=cache,
        progress=not quiet,
    )
