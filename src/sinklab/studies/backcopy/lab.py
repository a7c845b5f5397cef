"""run_backcopy(): operations, optimisers, depths and seeds on the bigram-backcopy problem, as a result with a figure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sinklab.attention.operation import Operation
from sinklab.corpora import resolve_corpus
from sinklab.corpora._reading import corpus_record
from sinklab.corpora.base import Corpus
from sinklab.errors import ConfigurationError
from sinklab.registry import operations as registered
from sinklab.results.naming import counted
from sinklab.results.run import Progress, Result, Run
from sinklab.results.table import make_table
from sinklab.results.version import __version__
from sinklab.studies.backcopy.chain import estimate_chain, only_letters
from sinklab.studies.backcopy.display import display
from sinklab.studies.backcopy.figure import write_figure
from sinklab.studies.backcopy.problem import BackcopyProblem
from sinklab.studies.backcopy.record import record_of, rows_of
from sinklab.studies.backcopy.training import BackcopySettings, train
from sinklab.studies.trigger.lab import label_of, require_none_twice

__all__ = ["run_backcopy"]


def run_backcopy(
    operations: Sequence[Operation],
    seeds: Sequence[int] = (0, 1, 2),
    settings: BackcopySettings | None = None,
    *,
    optimizers: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    corpus: str | Corpus = "python_source",
    samples: int = 256,
    out: Path | None = None,
    overwrite: bool = False,
    scale: str | None = None,
    progress: Progress | None = None,
) -> Result:
    """:func:`~sinklab.studies.backcopy.backcopy.backcopy` with sizes of its own, which says what it raises.

    Args:
        settings: sizes and the rest; small by default.
        optimizers, layers: several values of these fields of the settings; by default the one that they have.
        scale: what the sizes are called, for the record.

    Returns:
        A record for every model in ``summary["runs"]``, see docs/backcopy.md; the table has the numbers by layer and head, at
        the end and on the way; ``record`` says of the ``chain`` and how many runs were ``resumed``.
    """
    settings = BackcopySettings() if settings is None else settings
    optimizers, layers = optimizers or [settings.optimizer], layers or [settings.layers]
    grid = [
        (operation, dataclasses.replace(settings, optimizer=optimizer, layers=depth), seed)
        for operation, optimizer, depth, seed in itertools.product(operations, optimizers, layers, seeds)
    ]
    if not grid or samples < 2:
        raise ConfigurationError(
            f"bigram-backcopy lab: {counted(len(operations), 'operation')}, {counted(len(seeds), 'seed')} and "
            f"{counted(samples, 'sample')}; expected at least one, one, and two"
        )
    options: dict[str, Sequence[object]] = {
        "operation": [label_of(operation, registered.make) for operation in operations],
        "optimizer": optimizers,
        "layers": layers,
        "seeds": seeds,
    }
    require_none_twice(**options)
    for _, cell, _ in grid:
        cell.check()
    source = resolve_corpus(corpus)
    common = {key: value for key, value in settings.to_dict().items() if key not in ("optimizer", "layers")}
    resume = out is not None and not overwrite
    with Run(
        "backcopy",
        out=out,
        overwrite=overwrite,
        resume=resume,
        settings={**common, "samples": samples, "corpus": corpus_record(source)},
        grid=options,
        grid_of=_grid_of,
        progress=progress,
    ) as run:
        run.goes_on = "the same command without `overwrite` goes on from there"
        texts = source.documents("train")
        chain = estimate_chain(map(only_letters, texts) if settings.letters else texts, settings.characters, settings.triggers)
        problem = BackcopyProblem(chain, settings.length)
        records: list[dict[str, Any]] = []
        resumed = 0
        for number, (operation, cell, seed) in enumerate(grid):
            run.progress("runs", number, len(grid))
            record, is_stored = _record(run, operation, cell, problem, seed, samples)
            records.append(record)
            resumed += is_stored
        run.progress("runs", len(grid), len(grid))
        rows = (row for record in records for row in rows_of(record))
        return run.finish(
            table=make_table(rows, run_id=run.id, corpus=source.label, bos=1, probe="backcopy"),
            summary={"runs": records},
            display=display,
            config={"scale": scale, **settings.to_dict(), "samples": samples},
            files=lambda folder: write_figure(records, folder / "curves.png"),
            loaded=torch.zeros(()),  # the models are float32 on the CPU, and there is none where all runs were stored
            seeds=list(seeds),
            operations=[operation.to_dict() for operation in operations],
            corpus=corpus_record(source),
            chain={
                "sha256": chain.identity,
                "characters": chain.characters,
                "triggers": chain.characters[: chain.num_triggers],
                "floor": chain.entropy_floor(settings.length),
            },
            resumed=resumed,
        )


def _record(
    run: Run, operation: Operation, cell: BackcopySettings, problem: BackcopyProblem, seed: int, samples: int
) -> tuple[dict[str, Any], bool]:
    """The record of one run, trained now or from the store of the lab, and whether it is from there."""
    identity = {
        "operation": operation.to_dict(),
        "learning_rate": cell.rate(operation),
        **{key: value for key, value in cell.to_dict().items() if not key.endswith("_rate")},
        "seed": seed,
        "chain": problem.chain.identity,
        "samples": samples,
    }
    name = f"{operation.name}-{cell.optimizer}-{cell.layers}layers-seed{seed}"
    sources = __version__
    stored = run.store.get(name, identity, sources)
    if stored is not None:
        return stored.record, True
    training = train(operation, cell, problem, seed, lambda done, total: run.progress("steps of this run", done, total))
    label = label_of(operation, registered.make)
    record = record_of(label, operation, cell, problem, seed, training, samples)
    run.store.put(name, identity, sources, record)
    return record, False


def _grid_of(summary: Mapping[str, Any]) -> dict[str, Sequence[object]]:
    """What a result is of, by the option."""
    fields = {"operation": "operation", "optimizer": "optimizer", "layers": "layers", "seeds": "seed"}
    records = summary.get("runs", [])
    return {option: list(dict.fromkeys(record[field] for record in records)) for option, field in fields.items()}
