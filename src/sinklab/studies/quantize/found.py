"""What quantize() finds, and how it is shown: what each scheme costs, which sites carry it, and what is left with each cure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

from sinklab.results.blocks import Block, Grid, Heading, Say, counted, interval, percent
from sinklab.results.intervals import Interval
from sinklab.results.metric import LOSS, Coordinates, Metric, Row
from sinklab.results.sections import from_json

SUMMARY_VERSION = 3

PROBE = "quantize"
GAP = Metric("quantization_gap", "nats", "Loss of the quantised model less that of the model as it is, over the same samples.")
SITE_GAP = Metric(
    "quantization_site_gap",
    "nats",
    "quantization_gap with this block or this linear map alone on grids; of a few samples where these show that it is no "
    "tenth of the gap.",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemeFound:
    """One scheme, with static or per-token scales of the activations; ``gap`` with the ends of its interval, in nats.

    ``products`` says what ran.
    """

    scheme: str
    per_token: bool
    products: str
    loss: float
    gap: float
    low: float
    high: float
    verdict: str
    weight_bytes: int

    @property
    def name(self) -> str:
        """``W8A8``, ``W8A8 per token``."""
        return f"{self.scheme.upper()}{' per token' if self.per_token else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorstChannel:
    """A linear map, and the channel of its input with the largest range.

    ``everywhere`` is a spike at more than a quarter of the positions, which then are not listed; ``at_sink`` says that every
    position of the spike is a sink, ``None`` where the sinks are not known.
    """

    site: str
    layer: int
    channel: int
    range_ratio: float
    spike: bool
    everywhere: bool
    positions: list[int]
    tokens: list[str]
    at_sink: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFound:
    """What all sites of a block cost with nothing else on grids, in nats, on so many samples."""

    block: str
    layer: int
    gap: float
    low: float
    high: float
    texts: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteFound(WorstChannel):
    """A site with what it costs alone, in nats, on so many samples."""

    gap: float
    low: float
    high: float
    texts: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CureFound:
    """A cure: the gap that it leaves and what it gains, in nats, and what it keeps whole.

    ``share_whole`` is of the multiplications in linear maps and ``activations_whole`` of the numbers that the scheme alone
    puts on
    grids, in [0, 1]; ``extra_bytes`` are held besides the codes. Activations stay whole at ``positions``.
    """

    cure: str
    label: str
    left: Interval
    gain: Interval
    share_whole: float
    activations_whole: float
    extra_bytes: int
    positions: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """``summary.json`` of ``sinklab quantize``; blocks, sites and cures are there where the first scheme has a gap.

    Attributes:
        loss_of: what is predicted; ``clean_loss`` of the unquantised model.
        quantized_share, float_bytes: share of all parameters that is quantised; bytes of these weights in 16 bits.
        integer_check: largest difference of integer products from simulated ones over its bound; ``None`` without any.
    blocks, sites: alone on grids under the scheme ``examined``; sites of those blocks that carry a tenth of the gap, or
    may.
        level_of_sites, level_of_cures: of the single intervals, so that all hold together with 95 %.
        sinks: positions of the sinks on the calibration samples; ``None`` with ``sinks_refused`` where they are not known.
    """

    summary_version: int = SUMMARY_VERSION
    model: str
    revision: str | None
    operation: str
    corpus: str
    bos: int
    kind: str
    texts: int
    calibration: int
    tokens: int | None
    loss_of: str
    unit: str = "nats"
    minimal_effect: float
    clean_loss: Interval
    quantized_share: float
    float_bytes: int
    integer_check: float | None
    schemes: list[SchemeFound]
    examined: str
    activation_bits: int
    level_of_sites: float
    level_of_cures: float
    sinks: list[int] | None
    sinks_refused: str | None
    blocks: list[BlockFound]
    sites: list[SiteFound]
    largest_spike: WorstChannel | None
    cures: list[CureFound]
    recommended: str | None
    text: str
    warnings: list[str]


def rows(found: Found, channels: Mapping[str, WorstChannel], scored: int) -> Iterator[Row]:
    """Every number, and the widest channel of every site."""
    count, examined = found.texts, found.examined
    yield {"probe": PROBE, "metric": LOSS, "value": found.clean_loss.mean, "count": scored}
    for scheme in found.schemes:
        name = f"{scheme.scheme}{' per token' if scheme.per_token else ''}"
        yield {"probe": PROBE, "metric": LOSS, "value": scheme.loss, "count": scored, "intervention": name}
        yield from _interval(GAP, scheme.gap, scheme.low, scheme.high, intervention=name, count=count)
    alone: list[BlockFound | SiteFound] = [*found.blocks, *found.sites]
    for one in alone:
        module = one.block if isinstance(one, BlockFound) else one.site
        at: Coordinates = {"intervention": examined, "module": module, "layer": one.layer, "count": one.texts}
        yield from _interval(SITE_GAP, one.gap, one.low, one.high, **at)
    for key, channel in channels.items():
        at = {"probe": PROBE, "module": key, "layer": channel.layer, "count": found.calibration}
        yield {**at, "metric": RATIO, "value": channel.range_ratio}
        yield {**at, "metric": CHANNEL, "value": float(channel.channel)}
    for cure in found.cures:
        name = f"{examined}, {cure.cure}"
        for metric, found_of in ((LEFT, cure.left), (GAIN, cure.gain)):
            yield from _interval(metric, found_of.mean, found_of.low, found_of.high, intervention=name, count=count)
        common: Row = {"probe": PROBE, "intervention": name, "count": 1}
        yield {**common, "metric": SHARE, "value": cure.share_whole}
        yield {**common, "metric": ACTIVATIONS, "value": cure.activations_whole}
        yield {**common, "metric": BYTES, "value": float(cure.extra_bytes)}


def _interval(metric: Metric, mean: float, low: float, high: float, **at: Unpack[Coordinates]) -> Iterator[Row]:
    for one, value in zip((metric, *BOUNDS[metric]), (mean, low, high), strict=True):
        yield {"probe": PROBE, **at, "metric": one, "value": value}


TITLE = (
    "What quantisation costs",
    "Losses on the same samples with weights and activations on grids; ranges are from other samples.",
)
"""Heading of the page, and what was done."""

SHOWN = 8
"""Blocks and sites that a terminal shows; all are in summary.json."""


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The finding and a table of schemes; where there is a gap, of sites and cures too."""
    found = from_json(Found, summary, "summary.json")
    yield Say(found.text)
    yield Grid(
        ("scheme", "verdict", "loss", "gap, nats [95 %]", "weights, bytes", "computed by"),
        [(one.name, _verdict(one), f"{one.loss:.3f}", _gap(one), one.weight_bytes, one.products) for one in found.schemes],
        text=2,
    )
    if found.blocks:
        yield Heading(f"One block alone on grids under {found.examined.upper()}")
        blocks = sorted(found.blocks, key=lambda block: -block.gap)
        yield Grid(("block", "gap, nats", "samples"), [(one.block, _gap(one), one.texts) for one in blocks], limit=SHOWN)
    if found.sites:
        sites = sorted(found.sites, key=lambda site: -site.gap)
        yield Heading("One site alone, of the blocks that carry the gap")
        yield Grid(
            ("site", "at", "gap, nats", "channel", "times median", "sink"),
            [(site.site, _where(site), _gap(site), site.channel, site.range_ratio, site.at_sink) for site in sites],
            text=2,
            limit=SHOWN,
        )
    if found.cures:
        cures = sorted(found.cures, key=lambda cure: cure.left.mean)
        yield Heading("Cures")
        yield Grid(
            ("cure", "gap left, nats", "products whole", "activations whole", "more bytes"),
            [
                (
                    cure.cure, interval(cure.left, places=3), percent(100 * cure.share_whole),
                    percent(100 * cure.activations_whole), cure.extra_bytes,
                )
                for cure in cures
            ],
        )  # fmt: skip
    if found.sinks_refused:
        yield Say(f"no sinks are known: {found.sinks_refused}", small=True)
    yield Say(
        f"{counted(found.texts, 'sample')} of {found.corpus}, ranges from {counted(found.calibration, 'other')}; loss of the "
        f"{found.loss_of} {found.clean_loss.mean:.3f} nats; {percent(100 * found.quantized_share)} of the parameters on grids, "
        f"{found.float_bytes:,} bytes in 16 bits",
        small=True,
    )
    for warning in found.warnings:
        yield Say(warning, small=True)


def _verdict(scheme: SchemeFound) -> str:
    return scheme.verdict + (", the loss falls" if scheme.high < 0 else "")


def _gap(one: SchemeFound | BlockFound | SiteFound) -> str:
    return interval(Interval(one.gap, one.low, one.high), places=3)


def _where(site: SiteFound) -> str:
    """Where the channel of the largest range has its largest values, if that is a spike."""
    if site.everywhere:
        return "many positions"
    return ", ".join(site.tokens[:4]) + (", …" if len(site.tokens) > 4 else "")
