"""The block: where norms stand, and how heads meet."""

from __future__ import annotations

import pytest
import torch
from tests.models.small_models import EXACT, logits_of, make


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
