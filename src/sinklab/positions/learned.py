"""Learned positions: a table with one vector for each position of the context is added to the embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sinklab.errors import ConfigurationError
from sinklab.positions.base import DecoderShape, PositionScheme
from sinklab.registry import positions


@positions.register("learned")
class Learned(PositionScheme):
    """``embedding + table[position]``, as in GPT-2 (Radford et al. 2019).

    The table has one row for each position of the training context, so the model cannot read further. It starts like the table
    of the tokens.

    Raises:
        ConfigurationError: a position beyond the table. Where values cannot be looked at (a compiled graph, an accelerator) the
            device raises instead.
    """

    def __init__(self, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().__init__(architecture, settings)
        self.std = architecture.embedding_std
        self.table = nn.Parameter(torch.empty(architecture.num_positions, architecture.hidden_size))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)

    def embed(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        rows = self.table.shape[0]
        if torch.compiler.is_compiling() or position_ids.device.type != "cpu":
            # Looking would wait for the device, at every forward.
            torch._assert_async((position_ids < rows).all(), f"a position beyond the learned table of {rows} rows")
        elif (last := int(position_ids.max())) >= rows:
            raise ConfigurationError(
                f"position scheme 'learned' has a table of {rows:,} positions and was asked for position {last:,}; give "
                "shorter sequences, or train with a larger max_position_embeddings"
            )
        return hidden_states + nn.functional.embedding(position_ids, self.table).to(hidden_states.dtype)
