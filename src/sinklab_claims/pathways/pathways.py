"""The command ``sinklab pathways``: which ways to do nothing leave a model undistorted, at equal compute and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sinklab.errors import ConfigurationError
from sinklab.results.blocks import markdown
from sinklab.results.folder import default_out
from sinklab.results.run import Result, Run
from sinklab.studies.arguments import Jobs, Retries, Seeds, WrittenTo, command, parse_seeds
from sinklab_claims.contract.claim import Base, Scale, is_natural

if TYPE_CHECKING:
    import pandas as pd

    from sinklab_claims.pathways.runs import Design

SEEDS_OF_TINY, SEEDS = "0..7", "0..2"
"""By default."""


@command
def pathways(
    *,
    operations: str | Sequence[Mapping[str, Any]] | None = None,
    seeds: Seeds | None = None,
    scale: Literal["tiny", "small", "medium"] = "tiny",
    base: Literal["bos", "no-bos"] | None = None,
    rate: float | None = None,
    out: Annotated[Path | None, WrittenTo("sinklab-pathways")] = None,
    store: Annotated[Path | None, WrittenTo("sinklab-claims")] = None,
    jobs: Jobs = None,
    ray: str | None = None,
    retries: Retries = 2,
    cache: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train operations that let a head do nothing, and measure what each costs and distorts.

    Each operation gets its own learning rate, the best of five on separate seeds. At that rate it is trained on the seeds of
    the evaluation, with as many parameters as softmax, and its loss is compared with softmax's by tests of equivalence. The
    number of trainings and the time they take are shown before they start. Finished trainings and evaluations are kept: the
    same command continues. Status 1: some trainings failed; the results of the others are kept.

    docs/claims.md#pathways-ways-to-do-nothing has what was found, and what low-distortion means.

    Args:
        operations: From 'sinklab list operations'; a name alone has the settings of its paper. Softmax is always included; by
            default the twelve of docs/claims.md#pathways-ways-to-do-nothing.
        seeds: Seeds of the evaluation, both ends included, or a list; an answer needs three or more. By default 0..7 at the
            tiny scale and 0..2 elsewhere. Rates are chosen on seeds 1000 and 1001 (at the tiny scale) or 1000.
        scale: What is trained; tiny needs one core, some 17 seconds a training.
        base: Whether rows begin with BOS. By default no-bos, since a BOS in every row is a place to rest for any operation.
        rate: One learning rate for all, relative to that of the scale, instead of a search of five for each operation, which
            takes more than twice the trainings. An operation outside a bound may be inside at its own rate.
        out: Directory for table.parquet, summary.json, run.json and the table as pathways.md; each base needs its own.
        store: Directory of trained models, shared with 'sinklab reproduce', so that none is trained twice.
        ray: Train on a Ray cluster; the store must be shared by its nodes.
        cache: Directory for encoded text; by default ~/.cache/sinklab, with --ray STORE/cache.

    Returns:
        In ``summary``: ``rows``, one for each operation, softmax first; ``errors``, trainings and read-outs that failed.

    Raises:
        UnknownNameError: no such operation.
        ConfigurationError: no seeds, seeds or operations twice, a seed of the selection, no such scale or base, a rate of zero
            or less, a setting that cannot be, or an operation whose parameters cannot be matched.
        InputError: a text or a directory that cannot be used.
        KeyboardInterrupt: after running trainings have stopped with a checkpoint.

    Examples:
        sinklab pathways
        sinklab pathways --operations softpick,gated --seeds 0 --jobs 2 --out first-look  (a first look)
        sinklab pathways --rate 1 --out sinklab-pathways-one-rate  (what replaces the sink that softmax has at this rate)
        sinklab pathways --scale small --rate 0.5 --out sinklab-pathways-small  (the best rate of softmax there)
        sinklab pathways --base bos --out sinklab-pathways-bos  (where every row begins with BOS)
        sinklab pathways --operations sigmoid:length_bias=true,sink_logit --seeds 0..4 --out build/pathways
        sinklab pathways --scale small --ray auto --store /shared/claims
    """
    from sinklab.registry import operations as registry
    from sinklab.registry import split_specs
    from sinklab.results.table import write_text
    from sinklab.training.process import default_cache
    from sinklab_claims.contract.claim import base_config
    from sinklab_claims.pathways.judging import judged, show
    from sinklab_claims.pathways.runs import DEFAULT, SELECTION_SEEDS, foreseen, train_and_read
    from sinklab_claims.reproduce.store import keeping

    if isinstance(operations, str):
        operations = [registry.read(name) for name in split_specs(operations)]
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"`jobs` must be at least 1, got {jobs}")
    parsed = parse_seeds(seeds or (SEEDS_OF_TINY if scale == "tiny" else SEEDS))
    design = design_of(DEFAULT if operations is None else operations, parsed, scale, base, rate)
    out = default_out("sinklab-pathways") if out is None else out
    store = (default_out("sinklab-claims") if store is None else store).expanduser().absolute()
    cache = (cache or (store / "cache" if ray is not None else default_cache())).expanduser().absolute()
    settings = {"scale": scale, "base": design.base, "rate": rate}
    grid: dict[str, Sequence[object]] = {"operations": design.labels, "seeds": design.seeds}
    with keeping(store), Run("pathways", out=out, resume=True, settings=settings, grid=grid, grid_of=_grid_of) as run:
        if say is not None:
            say(foreseen(design))
        measured = train_and_read(design, store=store, cache=cache, jobs=jobs, retries=retries, ray=ray, progress=True)
        rows = judged(design.labels, measured.numbers, measured.rates, natural=is_natural(scale))
        config = base_config(scale, design.base)
        summary = {"rows": rows, "seeds": design.seeds, "errors": measured.errors}
        return run.finish(
            table=_table(design, measured.numbers, config.data.corpus, run.id),
            show=show,
            summary=summary,
            files=lambda folder: write_text(markdown(show(summary)), folder / "pathways.md"),
            selection_seeds=list(SELECTION_SEEDS[design.scale]) if rate is None else [],
            operations={of.label: of.operation(config.model.max_position_embeddings) for of in design.pathways},
            widths=dict(design.widths),
            losses_by_rate={
                label: {f"{factor:g}": {str(seed): loss for seed, loss in of.items()} for factor, of in losses.items()}
                for label, losses in measured.losses.items()
            },
            cells=measured.cells,
            training=config.model_dump(mode="json"),
        )


