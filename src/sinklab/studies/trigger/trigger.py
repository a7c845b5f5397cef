"""The command ``sinklab trigger``: which attention operations learn to do nothing, and what they use for it."""

from __future__ import annotations

from typing import Literal

from sinklab.results.run import Result
from sinklab.studies.arguments import (
    Anyway,
    FreshSamples,
    Operations,
    Out,
    Overwrite,
    Progress,
    Resume,
    Seeds,
    StepCap,
    StepSamples,
    Tolerance,
    command,
    parse_seeds,
)

__all__ = ["trigger"]


@command
def trigger(
    *,
    operation: Operations = "softmax,relu",
    layers: int = 1,
    heads: int = 1,
    seeds: Seeds = "0..2",
    length: int = 16,
    width: int = 16,
    position: int | None = None,
    target: Literal["including", "preceding"] = "including",
    triggers: int = 1,
    positions: str = "no_position",
    bos: bool = True,
    start: Literal["random", "construction"] = "random",
    noise: float = 0.02,
    batch: StepSamples = 128,
    learning_rate: float | None = None,
    tolerance: Tolerance = 5e-3,
    cap: StepCap = 50_000,
    samples: FreshSamples = 1000,
    anyway: Anyway = False,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    progress: Progress | None = None,
) -> Result:
    """Train small models that must do nothing except at one token, and measure where their heads put their weight.

    Shows for every operation and seed the number of steps, the largest error, and the weight on BOS at all other tokens. Not to
    reach the tolerance within the limit of steps is a result. The task and the stop rule are those of Ran-Milo 2026
    (arXiv 2603.11487); relu without settings is the paper's, which divides by i - 1. docs/theory.md#the-trigger-task explains the columns.

    Args:
        layers: Number of layers; more than one adds residual connections.
        heads: Heads per layer, each of the full width.
        length: Tokens of a sample, BOS included; at least 4.
        width: Coordinates of a token; at least 4.
        position: Position of the trigger in the evaluation, counted from 0; by default 7, or the last of a short sample.
        target: What the trigger averages: itself with the tokens before it (as released), or those before it.
        triggers: Number of triggers in each sample, at distinct positions; each averages the earlier ones with the content.
        positions: Position scheme, from 'sinklab list positions'.
        bos: Begin samples with BOS.
        start: Small random maps (as released), or the exact solution with noise; softmax and relu, one head.
        noise: Standard deviation of the noise on the exact solution.
        learning_rate: Of Adam; by default 1e-3 for one layer with one head and 1e-4 otherwise.

    Returns:
        A record for every model in ``summary["runs"]``, and operations that were not trained in ``summary["cannot"]``. The
        table has the numbers by head and the attention maps, of which the directory has a picture each.

    Raises:
        ConfigurationError: nothing to train, an argument out of its range, no operation that can do the task, or a lab of
            other settings to go on with.
        InputError: the directory exists or cannot be made, or a stored model cannot be read.
        UnknownNameError: no such operation or position scheme.

    Examples:
        sinklab trigger
        sinklab trigger --operation all --seeds 0 --out build/trigger
        sinklab trigger --operation softmax,relu --layers 2 --heads 2 --seeds 0..4 --out build/two  (half a minute a run)
        sinklab trigger --positions rotary --triggers 3
        sinklab trigger --operation softpick,sink_logit --no-bos --json
    """
    from sinklab.studies.trigger.evaluation import evaluate
    from sinklab.studies.trigger.expressible import obstacle
    from sinklab.studies.trigger.lab import as_released, operations_of, run_lab
    from sinklab.studies.trigger.maps import write_maps
    from sinklab.studies.trigger.problem import TriggerProblem

    problem = TriggerProblem(
        layers=layers,
        heads=heads,
        length=length,
        width=width,
        position=min(7, length - 1) if position is None else position,
        target=target,
        triggers=triggers,
        positions=positions,
        bos=bos,
        start=start,
        noise=noise,
        batch=batch,
        learning_rate=learning_rate,
        tolerance=tolerance,
        cap=cap,
    )
    return run_lab(
        problem,
        operations_of(operation, as_released),
        parse_seeds(seeds),
        evaluate=evaluate,
        obstacle=obstacle,
        picture=write_maps,
        samples=samples,
        anyway=anyway,
        out=out,
        overwrite=overwrite,
        resume=resume,
        progress=progress,
    )
