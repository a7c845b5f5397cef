"""Activation outliers: what makes a model hard to quantise, in two numbers that need no threshold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from sinklab.attention.call import LayerOutput, Part
from sinklab.attention.probe import Means, Probe, documents_of
from sinklab.registry import probes
from sinklab.results.metric import Metric, Row

_PAPER = "Bondarenko et al. 2023 (arXiv 2306.12929)"

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

    Per document all values of the tensor are taken together, under cached decoding those of a piece; both numbers are then
    averaged over documents. For the whole
    model (rows without layer) the infinity norm is the maximum over tensors and the kurtosis their mean; the embeddings, layer
    -1, and cross-attention have rows but do not enter these. An encoder–decoder has one such row for each of its parts
    instead, cross-attention among them. The kurtosis is not the excess: a Gaussian gives 3.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden_states", "attention_outputs"})
    metrics: ClassVar[tuple[Metric, ...]] = (MAX_INF_NORM, KURTOSIS, LAYER_MAX_INF_NORM, LAYER_KURTOSIS)

    def __init__(self) -> None:
        self._means = Means()

    def update_layer(self, output: LayerOutput) -> None:
        once = torch.ones(())
        largest, spread = (MAX_INF_NORM, KURTOSIS) if output.kind == "attention" else (LAYER_MAX_INF_NORM, LAYER_KURTOSIS)
        for row, inside in documents_of(output):
            values = output.hidden_states[row][inside].flatten()
            wide = values.double() if values.device.type != "mps" else values.cpu().double()
            self._means.add(largest, output.site, wide.abs().max(), once)
            mean = wide.mean()
            squares = (wide - mean) ** 2
            second, fourth = float(squares.sum()), float((squares * squares).sum())
            if second > 1e-12 * (second + len(wide) * float(mean) ** 2):  # a constant tensor has none
                self._means.add(spread, output.site, torch.tensor(len(wide) * fourth / second**2, dtype=torch.float64), once)

    def rows(self) -> Iterator[Row]:
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
