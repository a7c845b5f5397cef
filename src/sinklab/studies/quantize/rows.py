"""Rows of the long table about losses on grids, and the declarations of their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Unpack

from sinklab.results.metric import LOSS, Coordinates, Metric, Row
from sinklab.results.summaries.quantize import QuantizeSummary
from sinklab.studies.quantize.spikes import Spike

__all__ = ["quantize_rows"]

PROBE = "quantize"
GAP = Metric("quantization_gap", "nats", "Loss of the quantised model less that of the model as it is, over the same samples.")
SITE_GAP = Metric(
    "quantization_site_gap",
    "nats",
    "quantization_gap with this linear map, or the residual stream at this place, alone on grids.",
)
POSITION_GAP = Metric(
    "quantization_gap_by_position",
    "nats",
    "quantization_gap of the loss that is taken at this position: of the token behind it or, where tokens are hidden or a "
    "target is written, of the token there.",
    version=2,  # of masked models every number stood one position too early
)
LEFT = Metric("quantization_gap_left", "nats", "quantization_gap under the scheme with a cure.")
GAIN = Metric(
    "quantization_gain", "nats", "Loss under the scheme less that under the scheme with a cure, over the same samples."
)
RATIO = Metric(
    "channel_range_ratio",
    "ratio",
    "Range of the channel with the largest one over that of the median channel of the same input, over calibration samples.",
)
CHANNEL = Metric("channel_of_largest_range", "index", "The channel (0-based) that has the channel_range_ratio.")
SHARE = Metric("whole_products", "fraction", "Multiplications of linear maps that a cure leaves whole.", range=(0.0, 1.0))
ACTIVATIONS = Metric(
    "whole_activations", "fraction", "Numbers on grids under the scheme alone that a cure leaves whole.", range=(0.0, 1.0)
)
BYTES = Metric("extra_bytes", "bytes", "What a cure holds besides the codes, whole numbers counted as 16 bits.")
BOUNDS = {metric: (metric.bound("low"), metric.bound("high")) for metric in (GAP, SITE_GAP, LEFT, GAIN)}


def quantize_rows(
    summary: QuantizeSummary, spikes: Mapping[str, Spike], layers: Mapping[str, int | None], *, clean_loss: float, scored: int
) -> Iterator[Row]:
    """Every number of a summary, and the widest channel of every site.

    Args:
        spikes: by site.
        layers: site to the number of its layer, if it has one.
        clean_loss: mean loss of the model as it is, in nats.
        scored: losses behind it.
    """
    count, examined = summary["texts"], summary["examined"]
    yield {"probe": PROBE, "metric": LOSS, "value": clean_loss, "count": scored}
    for scheme in summary["schemes"]:
        name = f"{scheme['scheme']}{' per token' if scheme['per_token'] else ''}"
        yield {"probe": PROBE, "metric": LOSS, "value": scheme["loss"], "count": scored, "intervention": name}
        yield from _interval(GAP, scheme["gap"], scheme["low"], scheme["high"], intervention=name, count=count)
    for site in summary["sites"]:
        at: Coordinates = {"intervention": examined, "module": site["site"], "count": count}
        if site["layer"] is not None:
            at["layer"] = site["layer"]
        yield from _interval(SITE_GAP, site["gap"], site["low"], site["high"], **at)
    for key, spike in spikes.items():
        at = {"probe": PROBE, "module": key, "count": summary["calibration"]}
        layer = layers[key]
        if layer is not None:
            at["layer"] = layer
        yield {**at, "metric": RATIO, "value": spike.ratio}
        yield {**at, "metric": CHANNEL, "value": float(spike.channel)}
    for position, gap in enumerate(summary["gap_by_position"]):
        if gap is None:
            continue
        yield {
            "probe": PROBE, "metric": POSITION_GAP, "value": gap, "count": count, "intervention": examined,
            "query_position": position,
        }  # fmt: skip
    for cure in summary["cures"]:
        name = f"{examined}, {cure['cure']}"
        for metric, found in ((LEFT, cure["left"]), (GAIN, cure["gain"])):
            yield from _interval(metric, found["mean"], found["low"], found["high"], intervention=name, count=count)
        common: Row = {"probe": PROBE, "intervention": name, "count": 1}
        yield {**common, "metric": SHARE, "value": cure["share_whole"]}
        yield {**common, "metric": ACTIVATIONS, "value": cure["activations_whole"]}
        yield {**common, "metric": BYTES, "value": float(cure["extra_bytes"])}


def _interval(metric: Metric, mean: float, low: float, high: float, **at: Unpack[Coordinates]) -> Iterator[Row]:
    for one, value in zip((metric, *BOUNDS[metric]), (mean, low, high), strict=True):
        yield {"probe": PROBE, **at, "metric": one, "value": value}
