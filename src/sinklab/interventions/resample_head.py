"""Resample a head: replace its output at every query by the one at the same position of another text."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import HeadIntervention
from sinklab.interventions._samples import from_sample, of_like_length, require_another
from sinklab.registry import interventions


@interventions.register("resample_head")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ResampleHead(HeadIntervention):
    """Resampling ablation: outputs stay what the head usually gives, and stop depending on this text
    (Chan et al. 2022, causal scrubbing).

    Sample b of a batch gets what the model computed, in the same forward, for sample ``b + shift`` (modulo the batch) at the
    same position of its document. Samples of different lengths are counted in the order of their lengths, so that the other
    one has at least as many positions; for the longest it is the one before, whose outputs are reflected at its end: no query
    keeps its own. What a sample gets depends on the batch that it is in. Under any operation, gated or not.

    Args:
        shift: how many samples further the other text is, modulo the batch; 0 for the text itself.

    Raises:
        ConfigurationError: the other text is the same one, because the batch has too few samples.
    """

    example: ClassVar[dict[str, object]] = {"shift": 1}
    neutral: ClassVar[dict[str, object]] = {"shift": 0}

    shift: int = 1

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or self.shift == 0

    @property
    def per_sample(self) -> bool:
        return False

    def given_by(self, call: AttentionCall) -> Tensor:
        """What every sample of the batch has to give, ``(batch, q_len, num_heads, value_dim)``."""
        assert call.head_outputs is not None
        return call.head_outputs

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        require_another(self.shift, call)
        other = of_like_length(call.query_positions, self.shift)
        donors = self.given_by(call)[other].transpose(1, 2).to(outputs.dtype)
        source, has_donor = from_sample(call.query_positions, call.query_documents, other, everywhere=True)
        resampled = donors.gather(2, source[:, None, :, None].expand_as(donors))
        return torch.where(has_donor[:, None, :, None], resampled, outputs)
