"""Names of modules where something is put round a model or a part of it: those that the model has without."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.architectures.zoo import model_of
from tests.conftest import make_sinklm
from tests.models.adapted import Adapted
from torch import nn

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.names import named_modules, submodule
from sinklab.attention.placement import held, weights_of
from sinklab.models.attach import attach
from sinklab.studies.quantize.twin import Twin

WRAPPERS = [
    lambda module: torch.compile(module, backend="eager"),
    nn.DataParallel,
    lambda module: torch.compile(nn.DataParallel(module), backend="eager"),
]


def with_wrapped(model, wrap, *names):
    """A copy with something put round some of its modules, the innermost named first."""
    model = copy.deepcopy(model)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, wrap(model.get_submodule(name)))
    return model


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("names", [("layers.0",), ("layers.1.self_attn.o_proj", "layers.1.self_attn"), ("",)])
def test_names_are_those_of_the_model_itself(wrap, names):
    plain = make_sinklm()
    model = wrap(plain) if names == ("",) else with_wrapped(plain, wrap, *names)
    expected = {name: type(module) for name, module in plain.named_modules()}
    assert {name: type(module) for name, module in named_modules(model)} == expected
    assert list(dict(named_modules(model))) == list(expected)
    for name, module in named_modules(model):
        assert submodule(model, name) is module
    for name, module in model.named_modules():  # the names of torch lead to the same
        assert submodule(model, name) in (module, *(inner for _, inner in named_modules(model)))
    for name, weight in plain.named_parameters():
        assert torch.equal(held(model, name), weight)
    assert [name for name, _ in weights_of(model)] == sorted(model.state_dict())
    with pytest.raises(AttributeError, match=r"SinkLM has no module 'head' \(head\.weight\)"):
        submodule(model, "head.weight")


@pytest.mark.parametrize("prompt", [False, True])
def test_names_in_a_model_of_peft(prompt):
    model = make_sinklm()
    assert list(named_modules(Adapted(model, prompt=prompt))) == list(model.named_modules())


def test_a_part_of_the_model_that_holds_a_module_is_none_that_is_put_round_it():
    class Residual(nn.Module):  # as LeViT has them
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = nn.Sequential(Residual(nn.Linear(2, 2)))
    assert list(named_modules(model)) == list(model.named_modules())
    assert submodule(model, "0.module") is model[0].module


def test_what_goes_by_names_finds_its_modules_in_a_model_of_which_parts_are_compiled():
    plain = model_of("llama").eval()
    model = with_wrapped(plain, WRAPPERS[0], "model.layers.0", "model.layers.1.self_attn.o_proj")
    own, other = Anatomy(plain), Anatomy(model)
    assert list(own.layers) == list(other.layers)
    assert own.layer_of == other.layer_of
    for name in own.attention:
        width = plain.get_submodule(name).o_proj.in_features
        assert torch.equal(own.projection_weight(name, width), other.projection_weight(name, width))
    assert list(Twin(plain).sites) == list(Twin(model).sites)
    attach(model, "sigmoid")
    assert [name for heads in model.config.sinklab["heads"] for name in heads["modules"]] == list(own.attention)
