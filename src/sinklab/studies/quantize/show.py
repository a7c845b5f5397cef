"""What ``sinklab quantize`` shows: schemes, the sites that cost most, cures, and what they come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sinklab.results.blocks import Block, Grid, Heading, Mark, Marks, Say, counted, interval, percent
from sinklab.results.intervals import Interval
from sinklab.results.sections import from_json
from sinklab.studies.quantize.found import BlockFound, Found, SchemeFound, SiteFound

TITLE = (
    "What quantisation costs",
    "Losses on the same samples with weights and activations on grids; ranges are from other samples.",
)
"""Heading of the page, and what was done."""

SHOWN, DRAWN = 8, 24
"""Sites that a terminal shows, and that a page draws; all are in summary.json."""


def show(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The finding and a table of schemes; where there is a gap, of sites and cures too."""
    found = from_json(Found, summary, "summary.json")
    yield Say(found.text)
    yield Grid(
        ("scheme", "verdict", "loss", "gap, nats [95 %]", "weights, bytes", "computed by"),
        [(one.name, _verdict(one), f"{one.loss:.3f}", _gap(one), one.weight_bytes, one.products) for one in found.schemes],
        text=2,
    )
    yield Marks("Gap by scheme", [(one.name, [Mark("gap", one.gap, one.low, one.high)]) for one in found.schemes], "nats")
    if found.blocks:
        yield Heading(f"One block alone on grids under {found.examined.upper()}")
        blocks = sorted(found.blocks, key=lambda block: -block.gap)
        yield Grid(("block", "gap, nats", "samples"), [(one.block, _gap(one), one.texts) for one in blocks], limit=SHOWN)
        marks = [(_short(one.block), [Mark("gap", one.gap, one.low, one.high)]) for one in found.blocks]
        yield Marks("Gap of one block alone", marks, "nats")
    if found.sites:
        sites = sorted(found.sites, key=lambda site: -site.gap)
        yield Heading("One site alone, of the blocks that carry the gap")
        yield Grid(
            ("site", "at", "gap, nats", "channel", "times median", "sink"),
            [(site.site, _where(site), _gap(site), site.channel, site.range_ratio, site.at_sink) for site in sites],
            text=2,
            limit=SHOWN,
        )
        marks = [(_short(site.site), [Mark("gap", site.gap, site.low, site.high)]) for site in sites[:DRAWN]]
        yield Marks("Gap of one site alone", marks, "nats")
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
        marks = [(cure.cure, [Mark("left", cure.left.mean, cure.left.low, cure.left.high)]) for cure in cures]
        yield Marks(f"Gap that is left under {found.examined.upper()}", marks, "nats")
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


def _short(name: str) -> str:
    """The last four parts of a qualified name."""
    return ".".join(name.split(".")[-4:])
