"""The parts of a SinkLM: its block, norms and feed-forward layers against their formulae."""

import pytest
import torch
from tests.models.small_models import EXACT, logits_of, make
from torch import nn

from sinklab.models.block import NORMS, FeedForward


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("pre", lambda x: x + 10 * (x + 1) + 100 * (x + 10 * (x + 1) + 2)),
        ("post", lambda x: 101 * (11 * x + 2) + 4),
        ("sandwich", lambda x: (h := x + 10 * (x + 1) + 2) + 100 * (h + 3) + 4),
    ],
)
def test_placement_of_norms(placement, expected, monkeypatch):
    """Attention is ×10, the feed-forward ×100, and every norm adds its number; what is left is the wiring."""
    layer = make(norm_placement=placement, position={"name": "no_position"}).layers[0]
    numbers = {
        "input_layernorm": 1,
        "post_attention_layernorm": 2,
        "pre_feedforward_layernorm": 3,
        "post_feedforward_layernorm": 4,
    }
    monkeypatch.setattr(layer.self_attn, "forward", lambda states, **_: (10 * states, None))
    monkeypatch.setattr(layer.mlp, "forward", lambda states: 100 * states)
    for name, number in numbers.items():
        if hasattr(layer, name):
            monkeypatch.setattr(getattr(layer, name), "forward", lambda states, number=number: states + number)
    x = torch.full((1, 1, 32), 7.0, dtype=torch.float64)
    assert torch.equal(layer(x)[0], expected(x))


def test_post_norm_has_no_final_norm():
    assert not any(name.startswith("norm.") for name in make(norm_placement="post").state_dict())


def test_added_heads_share_one_map():
    """The sum of the heads through one map is their concatenation through copies of it."""
    added, concatenated = make(head_merge="add"), make()
    state = added.state_dict()
    for name in [name for name in state if name.endswith("o_proj.weight")]:
        state[name] = state[name].repeat(1, 4)
    concatenated.load_state_dict(state)
    torch.testing.assert_close(logits_of(added), logits_of(concatenated), **EXACT)


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
