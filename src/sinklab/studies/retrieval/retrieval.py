"""The command ``sinklab retrieval``: heads that must look something up at one token, and be silent at all others."""

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

__all__ = ["retrieval"]


@command
def retrieval(
    *,
    operation: Operations = "softmax,relu:power=0",
    target: Literal["value", "token"] = "value",
    seeds: Seeds = "0..2",
    length: int = 16,
    keys: int = 16,
    values: int = 4,
    position: int = 7,
    batch: StepSamples = 128,
    learning_rate: float = 1e-3,
    tolerance: Tolerance = 5e-3,
    cap: StepCap = 50_000,
    samples: FreshSamples = 1000,
    anyway: Anyway = False,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    progress: Progress | None = None,
) -> Result:
    """Train one head to look up a key at one token and to be silent elsewhere, and measure where its weight goes.

    Off the trigger a softmax head has to park its weight, and parks it on BOS. relu:power=0 is undivided ReLU, which solves the
    task exactly; ReLU divided by a number of keys provably cannot. docs/theory.md#key-query-retrieval-at-a-trigger has the proofs.

    Args:
        target: What the trigger answers: the value of the token that it asks for, or all of it.
        length: Tokens of a sample, BOS included; at least 4.
        keys: Number of keys; at least the length less two.
        values: Coordinates of a value.
        position: Position of the trigger in the evaluation, counted from 0.
        learning_rate: Of Adam.

    Returns:
        A record for every model in ``summary["runs"]``, and operations that were not trained in ``summary["cannot"]``.

    Raises:
        ConfigurationError: nothing to train, an argument out of its range, no operation that can do the task, or a lab of
            other settings to go on with.
        InputError: the directory exists or cannot be made, or a stored model cannot be read.
        UnknownNameError: no such operation.

    Examples:
        sinklab retrieval
        sinklab retrieval --target token --seeds 0 --json
        sinklab retrieval --operation softmax,softpick,sink_logit --seeds 0..2 --out build/retrieval
    """
    from sinklab.registry import operations
    from sinklab.studies.retrieval.retrieval_problem import RetrievalProblem, evaluate_retrieval, retrieval_obstacle
    from sinklab.studies.trigger.lab import as_released, operations_of, run_lab

    problem = RetrievalProblem(
        length=length,
        keys=keys,
        values=values,
        position=position,
        target=target,
        batch=batch,
        learning_rate=learning_rate,
        tolerance=tolerance,
        cap=cap,
    )
    return run_lab(
        problem,
        operations_of(operation, as_released),
        parse_seeds(seeds),
        evaluate=evaluate_retrieval,
        obstacle=retrieval_obstacle,
        usual=operations.make,
        samples=samples,
        anyway=anyway,
        out=out,
        overwrite=overwrite,
        resume=resume,
        progress=progress,
    )
