"""Rotate a change: apply the change of earlier interventions in a random direction, with the same norm."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import HeadIntervention
from sinklab.interventions._random_rotation import random_rotation
from sinklab.registry import interventions


@interventions.register("rotate_change")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RotateChange(HeadIntervention):
    """``outputs = clean + R · (edited - clean)``, with R a random orthogonal matrix of the head's value space.

    A control of the same norm for the interventions before it: at every query the change has the norm that it had, only its
    direction means nothing. What hurts no more than this hurts because something was changed, not because of what was.
    Each head of each module has its own R, one for all queries and texts, drawn uniformly (Haar measure) from the seed; clean
    outputs are those of the model, after gates. Alone it changes nothing. Under any operation; no query is left out.

    Args:
        seed: another one gives other directions.
    """

    neutral: ClassVar[dict[str, object]] = {"heads": {}}
    follows: ClassVar[tuple[str, ...]] = ("redirect",)

    seed: int = 0

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        assert call.head_outputs is not None
        clean = call.head_outputs.transpose(1, 2).to(outputs.dtype)
        width = outputs.shape[-1]
        rotations = [random_rotation(f"{self.seed}/{call.site.module}/{head}", width) for head in call.head_numbers]
        # One row a query: the transpose of a random rotation is as random, so the side does not matter.
        return clean + (outputs - clean) @ torch.stack(rotations).to(outputs)
