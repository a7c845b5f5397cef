"""Where the sinks are, sample by sample: every key whose mean weight passes the threshold, at whatever position it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import pandas as pd
import torch

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Probe

__all__ = ["SinkLocations"]


class SinkLocations(Probe):
    """Lists the (sample, layer, head, position) at which Gu et al.'s ``alpha`` passes the threshold.

    A sink is a role and not a place: a full stop in one sample and a line break in the next may play it, which a rate per
    position cannot show. Samples are the rows of the batches, in the order in which they were shown.

    Args:
        threshold: as in ``sink_rate``.
        min_queries: keys that fewer queries see are left out: the last tokens of a sample are seen by themselves and a few
            others, and their mean weight is high without any sink.
    """

    name: ClassVar[str] = "sink_locations"
    needs: ClassVar[frozenset[str]] = frozenset({"columns"})

    def __init__(self, threshold: float, min_queries: int) -> None:
        self.threshold, self.min_queries = threshold, min_queries
        self._found: list[pd.DataFrame] = []
        self._samples: dict[str, int] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.site.kind != "self":
            return
        first = self._samples.get(call.site.module, 0)
        self._samples[call.site.module] = first + call.queries.shape[0]
        assert statistics.column_share is not None  # asked for in ``needs``
        assert statistics.column_count is not None
        seen = statistics.column_count.expand_as(statistics.column_share)
        alpha = statistics.column_share / seen.clamp_min(1)
        real = (call.key_positions >= 0)[:, None]
        sample, head, key = torch.where((alpha > self.threshold) & (seen >= self.min_queries) & real)
        self._found.append(
            pd.DataFrame(
                {
                    "sample": (sample + first).cpu().numpy(),
                    "layer": call.site.layer,
                    "head": head.cpu().numpy(),
                    "position": call.key_positions[sample, key].cpu().numpy(),
                    "alpha": alpha[sample, head, key].float().cpu().numpy(),
                }
            )
        )

    def merge(self, other: Self) -> None:
        """Samples of the other one after ours."""
        for frame in other._found:
            self._found.append(frame.assign(sample=frame["sample"] + max(self._samples.values(), default=0)))
        for module, samples in other._samples.items():
            self._samples[module] = self._samples.get(module, 0) + samples

    def rows(self) -> Iterator[dict[str, Any]]:
        """No rows: samples have no column in the table; see :meth:`found`."""
        return iter(())

    def found(self) -> pd.DataFrame:
        """One row per sink: ``sample, layer, head, position, alpha``."""
        if not self._found:
            return pd.DataFrame(columns=["sample", "layer", "head", "position", "alpha"])
        return pd.concat(self._found, ignore_index=True)
