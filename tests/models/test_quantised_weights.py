"""Weights as codes: grids as torch's quantisers have them, and models of another library as the weights that codes mean."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sinklab import SinkCache, audit, find_causes, find_origin, measure
from sinklab.attention.modules import held
from sinklab.errors import MeasurementError, UnsupportedModelError
from sinklab.models import integer_linear
from sinklab.models.integer_linear import (
    LinearSetting,
    QuantizedLinear,
    affine_grid,
    inputs_on_grid,
    integer_product,
    symmetric_grid,
    weight_codes,
)
from sinklab.models.loading import hash_weights, load_model, wrap_model
from sinklab.streaming.traits import fingerprint


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
    inputs, grid = inputs_on_grid(values, bits[1] if per_token else affine_grid(values.min(), values.max(), bits[1]))
    left = inputs.double() - grid.zero
    groups = left.split([len(part) for part in weights.groups], dim=1)
    exact = sum(
        (part @ codes.double()) * scale.double()
        for part, codes, scale in zip(groups, weights.groups, weights.scales, strict=True)
    )
    found = integer_product(inputs, grid, weights, "map").double()
    # The integers are exact; then come one rounding to float32, two scales and the sum over two groups at most.
    torch.testing.assert_close(found, exact * grid.scale.double(), rtol=6 * 2**-24, atol=6 * 2**-24 * float(exact.abs().max()))


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


SAMPLES = {"corpus": "random_tokens", "samples": 3, "seq_len": 16}


class Coded(torch.Tensor):
    """As torchao keeps a weight: int8 codes and scales that pass for floats, and compute linear maps and nothing else."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["codes"], tensors["scale"])

    def dequantize(self):
        return self.codes * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            inputs, weight, *bias = args
            return nn.functional.linear(inputs, weight.dequantize(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Coded dispatch: attempting to run unimplemented operator: {function}")


def coded(model: nn.Module) -> nn.Module:
    """A copy whose linear maps are coded."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter(Coded((weight / scale).round().to(torch.int8), scale), requires_grad=False)
    return model


def widened(model: nn.Module) -> nn.Module:
    """The same model with what its codes stand for."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return model


def trained() -> tuple[nn.Module, object]:
    loaded = load_model("embedded:softmax")
    return loaded.model, loaded.tokenizer


def test_a_model_of_codes_has_the_numbers_of_what_they_stand_for():
    """Bit for bit, a head's norm behind its projection and its proofs by linear maps included."""
    model, tokenizer = trained()
    one, other = coded(model), widened(coded(model))
    assert hash_weights(one) == hash_weights(other) != hash_weights(model)
    assert fingerprint(one) == fingerprint(other)
    probes = ["sink_rate", "head_output", "hidden_norm"]
    tables = [measure(wrap_model(m, tokenizer), probes=probes, **SAMPLES).table for m in (one, other)]
    assert {"gu2024", "head_norm"} <= set(tables[0]["metric"])
    assert tables[0].drop(columns="run_id").equals(tables[1].drop(columns="run_id"))
    results = [find_origin(wrap_model(m, tokenizer), seq_len=32, samples=4) for m in (one, other)]
    assert results[0].table.drop(columns="run_id").equals(results[1].table.drop(columns="run_id"))


def test_causes_of_a_model_of_codes():
    """Heads are replayed through their projection and the map to logits, both of which are coded."""
    model, tokenizer = trained()
    one, other = coded(model), widened(coded(model))
    sizes = {"heads": [(0, 0), (1, 1)], "sink": 0, "texts": 9, "seq_len": 24}
    tables = [find_causes(wrap_model(m, tokenizer), **sizes).table for m in (one, other)]
    assert len(tables[0])
    assert tables[0].drop(columns="run_id").equals(tables[1].drop(columns="run_id"))


def test_an_audit_and_a_bounded_cache_of_a_model_of_codes():
    model, tokenizer = trained()
    one, other = coded(model), widened(coded(model))
    assert audit(wrap_model(one, tokenizer), samples=4, cache=False)
    ids = torch.arange(3, 40)[None]
    read = [m.generate(ids, past_key_values=SinkCache(m, num_sinks=2, window=16), max_new_tokens=8, do_sample=False)
            for m in (one, other)]  # fmt: skip
    assert torch.equal(*read)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_weight_of_codes_is_held_as_numbers_without_a_gradient(requires_grad):
    codes, scale = torch.tensor([[1, -2], [3, 4]], dtype=torch.int8), torch.tensor([[0.5], [2.0]])
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(Coded(codes, scale), requires_grad=requires_grad)
    with torch.inference_mode():
        found = held(module, "weight")
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert found.tolist() == [[0.5, -1.0], [6.0, 8.0]]


@pytest.mark.skipif(not hasattr(torch, "quantize_per_tensor"), reason="this torch has no quantised tensors of its own")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_buffer_of_torchs_own_codes_is_held_as_numbers():
    module = nn.Module()
    module.register_buffer("map", torch.quantize_per_tensor(torch.tensor([0.25, -0.5]), 0.25, 0, torch.qint8))
    assert torch.equal(held(module, "map"), torch.tensor([0.25, -0.5]))
    assert hash_weights(module).startswith("sha256-")
