"""The command ``sinklab trigger``: which operations learn to act at one token and to do nothing elsewhere, and how."""

from __future__ import annotations

from typing import Literal

from sinklab.results.run import Result
from sinklab.studies.arguments import (
    FreshSamples,
    Operations,
    Output,
    Seeds,
    StepCap,
    StepSamples,
    Tolerance,
    command,
    parse_seeds,
)


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
    bos: bool = True,
    batch: StepSamples = 128,
    learning_rate: float | None = None,
    tolerance: Tolerance = 5e-3,
    cap: StepCap = 50_000,
    samples: FreshSamples = 1000,
    output: Output = Output(),
) -> Result:
    """Train small models that must do nothing except at one token, and measure where their heads put their weight.

    Shows for every operation and seed the number of steps, the largest error, and the weight on BOS at all other tokens. Not to
    reach the tolerance within the limit of steps is a result. That token averages those before it; task and stop rule are those
    of Ran-Milo 2026 (arXiv 2603.11487), and relu without settings is the paper's, which divides by i - 1
    (docs/theory.md#the-trigger-task).

    Args:
        layers: Number of layers; more than one adds residual connections.
        heads: Heads per layer, each of the full width.
        length: Tokens of a sample, BOS included; at least 4.
        width: Coordinates of a token; at least 4.
        position: Position of the trigger in the evaluation, counted from 0; by default 7, or the last of a short sample.
        target: What the trigger averages: the tokens up to it including itself (as released), or those preceding it.
        bos: Begin samples with BOS.
        learning_rate: Of Adam; by default 1e-3 for one layer with one head and 1e-4 otherwise.

    Returns:
        A record for every model in ``summary["runs"]``, and operations that were not trained in ``summary["cannot"]``. The
        table has the numbers by head and the attention maps.

    Raises:
        ConfigurationError: nothing to train, an argument out of its range, or no operation that can do the task.
        InputError: the directory exists or cannot be made, or a stored model cannot be read.
        UnknownNameError: no such operation.

    Examples:
        sinklab trigger
        sinklab trigger --operation all --seeds 0 --out build/trigger
        sinklab trigger --operation softmax,relu --layers 2 --heads 2 --seeds 0..4 --out build/two  (half a minute a run)
        sinklab trigger --operation softpick,sink_logit --no-bos --json
    """
    from sinklab.studies.trigger.lab import operations_of, run_lab
    from sinklab.studies.trigger.problem import TriggerProblem

    problem = TriggerProblem(
        layers=layers, heads=heads, length=length, width=width, position=min(7, length - 1) if position is None else position,
        target=target, bos=bos, batch=batch, learning_rate=learning_rate, cap=cap, tolerance=tolerance,
    )  # fmt: skip
    chosen = operations_of(operation)
    return run_lab(problem, chosen, parse_seeds(seeds), output, samples=samples)
