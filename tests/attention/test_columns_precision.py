"""The float32 product: exact, and its switch left as it was."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import make_sinklm

from sinklab.attention import matmul_precision
from sinklab.attention.matmul_precision import fast_float32, is_float32_product, linear_sizes


class _Switch:
    """Stands in for oneDNN's switch and remembers what it was set to."""

    def __init__(self) -> None:
        self.history: list[str] = []
        self._value = "tf32"

    @property
    def fp32_precision(self) -> str:
        return self._value

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        self._value = value
        self.history.append(value)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> _Switch:
    fake = _Switch()
    monkeypatch.setattr(matmul_precision, "_switch", lambda: fake)
    is_float32_product.cache_clear()
    yield fake
    is_float32_product.cache_clear()


def test_products_have_float32_accuracy_whatever_the_process_has_set() -> None:
    left, right = torch.randn(300, 65), torch.randn(500, 65)
    exact = left.double() @ right.double().t()
    with fast_float32([(65, 300, 500)]):
        out = torch.mm(left, right.t())
    # 65 terms of |left · right| summed in float32: each partial sum is rounded once.
    assert ((out - exact).abs() <= 65 * 2**-24 * (left.abs().double() @ right.abs().double().t())).all()


def test_the_switch_is_restored(switch: _Switch) -> None:
    with fast_float32([(9, 4, 4)]):
        assert switch.fp32_precision in ("bf16", "ieee")
    assert switch.fp32_precision == "tf32"
    with pytest.raises(RuntimeError), fast_float32([(9, 4, 4)]):
        raise RuntimeError
    assert switch.fp32_precision == "tf32"


def test_a_kernel_that_rounds_is_not_allowed_to(switch: _Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with bfloat16 matrix units uses the permission; then full precision is asked for by name."""
    multiply = torch.mm

    def rounding(left: torch.Tensor, right: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        if switch.fp32_precision == "bf16":
            left, right = left.bfloat16().float(), right.bfloat16().float()
        return multiply(left, right, **options)

    monkeypatch.setattr(torch, "mm", rounding)
    assert not is_float32_product(65, 64, 96)
    left, right = torch.randn(64, 65), torch.randn(65, 96)
    switch.history.clear()
    with fast_float32([(65, 64, 96)]) as handed_over:
        out = torch.mm(left, right)
    assert not handed_over
    assert switch.history == ["ieee", "tf32"]
    assert torch.equal(out, multiply(left, right))


def test_a_model_is_handed_over_only_if_all_of_its_products_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = make_sinklm(), torch.arange(40)[None]
    sizes, plain = linear_sizes(model, 40), model(input_ids=rows).logits
    assert (48, 40, 32) in sizes  # 48 → 32: the map out of the feed-forward layer, its forward product
    with fast_float32(sizes):
        # Sums of at most 64 float32 terms in another order, through two layers; bfloat16 would differ by 1e-3 and more.
        torch.testing.assert_close(model(input_ids=rows).logits, plain, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(matmul_precision, "is_float32_product", lambda *size: size != (48, 40, 32))
    with fast_float32(sizes) as handed_over:
        assert not handed_over
