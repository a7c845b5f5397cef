"""Spikes: channels whose range dwarfs the others', and the tokens at which they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sinklab.corpora.samples import Samples
from sinklab.studies.quantize.twin import Range, Site, Twin

__all__ = ["Spike", "find_spikes", "worst_channel"]

LEAST_LEVELS = 16
"""A channel is a spike where its range leaves the median channel of the site fewer values of the grid than these, 4 bits."""

LEAST_RATIO = 4.0
"""Times the range of the median channel that every spike exceeds, which takes 2 bits from that channel.

A grid of 4 bits or fewer leaves no channel more than 16 values, whatever the others are, and on one of 5 bits twice the median
would be a spike, which many channels of an ordinary site are. From 6 bits on the number of values left decides alone.
"""

HEIGHT = 0.5
"""Share of the channel's largest value that a token must reach to carry the spike."""

EVERYWHERE = 0.25
"""Share of the positions above which a spike is one of the channel and of no particular tokens."""


@dataclasses.dataclass(frozen=True)
class Spike:
    """The channel of a site with the largest range.

    Attributes:
        site: key of the site.
        channel: its number.
        ratio: its range over that of the median channel.
        large: whether that is a spike on a grid of so many bits.
        channels: all channels of the site that are, the largest first.
        positions: tokens that carry it in half of the samples or more; empty where there are none.
        everywhere: it stands at so many positions that it belongs to none.
    """

    site: str
    channel: int
    ratio: float
    large: bool
    channels: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    everywhere: bool = False


def worst_channel(found: Range) -> tuple[int, float, Tensor]:
    """The channel with the largest range, its ratio to the median of those that are not 0 throughout, and all ratios."""
    sizes = found.sizes.double()
    alive = sizes[sizes > 0]
    ratios = sizes / alive.median() if len(alive) else torch.zeros_like(sizes)
    channel = int(ratios.argmax())
    return channel, float(ratios[channel]), ratios


def find_spikes(twin: Twin, samples: Samples, ranges: Mapping[str, Range], bits: int) -> dict[str, Spike]:
    """The worst channel of every site, with the tokens that carry it where it is a spike.

    Args:
        samples: those that the ranges are from.
        bits: of the grid that the spike would be on.
    """
    least = max(LEAST_RATIO, 2 ** min(bits, 8) / LEAST_LEVELS)
    spikes = {}
    for key, found in ranges.items():
        channel, ratio, ratios = worst_channel(found)
        order = ratios.argsort(descending=True)
        channels = tuple(order[ratios[order] > least].tolist())
        spikes[key] = Spike(key, channel, ratio, ratio > least, channels)
    counts: dict[str, Tensor] = {}
    shown = dict.fromkeys(ranges, 0)

    def look(site: Site, values: Tensor) -> None:
        spike = spikes[site.key]
        if not spike.large or values.ndim != 3:
            return
        extremes = ranges[site.key]
        height = HEIGHT * max(float(extremes.high[spike.channel]), -float(extremes.low[spike.channel]))
        carrying = (values[..., spike.channel].abs() >= height).sum(0)
        shown[site.key] += len(values)
        before = counts.get(site.key, carrying.new_zeros(0))
        longest = max(len(before), len(carrying))  # samples that are padded come without their padding
        longer = [nn.functional.pad(part, (0, longest - len(part))) for part in (before, carrying)]
        counts[site.key] = longer[0] + longer[1]

    if any(spike.large for spike in spikes.values()):
        twin.watch(samples, look)
    for key, carrying in counts.items():
        # A block that runs several times, as in ALBERT, shows each sample as often.
        times = max(1, round(shown[key] / len(samples)))
        positions = (2 * carrying >= times * len(samples)).nonzero()[:, 0].tolist()
        everywhere = len(positions) > EVERYWHERE * len(carrying)
        spikes[key] = dataclasses.replace(spikes[key], positions=() if everywhere else tuple(positions), everywhere=everywhere)
    return spikes
