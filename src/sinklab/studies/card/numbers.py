"""The numbers of a run that the metadata of a card has, kind by kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sinklab.registry import spelled
from sinklab.report.runs import FinishedRun
from sinklab.studies.card.reproduction import probe_settings, public_spec

__all__ = ["CardNumber", "metrics_of_run"]

MOST_NUMBERS = 20
"""Of a run of a command that is not known here; the rest is in its table."""

Summary = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class CardNumber:
    """A number of the whole model.

    Attributes:
        metric: registered name of the metric.
        title: what it is, in words.
        value: in ``unit``.
        unit: as in the column of the table.
    """

    metric: str
    title: str
    value: float
    unit: str


def metrics_of_run(kind: str, record: Summary, summary: Summary, run: FinishedRun) -> list[CardNumber]:
    """The numbers of a run; those of its table where its command is not known here."""
    if kind in KINDS:
        return list(KINDS[kind](record, summary))
    under, numbers = _settings_of_metrics(record), list(run.numbers.items())[:MOST_NUMBERS]
    return [
        CardNumber(name, name + under.get(name.partition(" · ")[0], ""), value, unit or "1") for name, (value, unit) in numbers
    ]


def _settings_of_metrics(record: Summary) -> dict[str, str]:
    """Metric to the settings that its probe had, as ``" (sink_rate:threshold=0.2)"``; none of a probe without settings."""
    probes = {str(probe["name"]): public_spec(spelled(probe)) for probe in probe_settings(record) if len(probe) > 1}
    return {
        str(metric["metric"]): f" ({probes[metric['probe']]})"
        for metric in record.get("definitions") or []
        if metric.get("probe") in probes
    }


def _audit(record: Summary, summary: Summary) -> Iterator[CardNumber]:
    threshold = f"threshold {summary['threshold']:g}"
    for part in summary["parts"] or [summary]:
        name = f"{part['part']}: " if part["part"] else ""
        if (sinks := part["sinks"]["sinks"]) and sinks[0]["position"] != 0:
            title = f"{name}rate of the strongest sink, {sinks[0]['name']}, {threshold}"
            yield CardNumber("sink_rate", title, sinks[0]["rate"], "percent")
        title = f"{name}sink rate at the first position, {threshold} (Gu et al. 2024, arXiv 2410.10781)"
        yield CardNumber("gu2024", title, part["sink_rate_gu2024"], "percent")
        if (weight := part["first_token_mean_weight"]) is not None:
            yield CardNumber("mean_weight", f"{name}mean attention to the first position", weight, "weight")
    if summary["loss"] is not None:
        yield CardNumber("loss", str(summary["loss_definition"]), summary["loss"], "nats")


def _cache(record: Summary, summary: Summary) -> Iterator[CardNumber]:
    for entry in summary["policies"]:
        yield CardNumber("loss", f"loss under {entry['label']}", entry["loss"], "nats per token")


def _causes(record: Summary, summary: Summary) -> Iterator[CardNumber]:
    for label, count in summary["counts"].items():
        title = f"heads labelled {label} of {len(summary['heads'])} examined"
        yield CardNumber(f"heads_{label}", title, float(count), "heads")


def _depend(record: Summary, summary: Summary) -> Iterator[CardNumber]:
    for outcome in summary["tasks"]:
        task, pair = public_spec(outcome["task"]), (outcome["with_sinks"], outcome["without"])
        if "mean" in outcome["dependence"]:
            title = f"{task}: index of dependence, {pair[0]} against {pair[1]}"
            yield CardNumber("sink_dependence", title, outcome["dependence"]["mean"], "ratio")
        for entry in outcome["policies"]:
            if entry["policy"] in pair:
                title = f"{task} under {entry['policy']}"
                yield CardNumber(outcome["metric"], title, entry["score"]["mean"], outcome["unit"])


def _pretrain(record: Summary, summary: Summary) -> Iterator[CardNumber]:
    result = record.get("result") or {}
    if result.get("held_out_loss") is not None:
        yield CardNumber("held_out_loss", "held-out loss", result["held_out_loss"], "nats per token")
    if result.get("sink_rate") is not None:
        threshold = f"threshold {record['config']['watch']['threshold']:g}"
        title = f"sink rate at the first position, {threshold} (Gu et al. 2024, arXiv 2410.10781)"
        yield CardNumber("gu2024", title, result["sink_rate"], "percent")


def _quantize(record: Summary, summary: Summary) -> Iterator[CardNumber]:
    for entry in summary["schemes"]:
        name = f"{entry['scheme'].upper()}{', a scale for each token' if entry['per_token'] else ''}"
        yield CardNumber("loss", f"loss as {name}", entry["loss"], str(summary["unit"]))


def _origin(record: Summary, summary: Summary) -> Iterator[CardNumber]:
    for origin in summary["origins"]:
        for edit in origin["edits"]:
            if edit["loss"] is not None:
                title = f"{origin['kind'].capitalize()} at {origin['place']}: change of the loss, {edit['on']}: {edit['edit']}"
                yield CardNumber("origin_loss_change", title, edit["loss"]["mean"], "nats")


KINDS: dict[str, Callable[[Summary, Summary], Iterator[CardNumber]]] = {
    "audit": _audit, "cache": _cache, "causes": _causes, "depend": _depend, "origin": _origin, "pretrain": _pretrain,
    "quantize": _quantize,
}  # fmt: skip
