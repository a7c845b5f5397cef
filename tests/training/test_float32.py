"""Float32 on a CPU: handed over only where the products stay float32, and put back."""

from __future__ import annotations

import torch
from tests.conftest import make_sinklm

from sinklab.training import float32
from sinklab.training.float32 import fast_float32


def test_it_is_put_back_and_the_products_stay_float32():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    model, rows = make_sinklm(), torch.arange(40)[None]
    plain = model(input_ids=rows).logits
    with fast_float32(model, 40) as handed_over:
        assert setting.fp32_precision == ("bf16" if handed_over else before)
        # Sums of at most 64 float32 terms in another order, through two layers; bfloat16 would differ by 1e-3 and more.
        torch.testing.assert_close(model(input_ids=rows).logits, plain, rtol=1e-4, atol=1e-5)
    assert setting.fp32_precision == before


def test_a_machine_that_would_round_is_left_alone(monkeypatch):
    asked = []

    def rounds(precision, inner, rows, columns):
        asked.append((inner, rows, columns))
        return (inner, rows, columns) != (48, 40, 32)

    monkeypatch.setattr(float32, "is_float32_product", rounds)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with fast_float32(make_sinklm(), 40) as handed_over:
        assert not handed_over
        assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert (48, 40, 32) in asked  # 48 → 32: the map out of the feed-forward layer, its forward product
