"""Rows of the long table about the origin of a sink, and the declarations of their metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sinklab.results.metric import Coordinates, Metric, Row
from sinklab.results.summaries.origin import OriginFound
from sinklab.studies.origin.ablation import Measured

__all__ = ["origin_rows"]

PROBE = "origin"
NORM_RATIO = Metric(
    "place_norm_ratio",
    "ratio",
    "Mean norm at a place over the mean norm of other tokens in what leaves the block (layer -1: what enters the first one).",
    range=(0.0, float("inf")),
)
WRITTEN = Metric(
    "unit_write",
    "norm",
    "What one unit, whose number ends the module's name, adds to the write at the sink, along the direction of the mean write.",
)
CHANNEL_WRITE = Metric(
    "channel_write", "norm", "Mean over samples of the write at the sink in one channel, whose number ends the module's name."
)
SPIKE = Metric(
    "spike_times_median",
    "ratio",
    "Mean over samples of largest over median size of the hidden state, at the block behind the origin where it is largest; "
    "other sinks and spikes are left out of the largest.",
    range=(0.0, float("inf")),
    version=2,  # of a place beside a larger spike it was that of the other place
)
PLACE_WEIGHT = Metric(
    "place_weight",
    "weight",
    "Mean over samples, and over the queries that see a place and stand on none, of the weight on all places of one origin "
    "together; with a head of that head, else over the heads behind the origin that give at least half as much as the "
    "strongest of them.",
    range=(0.0, 1.0),
)
ORIGIN_LOSS = Metric("origin_loss_change", "nats", "Mean over samples of the change of their mean loss under the edit.")
REGISTER_WEIGHT = Metric(
    "register_weight",
    "weight",
    "Mean over samples, the queries that are no register and the heads behind the origin of the weight on all added registers "
    "together.",
    range=(0.0, 1.0),
)
DIVERGENCE = Metric(
    "class_divergence",
    "nats",
    "Mean over samples of the KL divergence of the class probabilities from those of the model as it is.",
    range=(0.0, float("inf")),
)


def origin_rows(entry: OriginFound, clean: Measured, samples: int) -> Iterator[Row]:
    """Rows of the long table about one place."""
    common: Coordinates = {"probe": PROBE, "sink": entry["place"], "count": samples}
    for number, (place, others) in enumerate(zip(entry["norms"]["place"], entry["norms"]["others"], strict=True)):
        if others and math.isfinite(place):
            yield {**common, "metric": NORM_RATIO, "value": place / others, "layer": number - 1}
    if entry["block"] is not None:
        # Units and channels are neither heads nor positions, whose columns others count.
        at: Coordinates = {**common, "layer": entry["block"]}
        for unit in entry["units"]:
            yield {**at, "metric": WRITTEN, "value": unit["along"], "module": f"{entry['module']}, unit {unit['unit']}"}
        for channel in entry["channels"]:
            named = f"{entry['module']}, channel {int(channel['channel'])}"
            yield {**at, "metric": CHANNEL_WRITE, "value": channel["value"], "module": named}
    for label, values in clean.weights.items():
        for head, value in enumerate(values.nanmean(0).tolist()):
            if math.isfinite(value):
                cell: Coordinates = {**common, "module": label, "layer": clean.layers[label], "head": head}
                yield {**cell, "metric": PLACE_WEIGHT, "value": value}
    yield {**common, "metric": SPIKE, "value": entry["spike"]}
    for edit in entry["edits"]:
        edited: Coordinates = {**common, "intervention": f"{edit['on']}: {edit['edit']}"}
        yield {**edited, "metric": SPIKE, "value": edit["spike"]}
        if edit["weight"] is not None:
            yield {**edited, "metric": PLACE_WEIGHT, "value": edit["weight"]}
        if edit["loss"] is not None:
            for bound, value in edit["loss"].items():
                metric = ORIGIN_LOSS if bound == "mean" else ORIGIN_LOSS.bound(bound)
                yield {**edited, "metric": metric, "value": float(value)}  # type: ignore[arg-type]  # an interval has both ends
    if (registers := entry.get("registers")) is not None:
        moved: Coordinates = {**common, "intervention": "registers: moved"}
        if registers["weight"] is not None:
            yield {**moved, "metric": REGISTER_WEIGHT, "value": registers["weight"]}
        for name, divergence in (("registers: moved", registers["divergence"]), ("units: zero", registers["silenced"])):
            if divergence is not None:
                yield {**common, "intervention": name, "metric": DIVERGENCE, "value": divergence["mean"]}
