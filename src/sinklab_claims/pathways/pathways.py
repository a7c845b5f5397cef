"""The command ``sinklab pathways``: which ways to do nothing leave a model undistorted, at equal compute and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from sinklab.results.folder import default_out
from sinklab.results.run import Result, silent
from sinklab.studies.arguments import Jobs, Progress, Retries, Seeds, WrittenTo, command, parse_seeds

__all__ = ["pathways"]

SEEDS_OF_TINY, SEEDS = "0..7", "0..2"
"""By default."""


@command
def pathways(
    *,
    operations: str | Sequence[Mapping[str, Any]] | None = None,
    seeds: Seeds | None = None,
    scale: Literal["tiny", "small", "medium", "60m", "1b"] = "tiny",
    base: Literal["bos", "no-bos"] | None = None,
    rate: float | None = None,
    out: Annotated[Path | None, WrittenTo("sinklab-pathways")] = None,
    store: Annotated[Path | None, WrittenTo("sinklab-claims")] = None,
    jobs: Jobs = None,
    ray: str | None = None,
    retries: Retries = 2,
    cache: Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train operations that let a head do nothing, and measure what each costs and distorts.

    Each operation gets its own learning rate, the best of five on separate seeds. At that rate it is trained on the seeds of
    the evaluation, with as many parameters as softmax, and its loss is compared with softmax's by tests of equivalence. The
    number of trainings and the time they take are shown before they start. Finished trainings and evaluations are kept: the
    same command continues. Prints a table. Status 1: some trainings failed; the results of the others
    are kept.

    docs/claims.md#pathways-ways-to-do-nothing has the protocol, the columns, the settings of the operations, and what
    low-distortion means.

    Args:
        operations: From 'sinklab list operations'; a name alone has the settings of its paper. Softmax is always included; by
            default the twelve of docs/claims.md#pathways-ways-to-do-nothing.
        seeds: Seeds of the evaluation, both ends included, or a list; an answer needs three or more. By default 0..7 at the
            tiny scale and 0..2 elsewhere. Rates are chosen on seeds 1000 and 1001 (at the tiny scale) or 1000.
        scale: What is trained; tiny needs one core, some 17 seconds a training.
        base: Whether rows begin with BOS. By default no-bos where the scale has it, since a BOS in every row is a place to rest
            whatever the operation.
        rate: One learning rate for all, relative to that of the scale, instead of a search of five for each operation, which
            takes more than twice the trainings; without the trigger task. An operation outside a bound may
            be inside at its own rate.
        out: Directory for table.parquet, run.json and pathways.md, all numbers in tables; each base needs its own.
        store: Directory of trained models, shared with 'sinklab reproduce', so that none is trained twice.
        ray: Train on a Ray cluster; the store must be shared by its nodes.
        cache: Directory for encoded text; by default ~/.cache/sinklab, with --ray STORE/cache.

    Returns:
        In ``summary``: ``rows``, one for each operation, softmax first, with ``replacement`` (the answer, and the bounds that
        fail or are open; of use where softmax has a sink at the one rate); ``cannot``, operations that provably cannot do the
        trigger task, and why; ``errors``, trainings and read-outs that failed.

    Raises:
        UnknownNameError: no such operation.
        ConfigurationError: no seeds, seeds or operations twice, a seed of the selection, no such scale or base, a rate of zero
            or less, a setting that cannot be, or an operation whose parameters cannot be matched.
        InputError: a text or a directory that cannot be used.
        KeyboardInterrupt: after running trainings have stopped with a checkpoint.

    Examples:
        sinklab pathways
        sinklab pathways --operations softpick,gated --seeds 0 --jobs 2 --out first-look  (a first look)
        sinklab pathways --scale small --rate 0.5 --out sinklab-pathways-small  (the best rate of softmax there)
        sinklab pathways --base bos --out sinklab-pathways-bos  (where every row begins with BOS)
        sinklab pathways --operations sigmoid:length_bias=true,sink_logit --seeds 0..4 --out build/pathways
        sinklab pathways --scale 60m --ray auto --store /shared/claims
    """
    from sinklab.registry import operations as registry
    from sinklab.registry import split_specs
    from sinklab_claims.pathways.compare import run_pathways
    from sinklab_claims.pathways.operations import DEFAULT

    if isinstance(operations, str):
        operations = [registry.read(name) for name in split_specs(operations)]
    return run_pathways(
        DEFAULT if operations is None else operations,
        seeds=parse_seeds(seeds or (SEEDS_OF_TINY if scale == "tiny" else SEEDS)),
        scale=scale,
        base=base,
        rate=rate,
        out=default_out("sinklab-pathways") if out is None else out,
        store=default_out("sinklab-claims") if store is None else store,
        jobs=jobs,
        ray=ray,
        retries=retries,
        cache=cache,
        stages=progress or silent,
        say=say,
    )
