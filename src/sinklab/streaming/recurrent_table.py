"""Recurrent table: the slot table of a model that keeps states of the whole text beside its keys."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.models.layer_kinds import HYBRID, RECURRENT_KINDS
from sinklab.streaming.slot_table import SlotTable

__all__ = ["RecurrentTable"]


class RecurrentTable(SlotTable):
    """The table of a model with layers of linear attention: rows may be padded in front of their first token only.

    Attributes:
        ended: whether a row has had padding behind a token, boolean ``(rows,)``: no token may follow.
    """

    per_row: ClassVar[tuple[str, ...]] = (*SlotTable.per_row, "ended")

    def clear(self) -> None:
        super().clear()
        self.ended = torch.zeros(1, dtype=torch.bool)

    def require_unbroken(self, valid: Tensor) -> None:
        """Refuse tokens behind padding that is behind a token; ``valid`` says which new columns are none of padding.

        Args:
            valid: boolean ``(rows, length)``.

        Raises:
            ConfigurationError: a row has some.
        """
        begun = (self.seen > 0)[:, None] | (valid.cumsum(dim=1) > 0)
        ended = self.ended[:, None] | ((begun & ~valid).cumsum(dim=1) > 0)
        if bool((ended & valid).any()):
            row = int((ended & valid).any(dim=1).nonzero()[0, 0])
            raise ConfigurationError(
                f"row {row} has padding between its tokens, and its layers of linear attention have taken the padding into "
                "their state; pad rows on the left, and give a row that has ended no more tokens"
            )
        self.ended = ended[:, -1]

    def masks(self, mask: object, valid: Tensor) -> object:
        """The mask of a forward as the model takes it.

        Args:
            mask: what attention is given.
            valid: which of the new columns are no padding, ``(batch, length)``: what states are to take in.
        """
        model = self.model
        if model is None or bool(valid.all()):
            return mask
        kinds = set(model.config.get_text_config(decoder=True).layer_types)
        if HYBRID in kinds:  # whose two halves go by the names of layers of one kind
            kinds |= {"full_attention", "linear_attention"}
        return {kind: valid if kind in RECURRENT_KINDS else mask for kind in kinds}

    def crop(self, keep: int) -> None:
        raise ConfigurationError(
            "tokens cannot be taken back: layers of linear attention have taken them into their state. reset() the cache and "
            "read the text again"
        )
