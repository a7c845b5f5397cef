"""Norm of the hidden states by layer and position: sinks of trained models carry norms far above all other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from sinklab.attention.call import LayerOutput
from sinklab.attention.positions import by_position
from sinklab.probes._shared import MeanProbe
from sinklab.registry import probes
from sinklab.results.metric import Metric, Row

HIDDEN_NORM = Metric(
    "hidden_norm",
    "norm",
    "Mean over documents of the L2 norm of the layer's output at this position.",
    paper="Gu et al. 2024 (arXiv 2410.10781)",
    range=(0.0, float("inf")),
)
FIRST_TO_REST_RATIO = Metric(
    "first_to_rest_ratio",
    "ratio",
    "Mean norm at position 0 divided by the mean norm over all later positions of all documents.",
    paper="Gu et al. 2024 (arXiv 2410.10781)",
    range=(0.0, float("inf")),
)


@probes.register("hidden_norm")
class HiddenNorm(MeanProbe):
    """Mean L2 norm of what each layer puts out, per position, and how far the first token stands out.

    Layer -1 is what enters the first layer; the last layer is measured before the final norm.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"hidden_states"})
    metrics: ClassVar[tuple[Metric, ...]] = (HIDDEN_NORM, FIRST_TO_REST_RATIO)

    axes = ("key_position",)

    def update_layer(self, output: LayerOutput) -> None:
        if output.kind != "layer":
            return
        norms = output.hidden_states.float().norm(dim=-1)[:, None]
        sums = by_position(norms, output.positions)[0]
        counts = by_position(norms.new_ones(norms.shape), output.positions)[0]
        self._means.add(HIDDEN_NORM, output.site, sums, counts)

    def rows(self) -> Iterator[Row]:
        yield from self._means.rows()
        for site, sums, counts in self._means.cells(HIDDEN_NORM):
            rest, later = float(sums[1:].sum()), int(counts[1:].sum())
            if len(counts) and counts[0] > 0 and rest > 0:  # there is no position where all is padding
                yield {
                    "metric": FIRST_TO_REST_RATIO,
                    "value": float(sums[0] / counts[0]) * later / rest,
                    "count": int(counts[0]),
                    "module": site.module,
                    "layer": site.layer,
                }
