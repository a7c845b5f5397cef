"""Grids and integer products: torch's own quantisers bit for bit, and integers against what they stand for."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sinklab.errors import MeasurementError, UnsupportedModelError
from sinklab.models import integer_linear
from sinklab.models.integer_linear import (
    LinearSetting,
    QuantizedLinear,
    RunningGrid,
    affine_grid,
    inputs_on_grid,
    integer_product,
    symmetric_grid,
    weight_codes,
)


@pytest.fixture
def values():
    return torch.randn(500, 40, generator=torch.Generator().manual_seed(0)) * 3 + 1


@pytest.mark.parametrize("bits", [2, 4, 8, 12])
def test_grids_are_those_of_torch_bit_for_bit(values, bits):
    low, high = torch.tensor(-4.2), torch.tensor(7.7)
    grid = affine_grid(low, high, bits)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    wanted = torch.fake_quantize_per_tensor_affine(values, grid.scale.item(), int(grid.zero), lowest, highest)
    assert torch.equal(grid(values), wanted)
    even = symmetric_grid(values.abs().max(), bits)
    assert torch.equal(even(values), torch.fake_quantize_per_tensor_affine(values, even.scale.item(), 0, -highest, highest))


def test_a_range_is_that_of_torchs_own_observer(values):
    from torch.ao.quantization import MovingAverageMinMaxObserver

    observer = MovingAverageMinMaxObserver(averaging_constant=0.1, dtype=torch.qint32, quant_min=-128, quant_max=127)
    running = RunningGrid(8, momentum=0.9)
    for part in values.split(100):
        observer(part)
        running(part)
    scale, zero = observer.calculate_qparams()
    assert running.grid.scale.item() == scale.item()
    assert int(running.grid.zero) == int(zero)


def test_nothing_but_zeros_stays_zero():
    zeros = torch.zeros(3, 4)
    for grid in (symmetric_grid(zeros.amax(dim=1, keepdim=True), 8), affine_grid(zeros.min(), zeros.max(), 8)):
        assert torch.equal(grid(zeros), zeros)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_come_back_within_half_a_step_of_their_own_scale(bits):
    weight = torch.randn(6, 70, generator=torch.Generator().manual_seed(1)) * torch.arange(1.0, 7.0)[:, None]
    codes = weight_codes(weight, bits)
    assert len(codes.groups) == (3 if bits == 4 else 1)  # 70 inputs: 32, 32 and 6
    assert all(part.dtype == torch.int8 and int(part.abs().max()) == 2 ** (bits - 1) - 1 for part in codes.groups)
    sizes = [len(part) for part in codes.groups]
    half = torch.cat([scale[:, None].expand(-1, size) for scale, size in zip(codes.scales, sizes, strict=True)], dim=1) / 2
    # And what float32 adds to a product of up to 127 steps.
    assert bool(((codes.widened() - weight).abs() <= half * (1 + 127 * 2**-22)).all())


@pytest.mark.parametrize("bits", [(8, 8), (4, 8), (4, 4)])
@pytest.mark.parametrize("per_token", [True, False])
def test_integer_products_are_exact(values, bits, per_token):
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    weights = weight_codes(weight, bits[0])
    coded = inputs_on_grid(values, bits[1] if per_token else affine_grid(values.min(), values.max(), bits[1]))
    left = coded.codes.double() - coded.grid.zero
    groups = left.split([len(part) for part in weights.groups], dim=1)
    exact = sum(
        (part @ codes.double()) * scale.double()
        for part, codes, scale in zip(groups, weights.groups, weights.scales, strict=True)
    )
    found = integer_product(coded, weights, "map").double()
    # The integers are exact; then come one rounding to float32, two scales and the sum over two groups at most.
    torch.testing.assert_close(
        found, exact * coded.grid.scale.double(), rtol=6 * 2**-24, atol=6 * 2**-24 * float(exact.abs().max())
    )


@pytest.mark.parametrize("layer", [nn.Linear(40, 24), Conv1D(24, 40)], ids=["linear", "conv1d"])
def test_a_map_without_a_setting_is_the_map(values, layer):
    with torch.no_grad():
        torch.testing.assert_close(QuantizedLinear(layer, "map")(values), layer(values), rtol=1e-6, atol=1e-5)


@torch.no_grad()
def test_what_stays_whole_is_whole():
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    inputs = torch.randn(2, 5, 16)
    inputs[:, 0, 3] = 1000.0
    clean, map_ = layer(inputs), QuantizedLinear(layer, "map")
    rough = LinearSetting(weight_codes(layer.weight, 8), affine_grid(inputs.min(), inputs.max(), 8))
    map_.setting = rough
    assert float((map_(inputs) - clean)[:, 1:].abs().max()) > 0.3  # one value takes the whole range
    # Other tokens have a grid of their own range as soon as this token is whole, or this channel.
    rest = inputs[:, 1:]
    grid = affine_grid(rest.min(), rest.max(), 8)
    bound = 16 * (
        float(grid.scale) * float(layer.weight.abs().max()) + float(rest.abs().max()) * float(layer.weight.abs().max()) / 127
    )
    map_.setting = LinearSetting(rough.weights, grid, positions=torch.tensor([0]))
    assert torch.equal(map_(inputs)[:, 0], clean[:, 0])
    assert float((map_(inputs) - clean).abs().max()) < bound
    map_.setting = LinearSetting(rough.weights, grid, channels=torch.tensor([3]))
    assert float((map_(inputs) - clean).abs().max()) < bound + 1000 * float(layer.weight.abs().max()) * 2**-20


@torch.no_grad()
def test_the_check_passes_and_can_fail(values, monkeypatch):
    layer = nn.Linear(40, 24)
    setting = LinearSetting(weight_codes(layer.weight, 8), affine_grid(values.min(), values.max(), 8))
    map_ = QuantizedLinear(layer, "block.map")
    assert 0.0 < map_.check(values, setting) <= 1.0
    product = torch._int_mm
    monkeypatch.setattr(integer_linear.torch, "_int_mm", lambda left, right: product(left, right) + 1)
    with pytest.raises(MeasurementError, match=r"block\.map: the integer product differs from the simulated one by"):
        map_.check(values, setting)


@torch.no_grad()
def test_the_most_inputs_at_the_end_of_their_range_do_not_run_over():
    """Codes of inputs from 0 on have their zero point at the lowest, so that both sums are largest and of other sign."""
    inputs = 66_311  # 255 steps from the zero point times 127, this often, are just below 2^31
    layer = nn.Linear(inputs, 8, bias=False)
    layer.weight.fill_(0.01)
    map_ = QuantizedLinear(layer, "wide")
    map_.setting = LinearSetting(weight_codes(layer.weight, 8), affine_grid(torch.tensor(0.0), torch.tensor(1.0), 8))
    torch.testing.assert_close(map_(torch.ones(32, inputs)), torch.full((32, 8), 0.01 * inputs), rtol=1e-6, atol=0.0)
    with pytest.raises(UnsupportedModelError, match="wide has 66312 inputs, and int32 holds sums of at most 66311 products"):
        QuantizedLinear(nn.Linear(inputs + 1, 1, device="meta"), "wide")
