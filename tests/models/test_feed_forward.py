"""The feed-forward layer by its six formulae."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sinklab.models.block import ACTIVATIONS, FeedForward

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("plain", "gated", "act"),
    [("relu", "reglu", torch.relu), ("gelu", "geglu", nn.GELU()), ("swish", "swiglu", nn.SiLU())],
    ids=["relu", "gelu", "swish"],
)
def test_formulae(plain, gated, act):
    layer = FeedForward(plain, 8, 16)
    assert torch.equal(layer(X), layer.down_proj(act(layer.up_proj(X))))
    layer = FeedForward(gated, 8, 16)
    assert torch.equal(layer(X), layer.down_proj(act(layer.gate_proj(X)) * layer.up_proj(X)))


def test_there_are_six():
    assert len(ACTIVATIONS) == 6
