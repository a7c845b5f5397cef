"""Resample a value: weights stay, and values come from the same position of another text."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from sinklab.attention.call import AttentionCall
from sinklab.attention.intervention import KeyIntervention, keys_at
from sinklab.errors import ConfigurationError
from sinklab.interventions._samples import from_sample, further_on, require_another
from sinklab.registry import interventions


@interventions.register("resample_value")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ResampleValue(KeyIntervention):
    """The values of some keys become those that sample ``b + shift`` of the batch (modulo the batch) has at the same position.

    A sink that says the same thing in every text, a key bias (Gu et al. 2024, arXiv 2410.10781), is not missed; one that
    carries something of its text is. Weights stay as they are, of every operation. Keys for which the other sample has no
    such position are left as they are. What a sample gets depends on the batch that it is in.

    Args:
        place: positions in the document, or a row of them for each sample; the null value is the same in all texts.
        shift: how many samples further the other text is, modulo the batch; 0 for the text itself.

    Raises:
        ConfigurationError: ``"null"``; or the other text is the same one, because the batch has too few samples.
    """

    example: ClassVar[dict[str, object]] = {"place": (0, 2), "shift": 1}
    neutral: ClassVar[dict[str, object]] = {"shift": 0}

    shift: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.place, str):
            raise ConfigurationError("resample_value: the null value is the same in all texts; give positions")

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or self.shift == 0

    @property
    def per_sample(self) -> bool:
        return False

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        require_another(self.shift, call)
        source, has_donor = from_sample(call.key_positions, call.key_documents, further_on(call.key_positions, self.shift))
        donors = call.values.roll(-self.shift, dims=0)
        resampled = donors.gather(2, source[:, None, :, None].expand_as(donors))
        chosen = (keys_at(call, self.place) & has_donor)[:, None, :, None]
        return dataclasses.replace(call, values=torch.where(chosen, resampled, call.values))
