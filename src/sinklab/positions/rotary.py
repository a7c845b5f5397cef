"""Rotary positions (RoPE): queries and keys are rotated by angles that grow with the position, so scores see differences."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from sinklab.configuration import Section
from sinklab.errors import ConfigurationError
from sinklab.positions.base import DecoderShape, PositionScheme, Rotation
from sinklab.registry import positions


@positions.register("rotary")
class Rotary(PositionScheme):
    """Coordinates ``(i, i + d/2)`` of each head are rotated by ``position · theta^(-2i/d)``; Su et al. 2021 (arXiv 2104.09864).

    The half-split layout of LLaMA. Angles are float32, float64 in a float64 model.
    """

    class Settings(Section):
        """Settings of the scheme."""

        theta: float = Field(10_000.0, gt=1, description="base of the frequencies")

    @classmethod
    def check(cls, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().check(architecture, settings)
        if architecture.head_size % 2:
            raise ConfigurationError(
                f"head_dim {architecture.head_size} must be even: position scheme 'rotary' rotates pairs of coordinates"
            )

    def __init__(self, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().__init__(architecture, settings)
        self.theta, self.head_size = self.settings.theta, architecture.head_size

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and signed sines, ``(batch or 1, 1, q_len, head_dim)``."""
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = self.theta ** (-torch.arange(0, self.head_size, 2, device=position_ids.device).to(wide) / self.head_size)
        angles = position_ids[:, None, :, None].to(wide) * frequencies
        cosines, sines = angles.cos(), angles.sin()
        # With the sign in the table, rotating needs a roll and no negation.
        return torch.cat((cosines, cosines), dim=-1).to(dtype), torch.cat((-sines, sines), dim=-1).to(dtype)

    def rotate(self, queries: Tensor, keys: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        cosines, sines = rotation
        half = self.head_size // 2

        def rotated(states: Tensor) -> Tensor:
            # Under autocast the tables are float32 and the states are not; what comes out is what went in.
            return (states * cosines + states.roll(half, dims=-1) * sines).to(states.dtype)

        return rotated(queries), rotated(keys)
