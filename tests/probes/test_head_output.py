"""Head outputs: by hand, and the Gram matrix against contributions formed head by head."""

import pytest
import torch
from dense_oracle import make_call, show, values_of

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.errors import ContractError
from sinklab.probes.head_output import HeadOutput

MODULE = "layers.0.self_attn"


def call_of(outputs: torch.Tensor, projection=None, residual=None, **options) -> AttentionCall:
    batch, q_len, heads, _ = outputs.shape
    zeros = torch.zeros(batch, heads, q_len, 2)
    return make_call(zeros, zeros, head_outputs=outputs, projection=projection, residual=residual, **options)


def test_three_tokens_by_hand():
    outputs = torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]], [[2.0, 0.0]]])[None]  # one head of size two
    projection = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])  # (3, 2): doubles the second coordinate
    residual = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, 4.0, 0.0]])[None]
    found = values_of(show(HeadOutput(), call_of(outputs, projection, residual)))
    # before: 5, 1, 2; after: |(3, 8)| = sqrt 73, 2, 2; relative: sqrt 73 / 1, 2/2, 2/4
    assert found["head_norm", MODULE, 0, None] == (pytest.approx(8 / 3), 3)
    assert found["output_norm", MODULE, 0, None] == (pytest.approx((73**0.5 + 4) / 3), 3)
    assert found["relative_norm", MODULE, 0, None] == (pytest.approx((73**0.5 + 1.5) / 3), 3)


@pytest.mark.parametrize("options", [{}, {"lengths": [[4], [2, 3]], "left": True}], ids=str)
def test_against_contributions_formed_one_by_one(options):
    torch.manual_seed(0)
    outputs, projection, residual = torch.randn(2, 6, 3, 4), torch.randn(10, 12), torch.randn(2, 6, 10)
    call = call_of(outputs, projection, residual, **options)
    found = values_of(show(HeadOutput(), call))
    for head in range(3):
        written = outputs[:, :, head] @ projection[:, 4 * head : 4 * head + 4].T
        ratio = written.norm(dim=-1) / residual.norm(dim=-1)
        count = int(call.counted.sum())
        assert found["output_norm", MODULE, head, None] == (
            pytest.approx(float(written.norm(dim=-1)[call.counted].mean()), rel=1e-5),
            count,
        )
        assert found["relative_norm", MODULE, head, None] == (pytest.approx(float(ratio[call.counted].mean()), rel=1e-5), count)


def test_what_is_unknown_is_absent():
    outputs = torch.randn(1, 3, 2, 4)
    assert {key[0] for key in values_of(show(HeadOutput(), call_of(outputs)))} == {"head_norm"}
    without_residual = values_of(show(HeadOutput(), call_of(outputs, torch.randn(5, 8))))
    assert {key[0] for key in without_residual} == {"head_norm", "output_norm"}


def test_a_projection_of_another_shape_is_refused():
    with pytest.raises(ContractError, match=r"has 7 columns, expected num_heads \* value_dim = 8"):
        show(HeadOutput(), call_of(torch.randn(1, 3, 2, 4), torch.randn(5, 7)))
    bare = call_of(torch.randn(1, 3, 2, 4))
    bare.head_outputs = None
    with pytest.raises(ContractError, match="without head outputs"):
        HeadOutput().update(bare, Statistics())
