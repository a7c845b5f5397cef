"""Rotate heads: rotate their output at random and keep its norm."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import HeadIntervention
from sinklab.interventions._random_rotation import random_rotation
from sinklab.registry import interventions


@interventions.register("rotate_head")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RotateHead(HeadIntervention):
    """``outputs = R · outputs``, with R a random orthogonal matrix of the head's value space.

    Where the maps round a head mean nothing (values, or what reads them, distributed alike in all directions), the real output
    is one draw among the rotated ones, and loses to them as often as it wins. Each head of each module has its own R, one for
    all queries and texts, drawn uniformly (Haar measure) from the seed. Under any operation; no query is left out.

    Args:
        seed: another one gives another matrix.
    """

    neutral: ClassVar[dict[str, object]] = {"heads": {}}

    seed: int = 0

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        rotations = [random_rotation(f"{self.seed}/{call.site.module}/{head}", outputs.shape[-1]) for head in call.head_numbers]
        # One row a query: the transpose of a random rotation is as random, so the side does not matter.
        return outputs @ torch.stack(rotations).to(outputs)
