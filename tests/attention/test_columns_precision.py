"""The float32 product: exact, and its switch left as it was."""

from __future__ import annotations

import pytest
import torch

from sinklab.attention import matmul_precision
from sinklab.attention.matmul_precision import float32_product, is_float32_product


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
    monkeypatch.setattr(matmul_precision, "_setting", lambda: fake)
    is_float32_product.cache_clear()
    yield fake
    is_float32_product.cache_clear()


def test_products_have_float32_accuracy_whatever_the_process_has_set() -> None:
    left, right = torch.randn(300, 65), torch.randn(500, 65)
    exact = left.double() @ right.double().t()
    out = torch.empty(300, 500)
    float32_product(65, 300, 500)(left, right.t(), out)
    # 65 terms of |left · right| summed in float32: each partial sum is rounded once.
    assert ((out - exact).abs() <= 65 * 2**-24 * (left.abs().double() @ right.abs().double().t())).all()


def test_the_switch_is_restored(switch: _Switch) -> None:
    float32_product(9, 4, 4)(torch.randn(4, 9), torch.randn(9, 4), torch.empty(4, 4))
    assert switch.fp32_precision == "tf32"
    with pytest.raises(RuntimeError):
        float32_product(9, 4, 4)(torch.randn(4, 9), torch.randn(8, 4), torch.empty(4, 4))
    assert switch.fp32_precision == "tf32"


def test_a_kernel_that_rounds_is_not_allowed_to(switch: _Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with bfloat16 matrix units uses the permission; then full precision is asked for by name."""
    multiply = torch.mm

    def rounding(left: torch.Tensor, right: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        if switch.fp32_precision == "bf16":
            left, right = left.bfloat16().float(), right.bfloat16().float()
        return multiply(left, right, **options)

    monkeypatch.setattr(torch, "mm", rounding)
    assert not is_float32_product("bf16", 65, 64, 96)
    assert is_float32_product("ieee", 65, 64, 96)
    left, right, out = torch.randn(64, 65), torch.randn(65, 96), torch.empty(64, 96)
    switch.history.clear()
    float32_product(65, 64, 96)(left, right, out)
    assert switch.history == ["ieee", "tf32"]
    assert torch.equal(out, multiply(left, right))
