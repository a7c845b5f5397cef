"""The command ``sinklab trigger``: which operations learn to act at one token and to do nothing elsewhere, and how."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sinklab.errors import ConfigurationError
from sinklab.results.run import Result
from sinklab.studies.arguments import (
    Anyway,
    FreshSamples,
    Operations,
    Output,
    Resume,
    Seeds,
    StepCap,
    StepSamples,
    Tolerance,
    command,
    parse_seeds,
)

OPERATIONS = {"trigger": "softmax,relu", "retrieval": "softmax,relu:power=0"}
"""By default; of retrieval undivided ReLU, since ReLU divided by a number of keys provably cannot do it."""


@command
def trigger(
    *,
    task: Literal["trigger", "retrieval"] = "trigger",
    operation: Operations = "auto",
    layers: int = 1,
    heads: int = 1,
    seeds: Seeds = "0..2",
    length: int = 16,
    width: int = 16,
    keys: int = 16,
    values: int = 4,
    position: int | None = None,
    target: Literal["including", "preceding", "value", "token"] | None = None,
    triggers: int = 1,
    bos: bool = True,
    batch: StepSamples = 128,
    learning_rate: float | None = None,
    tolerance: Tolerance = 5e-3,
    cap: StepCap = 50_000,
    samples: FreshSamples = 1000,
    anyway: Anyway = False,
    resume: Resume = False,
    output: Output = Output(),
) -> Result:
    """Train small models that must do nothing except at one token, and measure where their heads put their weight.

    Shows for every operation and seed the number of steps, the largest error, and the weight on BOS at all other tokens. Not to
    reach the tolerance within the limit of steps is a result. By the task 'trigger' that token averages those before it; task
    and stop rule are those of Ran-Milo 2026 (arXiv 2603.11487), and relu without settings is the paper's, which divides by
    i - 1 (docs/theory.md#the-trigger-task). By 'retrieval' it looks up a key; off it a softmax head has to park its weight, and
    parks it on BOS, which is proved.

    Args:
        task: What the one token is to do: average, or look something up.
        operation: From 'sinklab list operations', optionally with settings: softmax,relu:uncounted=0; or all. By default (auto)
            softmax and a ReLU that can do the task.
        layers: Number of layers; more than one adds residual connections. Of 'trigger', as all that is not said of retrieval.
        heads: Heads per layer, each of the full width.
        length: Tokens of a sample, BOS included; at least 4; of both tasks.
        width: Coordinates of a token; at least 4.
        keys: Of retrieval, the number of keys; at least the length less two.
        values: Of retrieval, coordinates of a value.
        position: Position of the trigger in the evaluation, counted from 0; by default 7, or the last of a short sample.
        target: What the trigger averages: including itself (as released), or those preceding it. Of retrieval, what it
            answers: the value of the token that it asks for, or all of the token.
        triggers: Number of triggers in each sample, at distinct positions; each averages the earlier ones with the content.
        bos: Begin samples with BOS.
        learning_rate: Of Adam; by default 1e-3 for one layer with one head and 1e-4 otherwise.

    Returns:
        A record for every model in ``summary["runs"]``, and operations that were not trained in ``summary["cannot"]``. The
        table has the numbers by head and the attention maps, of which the directory has a picture each.

    Raises:
        ConfigurationError: nothing to train, an argument out of its range or of the other task, no operation that can do the
            task, or a lab of other settings to go on with.
        InputError: the directory exists or cannot be made, or a stored model cannot be read.
        UnknownNameError: no such operation.

    Examples:
        sinklab trigger
        sinklab trigger --operation all --seeds 0 --out build/trigger
        sinklab trigger --operation softmax,relu --layers 2 --heads 2 --seeds 0..4 --out build/two  (half a minute a run)
        sinklab trigger --triggers 3
        sinklab trigger --operation softpick,sink_logit --no-bos --json
        sinklab trigger --task retrieval --operation softmax,softpick,sink_logit --out build/retrieval
    """
    from sinklab.studies.trigger.lab import as_released, operations_of, run_lab
    from sinklab.studies.trigger.problem import ToyProblem, TriggerProblem
    from sinklab.studies.trigger.retrieval import RetrievalProblem

    kind: type[ToyProblem] = RetrievalProblem if task == "retrieval" else TriggerProblem
    given = {
        "layers": layers, "heads": heads, "width": width, "keys": keys, "values": values, "triggers": triggers, "bos": bos,
    }  # fmt: skip
    usual = {
        field.name: field.default for field in (*dataclasses.fields(TriggerProblem), *dataclasses.fields(RetrievalProblem))
    }
    own = {field.name for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in own and value != usual[name]:
            raise ConfigurationError(f"`{name}` {value} is an option of the other task; leave it out, or change `task` {task}")
    problem = kind(
        **{name: value for name, value in given.items() if name in own},
        **({} if target is None else {"target": target}),
        length=length,
        position=min(7, length - 1) if position is None else position,
        batch=batch,
        learning_rate=learning_rate,
        tolerance=tolerance,
        cap=cap,
    )
    return run_lab(
        problem,
        operations_of(OPERATIONS[task] if operation == "auto" else operation, as_released),
        parse_seeds(seeds),
        samples=samples,
        anyway=anyway,
        resume=resume,
        **vars(output),
    )
