"""The command ``sinklab backcopy``: heads that copy at a trigger and are dormant elsewhere, and what that does to BOS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from typing_extensions import Doc

from sinklab.results.run import Result
from sinklab.studies.arguments import CorpusSource, Operations, Out, Overwrite, Progress, Seeds, command, parse_seeds

__all__ = ["backcopy"]


@command
def backcopy(
    *,
    operation: Operations = "softmax,relu",
    optimizer: Sequence[str] = ("adamw",),
    layers: Sequence[int] = (1,),
    heads: int = 1,
    seeds: Seeds = "0..2",
    steps: int | None = None,
    scale: Literal["small", "paper"] = "small",
    learning_rate: float | None = None,
    triggers: int = 3,
    no_attention: Sequence[int] = (),
    no_feed_forward: Sequence[int] = (),
    corpus: CorpusSource = "python_source",
    samples: Annotated[int, Doc("Fresh samples that a model is evaluated on.")] = 256,
    out: Out = None,
    overwrite: Overwrite = False,
    progress: Progress | None = None,
) -> Result:
    """Train small models to copy behind triggers and predict bigrams elsewhere, and measure what their heads do.

    Shows for every run the loss above the floor, the three numbers of extreme tokens (weight on BOS, norm of its value, norm of
    its residual), whether the copying head is active at triggers and dormant elsewhere, and the loss without it. The task is
    that of Guo et al. 2024 (arXiv 2410.13835), smaller by default; docs/backcopy.md explains the columns.

    Args:
        optimizer: adamw, sgd, or both.
        layers: Number of layers; several depths are several models.
        heads: Heads per layer.
        steps: Number of updates; by default 4,000 at the scale small and 10,000 at the scale paper.
        scale: Sizes: 64 tokens and width 64, or the paper's 256 and 256.
        learning_rate: The same for all runs; by default chosen by scale, optimizer and operation.
        triggers: How many of the most frequent characters are triggers.
        no_attention: Layers without attention, counted from 0.
        no_feed_forward: Layers without feed-forward, counted from 0.
        out: Directory for table.parquet, summary.json, run.json and curves.png; finished runs in it are not trained again.
        overwrite: Train the runs in the directory again.

    Returns:
        See :func:`~sinklab.studies.backcopy.lab.run_backcopy`, which takes sizes of its own.

    Raises:
        ConfigurationError: nothing to train, or an argument out of its range.
        InputError: a text from which no chain can be made, or a directory that holds something else.

    Examples:
        sinklab backcopy --seeds 0  (a minute a run on a core)
        sinklab backcopy --layers 3 --optimizer adamw,sgd --out build/backcopy
        sinklab backcopy --operation softmax,sink_logit,gated --json
        sinklab backcopy --scale paper --layers 3 --no-attention 2 --out build/paper  (days on a CPU)
    """
    from sinklab.studies.backcopy.lab import run_backcopy
    from sinklab.studies.backcopy.training import SCALES, BackcopySettings
    from sinklab.studies.trigger.lab import operations_of

    settings = BackcopySettings(
        heads=heads,
        triggers=triggers,
        learning_rate=learning_rate,
        no_attention=tuple(no_attention),
        no_feed_forward=tuple(no_feed_forward),
        **{**SCALES[scale], **({} if steps is None else {"steps": steps})},
    )
    return run_backcopy(
        operations_of(operation),
        parse_seeds(seeds),
        settings,
        optimizers=optimizer,
        layers=layers,
        corpus=corpus,
        samples=samples,
        out=out,
        overwrite=overwrite,
        scale=scale,
        progress=progress,
    )
