"""Weights that another library keeps as codes: the numbers are those of the model with what the codes stand for."""

import copy

import pytest
import torch
from torch import nn

from sinklab import SinkCache, audit, find_causes, find_origin, measure
from sinklab.attention.modules import held
from sinklab.models.loading import hash_weights, load_model, wrap_model
from sinklab.streaming.traits import fingerprint

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
    sizes = {"heads": [(0, 0), (1, 1)], "sink": 0, "texts": 9, "seq_len": 24, "experiments": False}
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
