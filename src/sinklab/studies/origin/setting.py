"""What all steps of find_origin() share: the model on its samples, and the heads behind a write that read what it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.call import run_of
from sinklab.corpora.samples import Samples
from sinklab.results.run import Progress
from sinklab.studies.origin.ablation import Measured
from sinklab.studies.origin.structure import Structure
from sinklab.studies.origin.tracing import Growth, Place

__all__ = ["HeadsByModule", "OriginSetting", "mean_over", "own_heads"]

STRONG = 0.5
"""Share of the largest weight that a head behind the origin gives to the place, from which on a head counts as one of its own;
in words :data:`~sinklab.report.origin.COUNTED_HEADS`."""

HeadsByModule: TypeAlias = Mapping[str, Tensor]
"""Numbers of some heads, int64 ``(heads,)``, by the label of their attention module."""


@dataclasses.dataclass(frozen=True, eq=False)
class OriginSetting:
    """A model on its samples.

    Attributes:
        growth: norms of the residual stream, by sample, write and position.
        others: boolean ``(samples, length)``: tokens that are neither sinks nor spikes.
        batch_size: samples a forward, those under different edits counted.
        controls: draws of random units for each edit.
        registers: added tokens that what neurons write is moved to; 0 for none.
    """

    model: PreTrainedModel
    structure: Structure
    samples: Samples
    forward: Callable[[Samples], object]
    growth: Growth
    others: Tensor
    batch_size: int
    controls: int
    seed: int
    progress: Progress
    registers: int = 0

    @property
    def real(self) -> Tensor:
        """Boolean ``(samples, length)``: what is no padding."""
        return self.growth.positions >= 0

    def tokens_at(self, place: Place) -> Tensor:
        """Boolean ``(samples, length)``: the tokens of a place."""
        return place.mask(self.growth.positions, self.growth.tokens)

    def having(self, rows: Tensor) -> OriginSetting:
        """On some of the samples alone, boolean ``(samples,)``."""
        growth = self.growth
        own = Growth(
            norms=growth.norms[rows], blocks=growth.blocks[rows], positions=growth.positions[rows],
            tokens=None if growth.tokens is None else growth.tokens[rows],
        )  # fmt: skip
        samples = self.samples.take(torch.nonzero(rows)[:, 0])
        return dataclasses.replace(self, samples=samples, growth=own, others=self.others[rows])

    def block_of(self, label: str) -> int:
        """Number of the block that an attention module belongs to, from the label of its site; -1 for one of no block."""
        name, call = run_of(label)
        for block in self.structure.blocks:
            if name.startswith(f"{block.module}.") and block.call == call:
                return block.number
        return -1


def own_heads(setting: OriginSetting, clean: Measured, block: int) -> HeadsByModule:
    """The heads of the blocks behind one that give a place most; of all blocks where no attention comes behind it."""
    labels = [label for label in clean.weights if setting.block_of(label) > block] or list(clean.weights)
    weights = {label: clean.weights[label].nanmean(0).nan_to_num(0.0) for label in labels}
    most = max((float(values.max()) for values in weights.values()), default=0.0)
    heads = {label: torch.nonzero(values >= STRONG * most)[:, 0] for label, values in weights.items()}
    return {label: own for label, own in heads.items() if len(own)}


def mean_over(values: Mapping[str, Tensor], heads: HeadsByModule) -> Tensor:
    """Mean over some heads, ``(samples,)``; NaN without any."""
    chosen = [values[label][:, own] for label, own in heads.items()]
    return torch.cat(chosen, 1).nanmean(1) if chosen else torch.full((1,), float("nan"), dtype=torch.float64)
