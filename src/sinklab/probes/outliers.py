"""Activation outliers: what makes a model hard to quantise, in two numbers that need no threshold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import Tensor

from sinklab.attention.call import LayerOutput, Part, Site
from sinklab.attention.probe import Means, Probe, documents_of, require_same
from sinklab.registry import probes
from sinklab.results.metric import Metric, Row

_PAPER = "Bondarenko et al. 2023 (arXiv 2306.12929)"
_BLOCK_NUMBERS = 1 << 20


@dataclasses.dataclass
class _Moments:
    """Mean, sums of the second to fourth power of the deviations from it, the number of values and the largest absolute value;
    all of one document. Sums of the powers themselves would lose a mean far from zero in their last digits."""

    count: int
    mean: float
    second: float
    third: float
    fourth: float
    largest: float

    def plus(self, other: _Moments) -> _Moments:
        """Those of both together (Pébay 2008, SAND2008-6212, pairwise update)."""
        mine, theirs, count = self.count, other.count, self.count + other.count
        gap = (other.mean - self.mean) / count
        product = mine * theirs
        second = self.second + other.second + gap**2 * product * count
        third = self.third + other.third + gap**3 * product * (mine - theirs) * count
        third += 3 * gap * (mine * other.second - theirs * self.second)
        fourth = self.fourth + other.fourth + gap**4 * product * (mine**2 - product + theirs**2) * count
        fourth += 6 * gap**2 * (mine**2 * other.second + theirs**2 * self.second)
        fourth += 4 * gap * (mine * other.third - theirs * self.third)
        return _Moments(count, self.mean + gap * theirs, second, third, fourth, max(self.largest, other.largest))

    def kurtosis(self) -> float | None:
        """Fourth central moment over the squared variance; ``None`` for a constant tensor."""
        if self.second <= 1e-12 * (self.second + self.count * self.mean**2):
            return None
        return self.count * self.fourth / self.second**2


MAX_INF_NORM = Metric(
    "max_inf_norm",
    "norm",
    "Mean over documents of the largest |x| in the output of the attention module; whole model: maximum over modules.",
    paper=_PAPER,
    range=(0.0, float("inf")),
)
KURTOSIS = Metric(
    "kurtosis",
    "ratio",
    "Mean over documents of E[(x - mean)^4] / variance^2 over all values in the output of the attention module; whole "
    "model: mean over modules.",
    paper=_PAPER,
    range=(1.0, float("inf")),
)
LAYER_MAX_INF_NORM = Metric(
    "layer_max_inf_norm",
    "norm",
    "The same as max_inf_norm, of the output of the whole layer.",
    paper=_PAPER,
    range=(0.0, float("inf")),
)
LAYER_KURTOSIS = Metric(
    "layer_kurtosis",
    "ratio",
    "The same as kurtosis, of the output of the whole layer.",
    paper=_PAPER,
    range=(1.0, float("inf")),
)


@probes.register("outliers")
class Outliers(Probe):
    """Largest absolute value and kurtosis of each attention output and of each layer output.

    Per document all values of the tensor are taken together; both numbers are then averaged over documents. For the whole
    model (rows without layer) the infinity norm is the maximum over tensors and the kurtosis their mean; the embeddings, layer
    -1, and cross-attention have rows but do not enter these. An encoder–decoder has one such row for each of its parts
    instead, cross-attention among them. The kurtosis is not the excess: a Gaussian gives 3.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden_states", "attention_outputs"})
    metrics: ClassVar[tuple[Metric, ...]] = (MAX_INF_NORM, KURTOSIS, LAYER_MAX_INF_NORM, LAYER_KURTOSIS)

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int, int], tuple[Site, _Moments]] = {}
        self._means = Means()

    def update_layer(self, output: LayerOutput) -> None:
        for row, inside in documents_of(output):
            new = _moments(output.hidden_states[row][inside])
            document = int(output.documents[row][inside][0])
            key = (output.kind, output.site.module, row, document)
            known = self._open.pop(key, None)
            if known is not None and int(output.positions[row][inside].min()) > 0:
                new = known[1].plus(new)  # cached decoding: more of the same document
            elif known is not None:
                self._close(output.kind, *known)
            self._open[key] = (output.site, new)

    def _close(self, kind: str, site: Site, moments: _Moments) -> None:
        once = torch.ones(())
        largest, spread = (MAX_INF_NORM, KURTOSIS) if kind == "attention" else (LAYER_MAX_INF_NORM, LAYER_KURTOSIS)
        self._means.add(largest, site, torch.tensor(moments.largest), once)
        kurtosis = moments.kurtosis()
        if kurtosis is not None:
            self._means.add(spread, site, torch.tensor(kurtosis, dtype=torch.float64), once)

    def finish(self) -> None:
        for (kind, _, _, _), (site, moments) in self._open.items():
            self._close(kind, site, moments)
        self._open.clear()

    def merge(self, other: Self) -> None:
        require_same(self, other)
        self.finish()
        other.finish()
        self._means.merge(other._means)

    def rows(self) -> Iterator[Row]:
        self.finish()
        for metric in self.metrics:
            wholes: dict[Part, list[tuple[float, int]]] = {}
            for site, sums, counts in self._means.cells(metric):
                if site.layer >= 0 and (site.kind == "self" or site.part):
                    wholes.setdefault(site.part, []).append((float(sums / counts), int(counts)))
            for part, cells in wholes.items():
                values = [value for value, _ in cells]
                value = max(values) if metric in (MAX_INF_NORM, LAYER_MAX_INF_NORM) else sum(values) / len(values)
                row: Row = {"metric": metric, "value": value, "count": sum(count for _, count in cells)}
                yield {**row, "part": part} if part else row
        yield from self._means.rows()


def _moments(hidden_states: Tensor) -> _Moments:
    """Moments of all numbers in a tensor, in float64 a block at a time."""
    values, found = hidden_states.detach().flatten(), None
    for block in values.split(_BLOCK_NUMBERS):
        wide = block.double() if block.device.type != "mps" else block.cpu().double()
        mean = wide.mean()
        apart = wide - mean
        square = apart * apart
        sums = torch.stack((mean, square.sum(), (square * apart).sum(), (square * square).sum(), wide.abs().max()))
        part = _Moments(len(wide), *sums.tolist())
        found = part if found is None else found.plus(part)
    assert found is not None, "a document has a token"
    return found