def design_of(
    operations: Sequence[Mapping[str, object]], seeds: Sequence[int], scale: Scale, base: Base | None, rate: float | None = None
) -> Design:
    """What is compared, checked; nothing is trained. Raises as :func:`pathways`."""
    from sinklab_claims.contract.claim import base_config
    from sinklab_claims.pathways.runs import SELECTION_SEEDS, Design, matched_widths, pathways_of

    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"pathways: seeds {list(seeds)}; expected one or more, and none twice")
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise ConfigurationError(f"`rate` is {rate:g}; expected a learning rate over that of the scale, such as 0.5")
    if both := sorted(set(seeds) & set(SELECTION_SEEDS[scale])):
        raise ConfigurationError(
            f"pathways: seed {both[0]} is one on which learning rates are chosen; evaluate on others than "
            f"{', '.join(map(str, SELECTION_SEEDS[scale]))}"
        )
    compared, base = pathways_of(operations), base or "no-bos"
    return Design(compared, matched_widths(compared, base_config(scale, base)), scale, base, seeds, rate)


def _grid_of(summary: Mapping[str, Any]) -> dict[str, Sequence[object]]:
    """Operations and seeds of an earlier comparison, to which more may be added."""
    return {"operations": [row["label"] for row in summary.get("rows", ())], "seeds": summary.get("seeds", [])}


def _table(design: Design, numbers: Mapping[int, Mapping[str, Mapping[str, float]]], corpus: str, run_id: str) -> pd.DataFrame:
    """The long table: ``model`` is the operation with its settings."""
    from sinklab.results.metric import declared
    from sinklab.results.table import make_table

    names = {pathway.label: pathway.fields["name"] for pathway in design.pathways}
    rows = [
        {
            **{"model": label, "operation": names[label], "corpus": corpus},
            **{"metric": metric, "seed": seed, "value": value, "count": 1},
        }
        for seed, by_label in numbers.items()
        for label, values in by_label.items()
        for name, value in values.items()
        if (metric := declared(name)) is not None
    ]
    return make_table(rows, run_id=run_id, probe="pathways")
