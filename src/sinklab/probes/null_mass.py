"""Null mass: how much of its unit of attention a head gives to no key at all."""

from __future__ import annotations

from typing import ClassVar

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import by_head
from sinklab.probes._shared import MeanProbe
from sinklab.registry import probes
from sinklab.results.metric import Metric

NULL_MASS = Metric(
    "null_mass",
    "fraction",
    "Mean over counted queries of the null mass: what a softmax gives to its sink logit or key bias, what "
    "clipping or rectifying leaves; 0 for plain softmax, absent for operations whose rows have no fixed sum.",
    paper="OpenAI 2025, gpt-oss (arXiv 2508.10925)",
    range=(0.0, 1.0),
)
ROW_MASS = Metric("row_mass", "weight", "Mean over counted queries of the weight on all visible keys together.")
OUTPUT_GAIN = Metric(
    "output_gain",
    "fraction",
    "Mean over counted queries (and coordinates) of the factor that a gate puts on the head's output; absent without one.",
    paper="Bondarenko et al. 2023 (arXiv 2306.12929), Qiu et al. 2025 (arXiv 2505.06708)",
)


@probes.register("null_mass")
class NullMass(MeanProbe):
    """Mean mass on real keys and, where the operation defines it, mean null mass, per layer and head.

    A learned sink logit, softmax-plus-one and others let a head abstain. That mass is reported as such and never inferred
    from row sums: the rows of a sigmoid need not sum to one, and nothing is missing from them.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"mass"})
    metrics: ClassVar[tuple[Metric, ...]] = (NULL_MASS, ROW_MASS, OUTPUT_GAIN)

    axes, pooled = ("head",), True

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        counted = call.counted[:, None]
        for metric, mass in ((NULL_MASS, statistics.null_mass), (ROW_MASS, statistics.row_mass)):
            if mass is not None:
                self._means.add(metric, call.site, *by_head(mass, counted))
        if call.gain is not None:
            gain = call.gain.float().mean(-1).expand(*counted.shape[:1], call.num_heads, call.q_len)
            self._means.add(OUTPUT_GAIN, call.site, *by_head(gain, counted))
