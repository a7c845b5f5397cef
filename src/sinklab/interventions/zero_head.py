"""Zero the output of heads: the plainest ablation, which also takes away what a sink broadcasts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import HeadIntervention
from sinklab.registry import interventions


@interventions.register("zero_head")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ZeroHead(HeadIntervention):
    """Head outputs become 0 (Michel et al. 2019, arXiv 1905.10650)."""

    neutral: ClassVar[dict[str, object]] = {"heads": {}}

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        return torch.zeros_like(outputs)
