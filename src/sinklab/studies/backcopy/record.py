"""The record of one run of the bigram-backcopy lab, and the rows of the table that it stands for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor

from sinklab.attention.operation import Operation
from sinklab.results.intervals import mean_interval
from sinklab.results.metric import LOSS, Coordinates, Metric, Row
from sinklab.results.table import finite
from sinklab.studies.backcopy.evaluation import BY_HEAD, BY_LAYER, BackcopyNumbers, evaluate
from sinklab.studies.backcopy.problem import BackcopyProblem
from sinklab.studies.backcopy.training import BackcopySettings, BackcopyTraining

__all__ = ["NUMBERS", "record_of", "rows_of"]

MAJORITY = 0.5
"""A head is active, or dormant, where the interval of its mean weight lies above this on the one key that says so, and is not
where it lies below."""
LOSS_POINTS = 100
"""Points of a loss curve; each is the mean over the steps since the last."""


def record_of(
    label: str,
    operation: Operation,
    settings: BackcopySettings,
    problem: BackcopyProblem,
    seed: int,
    training: BackcopyTraining,
    samples: int,
) -> dict[str, Any]:
    """One entry of ``runs``; see docs/backcopy.md."""
    last = evaluate(training.model, problem, samples, knock_out=True)
    heads = [
        _head(last, layer, head, operation.normalized)
        for layer, of_layer in last.heads.items()
        for head in range(of_layer["bos_weight"].shape[1])
    ]
    copying = max(heads, key=lambda head: head["knock_out_trigger_excess"] or -math.inf)
    ratios = {layer: _mean(of_layer["residual_ratio"]) for layer, of_layer in last.layers.items() if layer >= 0}
    every = max(1, math.ceil(len(training.losses) / LOSS_POINTS))
    return {
        "operation": label,
        "settings": {key: value for key, value in operation.to_dict().items() if key != "name"},
        "optimizer": settings.optimizer,
        "learning_rate": settings.rate(operation),
        "layers": settings.layers,
        "heads": settings.heads,
        "no_attention": list(settings.no_attention),
        "no_feed_forward": list(settings.no_feed_forward),
        "seed": seed,
        "steps": len(training.losses),
        "outcome": "diverged" if training.diverged else "trained",
        "floor": problem.chain.entropy_floor(problem.length),
        "trigger_excess": _mean(last.trigger_excess),
        "other_excess": _mean(last.other_excess),
        "residual_peak": _largest(ratios.values()),
        "residual_peak_inside": _largest(ratio for layer, ratio in ratios.items() if layer < settings.layers - 1),
        "copy_head": [copying["layer"], copying["head"]],
        **{name: copying[name] for name in (*BY_HEAD, "active", "dormant")},
        "knock_out_trigger_excess": copying["knock_out_trigger_excess"],
        "knock_out_other_excess": copying["knock_out_other_excess"],
        "by_head": heads,
        "by_layer": _by_layer(last),
        "loss": [
            [min(at + every, len(training.losses)), math.fsum(chunk) / len(chunk)]
            for at in range(0, len(training.losses), every)
            for chunk in [training.losses[at : at + every]]
        ],
        "curve": [_point(step, numbers) for step, numbers in training.numbers.items()],
        "cpu_seconds": round(training.seconds, 3),
    }


def _head(numbers: BackcopyNumbers, layer: int, head: int, normalized: bool) -> dict[str, Any]:
    """Numbers of one head, with half the width of their 95 % intervals over samples.

    Where rows of weights do not sum to one, a majority of them says nothing, and both states are ``None``; so is one whose
    interval reaches over the majority.
    """
    entry: dict[str, Any] = {"layer": layer, "head": head}
    by_sample = {name: values[:, head] for name, values in numbers.heads[layer].items()}
    by_sample["knock_out_trigger_excess"], by_sample["knock_out_other_excess"] = numbers.knock_outs[layer, head]
    for name, values in by_sample.items():
        entry[name] = _mean(values)
        entry[f"{name}_interval"] = _half_width(values)
    entry["active"] = _above(entry, "previous_weight_trigger") if normalized else None
    entry["dormant"] = _above(entry, "bos_weight") if normalized else None
    return entry


def _above(entry: Mapping[str, Any], name: str) -> bool | None:
    mean, half = entry[name], entry[f"{name}_interval"]
    if mean is None or half is None or mean - half <= MAJORITY < mean + half:
        return None
    return bool(mean > MAJORITY)


def _point(step: int, numbers: BackcopyNumbers) -> dict[str, object]:
    """An evaluation on the way, without intervals."""
    return {
        "step": step,
        "trigger_excess": _mean(numbers.trigger_excess),
        "other_excess": _mean(numbers.other_excess),
        "by_head": [
            {"layer": layer, "head": head, **{name: _mean(values[:, head]) for name, values in of_layer.items()}}
            for layer, of_layer in numbers.heads.items()
            for head in range(of_layer["bos_weight"].shape[1])
        ],
        "by_layer": _by_layer(numbers),
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


def rows_of(run: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of the table: the last evaluation without step, those on the way with it."""
    same: Coordinates = {
        "model": f"backcopy {run['layers']}x{run['heads']} {run['optimizer']}",
        "operation": run["operation"],
        "seed": run["seed"],
    }
    for step, loss in run["loss"]:
        yield {**same, "metric": LOSS, "value": loss, "step": step}
    for point in ({**run, "step": None}, *run["curve"]):
        columns: Coordinates = {**same, "step": point["step"]}
        for name in ("trigger_excess", "other_excess"):
            yield {**columns, "metric": NUMBERS[name], "value": point[name]}
        for entry in (*point["by_head"], *point["by_layer"]):
            at = cast(Coordinates, {key: entry[key] for key in ("layer", "head") if key in entry})  # two of its columns
            for name, metric in NUMBERS.items():
                if name in entry:
                    yield {**columns, **at, "metric": metric, "value": entry[name]}


def _by_layer(numbers: BackcopyNumbers) -> list[dict[str, object]]:
    return [
        {"layer": layer, **{name: _mean(values) for name, values in of_layer.items()}}
        for layer, of_layer in numbers.layers.items()
    ]


def _largest(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _mean(values: Tensor) -> float | None:
    """Mean over the samples that have a number; ``None`` where it is not finite."""
    return finite(float(values.double().nanmean()))


def _half_width(values: Tensor) -> float | None:
    known = [value for value in values.double().tolist() if math.isfinite(value)]
    return finite(mean_interval(known)[1]) if len(known) > 1 else None
