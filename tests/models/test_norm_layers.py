"""The norms by their formulae, and in half precision."""

from __future__ import annotations

import pytest
import torch

from sinklab.models.block import NORMS


def test_norms_by_their_formulae():
    x = torch.tensor([[1.0, -2.0, 3.0, 0.0]], dtype=torch.float64)
    norms = {name: cls(4, 1e-5).double() for name, cls in NORMS.items()}
    torch.testing.assert_close(norms["rms_norm"](x), x / (14 / 4 + 1e-5) ** 0.5)
    torch.testing.assert_close(norms["layer_norm"](x), (x - 0.5) / (13 / 4 + 1e-5) ** 0.5)
    torch.testing.assert_close(norms["dynamic_tanh"](x), torch.tanh(0.5 * x))
    with torch.no_grad():
        for norm in norms.values():
            norm.weight.fill_(2.0)
    torch.testing.assert_close(norms["dynamic_tanh"](x), 2 * torch.tanh(0.5 * x))


@pytest.mark.parametrize("name", NORMS)
def test_norms_round_once_in_half_precision(name):
    x = 30 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = NORMS[name](32, 1e-5)
    exact = norm(x.float())
    # A last rounding to 8 bits, and for the tanh one of its argument, whose error it never enlarges.
    torch.testing.assert_close(norm.bfloat16()(x).float(), exact, rtol=2.0**-7, atol=2.0**-7)
