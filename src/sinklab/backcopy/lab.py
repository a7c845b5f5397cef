"""run_lab(): operations, optimisers, depths and seeds on the bigram-backcopy task: records, rows of the table, a figure."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from sinklab import __version__
from sinklab.attention.operation import Operation
from sinklab.auditing.output import new_run_id
from sinklab.backcopy.chain import BigramChain, estimate_chain, only_letters
from sinklab.backcopy.figure import write_figure
from sinklab.backcopy.readout import BY_HEAD, BY_LAYER, Readout, read_out
from sinklab.backcopy.task import BackcopyTask
from sinklab.backcopy.training import Setting, Trained, train
from sinklab.corpora import resolve_corpus
from sinklab.errors import ConfigurationError, InputError
from sinklab.registry import operations
from sinklab.results.metric import LOSS, Metric
from sinklab.results.statistics import mean_interval
from sinklab.results.table import make_table, read_run, write_json, write_table

__all__ = ["NUMBERS", "LabResult", "run_lab"]

PROBE, VERSION = "backcopy", 1
MAJORITY = 0.5
"""A head is active, or dormant, where the interval of its mean weight lies above this on the one key that says so."""
LOSS_POINTS = 100
"""Points of a loss curve; each is the mean over the steps since the last."""
FILES = {"runs", "table.parquet", "runs.json", "run.json", "curves.png"}
"""What is written into an output directory."""
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class LabResult:
    """What :func:`run_lab` gives.

    Attributes:
        runs: a record for every model; see docs/backcopy.md.
        chain: what the sequences were drawn from.
        table: the long table: numbers by layer and head, at the end and on the way.
        resumed: how many of the runs were found done.
        folder: where all was written, if anywhere.
    """

    runs: list[dict[str, Any]]
    chain: BigramChain
    table: pd.DataFrame
    resumed: int
    folder: Path | None


def run_lab(
    operations: Sequence[Operation],
    seeds: Sequence[int] = (0, 1, 2),
    setting: Setting | None = None,
    *,
    optimizers: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    corpus: str = "python_source",
    sequences: int = 256,
    out: Path | None = None,
    overwrite: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> LabResult:
    """Train every operation with every optimiser, depth and seed, and read out what its heads do.

    Args:
        operations: what takes the place of softmax; at least one.
        seeds: of initial weights and data; at least one.
        setting: sizes and the rest; small by default.
        optimizers, layers: several values of these fields of the setting; by default the one that it has.
        corpus: text that the chain is estimated from: a registered name, a file, a folder, a dataset.
        sequences: fresh ones that the last read-out is made of; at least 2.
        out: directory for table.parquet, runs.json, run.json, curves.png, and ``runs/``, in which every run is kept as soon as
            it is done: called again with the same directory, a run that is there is not trained again.
        overwrite: forget what is there.
        progress: called with a stage, what is done of it, and its total.

    Raises:
        ConfigurationError: nothing to train, or a setting out of its range.
        InputError: a text from which no chain can be made, or a directory that holds something else.
    """
    setting = Setting() if setting is None else setting
    grid = [
        (operation, dataclasses.replace(setting, optimizer=optimizer, layers=depth), seed)
        for operation, optimizer, depth, seed in itertools.product(
            operations, optimizers or [setting.optimizer], layers or [setting.layers], seeds
        )
    ]
    if not grid or sequences < 2:
        raise ConfigurationError(
            f"bigram-backcopy lab: {len(operations)} operations, {len(seeds)} seeds and {sequences} sequences; expected at "
            "least one, one, and two"
        )
    for _, one, _ in grid:
        one.check()
    if out is not None:
        _prepare(out, overwrite)
    source = resolve_corpus(corpus)
    texts = source.documents("train")
    chain = estimate_chain(map(only_letters, texts) if setting.letters else texts, setting.characters, setting.triggers)
    task = BackcopyTask(chain, setting.length)
    started, run_id, runs, resumed = time.time(), new_run_id(), [], 0
    for number, (operation, one, seed) in enumerate(grid):
        progress("runs", number, len(grid))
        identity = {
            "operation": operation.to_dict(),
            "learning_rate": one.rate(operation),
            **{key: value for key, value in one.to_dict().items() if not key.endswith("_rate")},
            "seed": seed,
            "chain": chain.identity,
            "sequences": sequences,
            "version": VERSION,
        }
        kept = None if out is None else out / "runs" / f"{_file_name(operation, one, seed, identity)}.json"
        if kept is not None and kept.is_file():
            runs.append(read_run(kept.parent, kept.name)["run"])
            resumed += 1
            continue
        begun = time.process_time()
        trained = train(operation, one, task, seed, lambda done, total: progress("steps of this run", done, total))
        seconds = time.process_time() - begun
        runs.append(_record(operation, one, task, seed, trained, sequences, seconds))
        if kept is not None:
            write_json({"identity": identity, "run": runs[-1]}, kept)
    progress("runs", len(grid), len(grid))
    table = make_table(
        (row for run in runs for row in _rows(run)), run_id=run_id, corpus=corpus, bos=1, probe=PROBE, version=VERSION
    )
    if out is not None:
        write_table(table, out / "table.parquet")
        write_json({"runs": runs}, out / "runs.json")
        write_figure(runs, out / "curves.png")
        # Last: its presence says that all is there.
        write_json(
            {
                "run_id": run_id,
                "kind": "backcopy",
                "config": {**setting.to_dict(), "sequences": sequences},
                "seeds": list(seeds),
                "operations": [operation.to_dict() for operation in operations],
                "corpus": {"name": corpus, **dataclasses.asdict(source.identity)},
                "chain": {
                    "sha256": chain.identity,
                    "characters": chain.characters,
                    "triggers": chain.characters[: chain.num_triggers],
                    "floor": chain.entropy_floor(setting.length),
                },
                "resumed": resumed,
                "versions": {"sinklab": __version__, "python": platform.python_version(), "torch": torch.__version__},
                "hardware": {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
                "dtype": "float32",
                "wall_seconds": round(time.time() - started, 3),
            },
            out / "run.json",
        )
    return LabResult(runs, chain, table, resumed, out)


def label_of(operation: Operation) -> str:
    """The name, with the settings in brackets that differ from the usual ones: ``relu(power=0)``."""
    usual, given = operations.make(operation.name).to_dict(), operation.to_dict()
    changed = [f"{key}={value}" for key, value in given.items() if usual[key] != value]
    return f"{operation.name}({', '.join(changed)})" if changed else operation.name


def _prepare(out: Path, overwrite: bool) -> None:
    """A directory that is empty, or holds what this lab wrote and nothing else: only that may be replaced."""
    if out.exists():
        found = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
        runs = list((out / "runs").iterdir()) if (out / "runs").is_dir() else []
        if not out.is_dir() or found - FILES or any(path.suffix != ".json" for path in runs):
            raise InputError(f"output {out} exists and is not a directory of this lab alone; choose another with --out")
        if overwrite:
            shutil.rmtree(out)
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output directory {out} cannot be made: {error.strerror}; choose another with --out") from error


def _file_name(operation: Operation, setting: Setting, seed: int, identity: Mapping[str, Any]) -> str:
    settings = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    return f"{operation.name}-{setting.optimizer}-{setting.layers}layers-seed{seed}-{settings}"


def _record(
    operation: Operation, setting: Setting, task: BackcopyTask, seed: int, trained: Trained, sequences: int, seconds: float
) -> dict[str, Any]:
    """One entry of ``runs``."""
    last = read_out(trained.model, task, sequences, knock_out=True)
    heads = [
        _head(last, layer, head, operation.normalized)
        for layer, numbers in last.heads.items()
        for head in range(numbers["bos_weight"].shape[1])
    ]
    copying = max(heads, key=lambda head: head["knock_out_trigger_excess"] or -math.inf)
    ratios = {layer: _mean(numbers["residual_ratio"]) for layer, numbers in last.layers.items() if layer >= 0}
    every = max(1, math.ceil(len(trained.losses) / LOSS_POINTS))
    return {
        "operation": label_of(operation),
        "settings": {key: value for key, value in operation.to_dict().items() if key != "name"},
        "optimizer": setting.optimizer,
        "learning_rate": setting.rate(operation),
        "layers": setting.layers,
        "heads": setting.heads,
        "no_attention": list(setting.no_attention),
        "no_feed_forward": list(setting.no_feed_forward),
        "seed": seed,
        "steps": len(trained.losses),
        "outcome": "diverged" if trained.diverged else "trained",
        "floor": task.chain.entropy_floor(task.length),
        "trigger_excess": _mean(last.trigger_excess),
        "other_excess": _mean(last.other_excess),
        "residual_peak": _largest(ratios.values()),
        "residual_peak_inside": _largest(ratio for layer, ratio in ratios.items() if layer < setting.layers - 1),
        "copy_head": [copying["layer"], copying["head"]],
        **{name: copying[name] for name in (*BY_HEAD, "active", "dormant")},
        "knock_out_trigger_excess": copying["knock_out_trigger_excess"],
        "knock_out_other_excess": copying["knock_out_other_excess"],
        "by_head": heads,
        "by_layer": [
            {"layer": layer, **{name: _mean(values) for name, values in numbers.items()}}
            for layer, numbers in last.layers.items()
        ],
        "loss": [
            [min(at + every, len(trained.losses)), math.fsum(chunk) / len(chunk)]
            for at in range(0, len(trained.losses), every)
            for chunk in [trained.losses[at : at + every]]
        ],
        "curve": [_point(step, readout) for step, readout in trained.readouts.items()],
        "cpu_seconds": round(seconds, 3),
    }


def _head(readout: Readout, layer: int, head: int, normalized: bool) -> dict[str, Any]:
    """Numbers of one head, with half the width of their 95 % intervals over sequences.

    Where rows of weights do not sum to one, a majority of them says nothing, and neither state is told.
    """
    entry: dict[str, Any] = {"layer": layer, "head": head}
    for name, values in readout.heads[layer].items():
        of_head = values[:, head]
        entry[name] = _mean(of_head)
        entry[f"{name}_interval"] = _half_width(of_head)
    for name, values in zip(
        ("knock_out_trigger_excess", "knock_out_other_excess"), readout.knock_outs[layer, head], strict=True
    ):
        entry[name] = _mean(values)
        entry[f"{name}_interval"] = _half_width(values)
    entry["active"] = _above(entry, "previous_weight_trigger") if normalized else None
    entry["dormant"] = _above(entry, "bos_weight") if normalized else None
    return entry


def _above(entry: Mapping[str, Any], name: str) -> bool | None:
    mean, half = entry[name], entry[f"{name}_interval"]
    return None if mean is None or half is None else mean - half > MAJORITY


def _point(step: int, readout: Readout) -> dict[str, Any]:
    """One read-out on the way, without intervals."""
    return {
        "step": step,
        "trigger_excess": _mean(readout.trigger_excess),
        "other_excess": _mean(readout.other_excess),
        "by_head": [
            {"layer": layer, "head": head, **{name: _mean(values[:, head]) for name, values in numbers.items()}}
            for layer, numbers in readout.heads.items()
            for head in range(numbers["bos_weight"].shape[1])
        ],
        "by_layer": [
            {"layer": layer, **{name: _mean(values) for name, values in numbers.items()}}
            for layer, numbers in readout.layers.items()
        ],
    }


NUMBERS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *BY_HEAD.values(),
        *BY_LAYER.values(),
        Metric("trigger_excess", "nats", "Expected next-token loss above the entropy floor of the task, at triggers."),
        Metric("other_excess", "nats", "Expected next-token loss above the entropy floor of the task, off triggers."),
        Metric("knock_out_trigger_excess", "nats", "trigger_excess of the model without this head."),
        Metric("knock_out_other_excess", "nats", "other_excess of the model without this head."),
    )
}


def _rows(run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the table: the last read-out without step, those on the way with it."""
    same = {
        "model": f"backcopy {run['layers']}x{run['heads']} {run['optimizer']}",
        "operation": run["operation"],
        "seed": run["seed"],
    }
    for step, loss in run["loss"]:
        yield {**same, "metric": LOSS, "value": loss, "step": step}
    for point in ({**run, "step": None}, *run["curve"]):
        place = {**same, "step": point["step"]}
        for name in ("trigger_excess", "other_excess"):
            yield {**place, "metric": NUMBERS[name], "value": point[name]}
        for entry in (*point["by_head"], *point["by_layer"]):
            at = {key: entry[key] for key in ("layer", "head") if key in entry}
            for name, metric in NUMBERS.items():
                if name in entry:
                    yield {**place, **at, "metric": metric, "value": entry[name]}


def _largest(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _mean(values: Tensor) -> float | None:
    """Mean over the sequences that have a number; ``None`` where it is not finite."""
    return _finite(float(values.double().nanmean()))


def _half_width(values: Tensor) -> float | None:
    known = [value for value in values.double().tolist() if math.isfinite(value)]
    return _finite(mean_interval(known)[1]) if len(known) > 1 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
