"""run_lab(): operations and seeds on the trigger task, as records, rows of the long table and pictures."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sinklab import __version__
from sinklab.attention.operation import Operation
from sinklab.auditing.output import new_run_id
from sinklab.errors import ConfigurationError
from sinklab.registry import operations
from sinklab.results.table import make_table, write_json, write_table
from sinklab.trigger.expressible import obstacle
from sinklab.trigger.kept import open_folder
from sinklab.trigger.maps import write_maps
from sinklab.trigger.readout import Readout, finite, read_out
from sinklab.trigger.setting import Setting
from sinklab.trigger.start import construction
from sinklab.trigger.training import Trained, train

__all__ = ["AS_RELEASED", "LabResult", "label_of", "named", "run_lab"]

AS_RELEASED: dict[str, dict[str, Any]] = {"relu": {"uncounted": 1}}
"""Settings that the released models of the task have and the operation by itself has not: ReLU divides by ``max(i - 1, 1)``."""

PROBE, VERSION = "trigger", 1
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class LabResult:
    """What :func:`run_lab` gives.

    Attributes:
        runs: a record for every model that was trained; see docs/trigger.md.
        cannot: operations that were not trained because they provably cannot do the task: ``operation``, ``reason``,
            ``least_error``.
        readouts: of the runs, in their order.
        table: the long table: numbers by head, and the attention maps.
        folder: where all was written, if anywhere.
    """

    runs: list[dict[str, Any]]
    cannot: list[dict[str, Any]]
    readouts: list[Readout]
    table: pd.DataFrame
    folder: Path | None


def named(spec: str | Mapping[str, Any]) -> Operation:
    """:meth:`~sinklab.registry.Registry.make`; a name alone is the operation as the paper's models have it.

    Raises:
        UnknownNameError: no such operation.
        ConfigurationError: a setting that it does not have.
    """
    fields = operations.read(spec)
    return operations.make(fields | AS_RELEASED.get(fields["name"], {}) if len(fields) == 1 else fields)  # type: ignore[no-any-return]


def label_of(operation: Operation, usual: Operation | None = None) -> str:
    """The name, with the settings in brackets that differ from those which :func:`named` gives: ``relu(uncounted=0)``.

    Args:
        usual: has the settings that need no mention, if it is not :func:`named` that says so.
    """
    expected = (named({"name": operation.name}) if usual is None else usual).to_dict()
    changed = [
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in operation.to_dict().items()
        if expected[key] != value
    ]
    return f"{operation.name}({', '.join(changed)})" if changed else operation.name


def run_lab(
    operations: Sequence[Operation],
    seeds: Sequence[int] = (0, 1, 2),
    setting: Setting | None = None,
    *,
    sequences: int = 1000,
    anyway: bool = False,
    out: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> LabResult:
    """Train every operation with every seed and read out what its heads do.

    Args:
        operations: what takes the place of softmax; at least one.
        seeds: of initial weights and data; at least one.
        setting: the task, the shape of the models, and the stop rule; by default those of the paper.
        sequences: how many are evaluated.
        anyway: train operations that provably cannot do the task too; they run to the cap.
        out: directory for table.parquet, runs.json, run.json, a picture of each run and, from when the run ends, its model.
        overwrite: replace it.
        resume: go on with the lab in ``out``, if there is one: runs that have ended are kept, and operations and seeds may be
            added. Runs that are not asked for stay, and are not read.
        progress: called with a stage, what is done of it, and its total.

    Raises:
        ConfigurationError: nothing to train, or a setting out of its range; every operation provably cannot do the task; a
            lab of another setting to go on with.
        InputError: the directory exists or cannot be made, or a kept run cannot be read.
        UnknownNameError: no such position scheme.
    """
    setting = Setting() if setting is None else setting
    setting.check()
    if not operations or not seeds or sequences < 2:
        raise ConfigurationError(
            f"trigger lab: {len(operations)} operations, {len(seeds)} seeds and {sequences} sequences; expected at least one, "
            "one, and two"
        )
    if out is None and (overwrite or resume):
        raise ConfigurationError(
            f"--{'overwrite' if overwrite else 'resume'} is about an output directory; give one with --out"
        )
    cannot = []
    for operation in operations:
        found = None if anyway else obstacle(operation, setting)
        if found is not None:
            cannot.append({"operation": label_of(operation), "reason": found[0], "least_error": found[1]})
    left_out = {entry["operation"] for entry in cannot}
    trained_ones = [operation for operation in operations if label_of(operation) not in left_out]
    if not trained_ones:
        raise ConfigurationError(
            "; ".join(f"{_sentence(entry)}" for entry in cannot) + ". To train all the same, say anyway (--anyway)"
        )
    if setting.start == "construction":
        for operation in trained_ones:
            construction(operation, setting)
    kept = None if out is None else open_folder(out, setting, overwrite, resume)
    started, run_id = time.time(), new_run_id()
    runs, readouts, rows = [], [], []
    pairs = [(operation, seed) for operation in trained_ones for seed in seeds]
    for number, (operation, seed) in enumerate(pairs):
        progress("runs", number, len(pairs))
        name = _file_name(operation, seed)
        trained = None if kept is None else kept.load(name, operation, seed)
        if trained is None:
            trained = train(operation, setting, seed, lambda done, total: progress("steps of this run", done, total))
            if kept is not None:
                kept.save(name, operation, seed, trained)
        readout = read_out(trained.model, setting, sequences)
        runs.append(_record(operation, setting, seed, trained, readout))
        readouts.append(readout)
        rows += [{**row, "operation": label_of(operation), "seed": seed} for row in _rows(trained, readout, sequences)]
    progress("runs", len(pairs), len(pairs))
    shape = f"trigger {setting.layers}x{setting.heads}"
    table = make_table(
        rows, run_id=run_id, model=shape, corpus="trigger_task", bos=int(setting.bos), probe=PROBE, version=VERSION
    )
    if out is not None:
        run = {
            "run_id": run_id,
            "kind": "trigger",
            "config": {**dataclasses.asdict(setting), "learning_rate": setting.rate, "sequences": sequences},
            "seeds": list(seeds),
            "operations": [operation.to_dict() for operation in operations],
            "versions": {"sinklab": __version__, "python": platform.python_version(), "torch": torch.__version__},
            "hardware": {
                "device": "cpu",
                "name": platform.processor() or platform.machine(),
                "threads": torch.get_num_threads(),
            },
            "dtype": "float32",
            "wall_seconds": round(time.time() - started, 3),
        }
        write_table(table, out / "table.parquet")
        write_json({"runs": runs, "cannot": cannot}, out / "runs.json")
        for (operation, seed), record, readout in zip(pairs, runs, readouts, strict=True):
            write_maps(readout.mean, readout.std, _caption(record), out / f"{_file_name(operation, seed)}.png")
        write_json(run, out / "run.json")  # last: what has it is whole
    return LabResult(runs, cannot, readouts, table, out)


def _sentence(entry: Mapping[str, Any]) -> str:
    return (
        f"operation {entry['operation']!r} cannot do the task: {entry['reason']}; every choice of maps is off by "
        f"{entry['least_error']:.3g} or more somewhere"
    )


def _record(operation: Operation, setting: Setting, seed: int, trained: Trained, readout: Readout) -> dict[str, Any]:
    """One entry of ``runs``."""
    return {
        "operation": label_of(operation),
        "settings": {key: value for key, value in operation.to_dict().items() if key != "name"},
        "layers": setting.layers,
        "heads": setting.heads,
        "positions": setting.positions,
        "triggers": setting.triggers,
        "start": setting.start,
        "seed": seed,
        "steps": trained.steps,
        "outcome": trained.outcome,
        "train_error": finite(trained.error),
        **readout.numbers(),
        "head_bos_weight_mean": None if readout.strongest is None or readout.bos_mean is None else readout.bos_mean.tolist(),
        "head_bos_weight_min": None if readout.strongest is None or readout.bos_min is None else readout.bos_min.tolist(),
        "cpu_seconds": round(trained.seconds, 3),
    }


def _rows(trained: Trained, readout: Readout, sequences: int) -> Iterator[dict[str, Any]]:
    """Rows of the table; numbers that are not finite are null."""
    yield {"metric": "steps", "value": trained.steps, "unit": "steps", "count": 1}
    yield {"metric": "max_error", "value": finite(readout.error), "unit": "coordinate", "count": sequences}
    by_head = {
        "bos_weight_mean": readout.bos_mean,
        "bos_weight_min": readout.bos_min,
        "nothing_mean": readout.nothing,
        "trigger_bos_weight": readout.trigger_bos,
        "trigger_averaged_weight": readout.trigger_averaged,
    }
    for metric, values in by_head.items():
        for (layer, head), value in _entries(values):
            yield {"metric": metric, "layer": layer, "head": head, "value": value, "unit": "weight", "count": sequences}
    for metric, maps in (("weight_mean", readout.mean), ("weight_std", readout.std)):
        for (layer, head, query, key), value in _entries(maps):
            if key <= query:
                place = {"layer": layer, "head": head, "query_position": query, "key_position": key}
                yield {"metric": metric, **place, "value": value, "unit": "weight", "count": sequences}


def _entries(values: torch.Tensor | None) -> Iterator[tuple[tuple[int, ...], float | None]]:
    if values is not None:
        indices = torch.cartesian_prod(*(torch.arange(size) for size in values.shape)).tolist()
        yield from ((tuple(index), finite(value)) for index, value in zip(indices, values.flatten().tolist(), strict=True))


def _file_name(operation: Operation, seed: int) -> str:
    name = "".join(character if character.isalnum() or character in "_.=" else "-" for character in label_of(operation))
    return f"{name.strip('-')}-seed{seed}"


def _caption(record: Mapping[str, Any]) -> str:
    return (
        f"{record['operation']}, {record['layers']} × {record['heads']}, seed {record['seed']}: {record['outcome']} after "
        f"{record['steps']:,} steps"
    )
