"""Sinusoid: fixed sines and cosines of the position are added to the embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from sinklab.configuration import Section
from sinklab.errors import ConfigurationError
from sinklab.positions.base import DecoderShape, PositionScheme
from sinklab.registry import positions


@positions.register("sinusoid")
class Sinusoid(PositionScheme):
    """``embedding + [sin(p·f_0) … sin(p·f_{d/2-1}), cos(p·f_0) … cos(p·f_{d/2-1})]`` with ``f_i = base^(-2i/d)``.

    Vaswani et al. 2017 (arXiv 1706.03762), in the order of the release of Gu et al. 2024 (arXiv 2410.10781): all sines, then
    all cosines, not interleaved, and the embeddings are not scaled up. ``d`` is ``hidden_size``; angles are float32.
    """

    class Settings(Section):
        """Settings of the scheme."""

        base: float = Field(10_000.0, gt=1, description="base of the frequencies")

    @classmethod
    def check(cls, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().check(architecture, settings)
        if architecture.hidden_size % 2:
            raise ConfigurationError(
                f"position scheme 'sinusoid' needs an even hidden_size, half for sines and half for cosines; got "
                f"{architecture.hidden_size}"
            )

    def __init__(self, architecture: DecoderShape, settings: Mapping[str, object]) -> None:
        super().__init__(architecture, settings)
        self.base = self.settings.base

    def embed(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        size = hidden_states.shape[-1]
        frequencies = self.base ** (-torch.arange(0, size, 2, device=hidden_states.device).float() / size)
        angles = position_ids[..., None].float() * frequencies
        return hidden_states + torch.cat((angles.sin(), angles.cos()), dim=-1).to(hidden_states.dtype)
