"""Spikes, channels with a range of their own at few positions, and cures: what can be left whole, and what that costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.corpora.samples import Samples
from sinklab.studies.quantize.found import CureFound
from sinklab.studies.quantize.twin import WHOLE_BITS, Range, Ranges, Site, Treatment, Twin

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
    """The channel of a site with the largest range, ``ratio`` times that of the median channel; ``large`` for so many bits.

    ``channels`` are all of the site that are large. ``positions`` carry the first one in half of the samples or more; they are
    empty where there are none, or where it stands ``everywhere``.
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
    """The worst channel of every site, with the tokens that carry it where it is a spike."""
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
        spike = spikes[site.name]
        if not spike.large or values.ndim != 3:
            return
        extremes = ranges[site.name]
        height = HEIGHT * max(float(extremes.high[spike.channel]), -float(extremes.low[spike.channel]))
        carrying = (values[..., spike.channel].abs() >= height).sum(0)
        shown[site.name] += len(values)
        before = counts.get(site.name, carrying.new_zeros(0))
        longest = max(len(before), len(carrying))  # samples that are padded come without their padding
        longer = [nn.functional.pad(part, (0, longest - len(part))) for part in (before, carrying)]
        counts[site.name] = longer[0] + longer[1]

    if any(spike.large for spike in spikes.values()):
        twin.watch(samples, look)
    for key, carrying in counts.items():
        # A block that runs several times, as in ALBERT, shows each sample as often.
        times = max(1, round(shown[key] / len(samples)))
        positions = (2 * carrying >= times * len(samples)).nonzero()[:, 0].tolist()
        everywhere = len(positions) > EVERYWHERE * len(carrying)
        spikes[key] = dataclasses.replace(spikes[key], positions=() if everywhere else tuple(positions), everywhere=everywhere)
    return spikes


WHOLE_BYTES = WHOLE_BITS // 8
"""Of a number that stays whole."""


@dataclasses.dataclass(frozen=True)
class Cure:
    """One cure: a word for tables, what is done, for a sentence, and the treatment."""

    name: str
    label: str
    treatment: Treatment


def tried_cures(
    base: Treatment,
    spikes: Mapping[str, Spike],
    sinks: Sequence[int],
    carrying: Sequence[int],
    without: Mapping[tuple[int, ...], Ranges],
) -> list[Cure]:
    """Cures that change how activations are put on grids."""
    cures = []
    if base.scheme.by_token:
        cures.append(Cure("per token", "a scale for each token", dataclasses.replace(base, per_token=True)))
    for name, label, positions in (
        ("sinks whole", "the activations of the sinks kept whole", tuple(sinks)),
        ("spike tokens whole", "the activations of the tokens with the spike kept whole", tuple(carrying)),
    ):
        if positions and not (name == "spike tokens whole" and positions == tuple(sinks)):
            ranges = without[positions]
            cures.append(Cure(name, label, dataclasses.replace(base, positions=positions, ranges=ranges)))
    channels = {key: spike.channels for key, spike in spikes.items() if spike.large}
    if channels:
        cures.append(Cure("channels whole", "spike channels kept whole", dataclasses.replace(base, channels=channels)))
    return cures


def spike_positions(spikes: Mapping[str, Spike]) -> tuple[int, ...]:
    """Tokens that carry a spike at any site."""
    return tuple(sorted({place for spike in spikes.values() if spike.large for place in spike.positions}))


def cost_of(twin: Twin, treatment: Treatment, positions: float | None, prefix_bytes: int | None) -> tuple[float, float, int]:
    """What a treatment leaves whole: shares of the products and of the activations, and bytes held besides the codes.

    Args:
        positions: of a sample on average, padding left out.
        prefix_bytes: of the keys and values of one token in all layers of a decoder: where the tokens that stay whole come
            first, these are computed once and kept. Otherwise weights are held as they are beside their codes.
    """
    whole = total = whole_numbers = numbers = 0.0
    held, narrow = 0, treatment.scheme.weights != WHOLE_BITS
    first = treatment.positions == tuple(range(len(treatment.positions)))
    share = len(treatment.positions) / positions if positions else 0.0
    for site in twin.sites.values():
        channels = len(treatment.channels.get(site.name, ()))
        part = share + (1 - share) * channels / site.width
        if treatment.scheme.activations != WHOLE_BITS:
            whole_numbers, numbers = whole_numbers + part * site.rows * site.width, numbers + site.rows * site.width
        whole, total = whole + part * site.products, total + site.products
        if narrow:
            held += WHOLE_BYTES * channels * site.outputs
            held += WHOLE_BYTES * site.width * site.outputs if treatment.positions and not (first and prefix_bytes) else 0
    if treatment.positions and first and prefix_bytes:
        held += prefix_bytes * len(treatment.positions)
    return whole / total if total else 0.0, whole_numbers / numbers if numbers else 0.0, held


def token_bytes(model: PreTrainedModel) -> int:
    """Keys and values of one token in all layers, as whole numbers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * WHOLE_BYTES)


def best_cure(cures: Sequence[CureFound], minimal_effect: float) -> CureFound | None:
    """The cheapest cure that leaves no gap, else the one nearest to the loss as it is; of those with a measurable gain.

    A loss below that of the model as it is counts as off too: the model was changed, and other texts may show the other side.
    """
    gaining = helping(cures)
    curing = [cure for cure in gaining if cure.left.high <= minimal_effect]
    if curing:
        return min(curing, key=_cost)
    return min(gaining, key=lambda cure: (abs(cure.left.mean), *_cost(cure)), default=None)


def helping(cures: Sequence[CureFound]) -> list[CureFound]:
    """Those that gain anything measurable."""
    return [cure for cure in cures if cure.gain.low > 0]


def _cost(cure: CureFound) -> tuple[float, ...]:
    """Whole products first, since they take time and a second kernel; then bytes, activations, and how far off the loss is."""
    return cure.share_whole, cure.extra_bytes, cure.activations_whole, abs(cure.left.mean)
