"""Massive activations: the few coordinates of the residual stream that are thousands of times larger than the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import LayerOutput, Site
from sinklab.attention.probe import Means, Probe, documents_of
from sinklab.errors import ConfigurationError
from sinklab.registry import probes
from sinklab.results.metric import Coordinates, Metric, Row

_SUN = "Sun et al. 2024 (arXiv 2402.17762)"
_LEAST, _TIMES_MEDIAN = 100.0, 1000.0
_NO_CHANNEL = 1 << 40


@dataclasses.dataclass
class _Peaks:
    """Largest absolute value at each position and its channel, ``(positions,)`` each; 0 where nothing was seen."""

    site: Site
    values: Tensor
    channels: Tensor


MASSIVE_COUNT = Metric(
    "massive_count",
    "count",
    "Mean over documents of the number of values with |x| > 100 and |x| >= 1000 * median |x| of the hidden state.",
    paper=_SUN,
    range=(0.0, float("inf")),
)
MAX_ABS = Metric("max_abs", "norm", "Largest |x| over all documents.", paper=_SUN, range=(0.0, float("inf")))
MAX_TO_MEDIAN = Metric(
    "max_to_median", "ratio", "Mean over documents of largest |x| / median |x|; no threshold.", range=(1.0, float("inf"))
)
MASSIVE_VALUE = Metric(
    "massive_value",
    "norm",
    "Largest |x| over all documents at this position, for the positions of the layer where it is largest.",
    range=(0.0, float("inf")),
)
MASSIVE_CHANNEL = Metric(
    "massive_channel",
    "index",
    "Coordinate of the hidden state (0-based) that holds the massive_value of the same layer and position.",
    range=(0.0, float("inf")),
)


@probes.register("massive_activation")
class MassiveActivation(Probe):
    """Absolute values above 100 that are also at least 1000 times the median absolute value of their hidden state.

    A hidden state is all tokens of one document at the output of one layer; layer -1 is what enters the first one. Under
    cached decoding a document comes in pieces, and each piece is judged by its own median. ``massive_value`` and
    ``massive_channel`` say where to look: the largest value at a position, whether it meets the criterion or not.

    Args:
        top: how many positions of each layer get rows of ``massive_value`` and ``massive_channel``.

    Raises:
        ConfigurationError: ``top`` below 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden_states"})
    metrics: ClassVar[tuple[Metric, ...]] = (MASSIVE_COUNT, MAX_ABS, MAX_TO_MEDIAN, MASSIVE_VALUE, MASSIVE_CHANNEL)

    def __init__(self, top: int = 3) -> None:
        if top < 0:
            raise ConfigurationError(f"top {top} must be 0 or more: it is a number of positions")
        self.top = top
        self._means = Means()
        self._peaks: dict[str, _Peaks] = {}

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind != "layer":
            return
        magnitudes = output.hidden_states.float().abs()
        once = torch.ones(())
        for row, inside in documents_of(output):
            values = magnitudes[row][inside]
            median, largest = values.median(), values.max()
            massive = (values > _LEAST) & (values >= _TIMES_MEDIAN * median)
            self._means.add(MASSIVE_COUNT, output.site, massive.sum(), once)
            if median > 0:
                self._means.add(MAX_TO_MEDIAN, output.site, largest / median, once)
        seen = output.positions >= 0
        if bool(seen.any()):
            values, channels = magnitudes.max(dim=-1)
            self._raise(output.site, values[seen].cpu(), channels[seen].cpu(), output.positions[seen].cpu())

    def _raise(self, site: Site, values: Tensor, channels: Tensor, positions: Tensor) -> None:
        """Reduce tokens ``(tokens,)`` and what is known to positions; of equal values the lowest channel: no order matters."""
        if known := self._peaks.get(site.module):
            values, channels = torch.cat((known.values, values)), torch.cat((known.channels, channels))
            positions = torch.cat((torch.arange(len(known.values)), positions))
        size = int(positions.max()) + 1
        best = torch.zeros(size).scatter_reduce(0, positions, values, "amax")
        holds = values == best[positions]
        lowest = torch.full((size,), _NO_CHANNEL).scatter_reduce(0, positions[holds], channels[holds], "amin")
        self._peaks[site.module] = _Peaks(site, best, lowest)

    def rows(self) -> Iterator[Row]:
        yield from self._means.rows()
        documents = {site.module: int(counts) for site, _, counts in self._means.cells(MASSIVE_COUNT)}
        for module, peaks in self._peaks.items():
            coordinates: Coordinates = {"count": documents[module], "module": module, "layer": peaks.site.layer}
            yield {"metric": MAX_ABS, "value": float(peaks.values.max()), **coordinates}
            values, positions = peaks.values.topk(min(self.top, len(peaks.values)))
            for value, position in zip(values.tolist(), positions.tolist(), strict=True):
                if value > 0:
                    at: Coordinates = {**coordinates, "key_position": position}
                    yield {"metric": MASSIVE_VALUE, "value": value, **at}
                    yield {"metric": MASSIVE_CHANNEL, "value": float(peaks.channels[position]), **at}
