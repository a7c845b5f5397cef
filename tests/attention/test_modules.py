"""Names and weights of modules where something is put round them: those that the model has without."""

from __future__ import annotations

import copy

import pandas
import pytest
import torch
import transformers as T
from tests.architectures.zoo import model_of
from tests.conftest import make_sinklm
from tests.models.adapted import Adapted, LowRank, Mixed, TrainedCopy, Tuner, with_adapters
from torch import nn

from sinklab.attention.anatomy import Anatomy, off_seam_modules
from sinklab.attention.modules import (
    core_module,
    held,
    linear_map,
    named_modules,
    out_of_peft,
    submodule,
    weight_of,
    weights_of,
)
from sinklab.attention.session import attend
from sinklab.models.attach import attach
from sinklab.models.loading import hash_weights, wrap_model
from sinklab.models.positions import learned_positions
from sinklab.probes.head_output import HeadOutput
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


IDS = torch.arange(3, 27).reshape(2, 12)
OUTPUTS = ("layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj")


@pytest.mark.parametrize("compiled", [False, True])
def test_head_norms_are_those_of_the_model_that_has_the_adapters_in_its_weights(compiled):
    model, merged = with_adapters(make_sinklm(), *OUTPUTS, "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj")
    if compiled:
        model.layers[0].self_attn.o_proj = torch.compile(model.layers[0].self_attn.o_proj, backend="eager")
    assert [name for name, _ in named_modules(model)] == [name for name, _ in merged.named_modules()]
    tables = []
    for looked_at in (model, merged):
        with attend(looked_at, [HeadOutput()]) as session, torch.no_grad():
            looked_at(input_ids=IDS)
        assert tuple(site.output_projection for site in session.sites) == OUTPUTS
        tables.append(session.table())
    assert {"head_norm", "output_norm", "relative_norm"} == set(tables[0]["metric"])
    # One sum of products is W x + B (A x), the other (W + B A) x: float32 rounding over 64 terms and through two layers.
    pandas.testing.assert_frame_equal(*tables, rtol=1e-4)


def test_the_weight_follows_what_the_layer_does_now():
    model, merged = with_adapters(make_sinklm(), OUTPUTS[0])
    layer, base = model.get_submodule(OUTPUTS[0]), make_sinklm().get_submodule(OUTPUTS[0]).weight
    whole = merged.get_submodule(OUTPUTS[0]).weight
    assert linear_map(layer) is layer.base_layer
    assert torch.equal(weight_of(model, OUTPUTS[0]), whole)
    assert torch.equal(weight_of(layer), whole)
    layer.disable_adapters = True
    assert torch.equal(weight_of(layer), base)
    layer.disable_adapters, layer.active_adapters = False, []
    assert torch.equal(weight_of(layer), base)
    layer.active_adapters = ["default"]
    layer.merge()
    assert torch.equal(weight_of(layer), whole)
    layer.disable_adapters = True  # it takes them out at its next call
    assert weight_of(layer) is None
    assert weight_of(nn.LayerNorm(4)) is None


def test_a_weight_that_adapters_do_other_than_add_to_is_not_known():
    model, _ = with_adapters(make_sinklm(), OUTPUTS[0], dora=True)
    assert weight_of(model, OUTPUTS[0]) is None
    with attend(model, [HeadOutput()]) as session, torch.no_grad():
        model(input_ids=IDS)
    table = session.table()
    written = table.loc[(table["metric"] == "output_norm") & table["layer"].notna(), "layer"]
    assert set(written) == {1}
    assert [site.output_projection for site in session.sites] == list(OUTPUTS)


class TransposedLowRank(LowRank):
    """As LoRA stands in the place of a ``Conv1D``; it is square here."""

    __module__ = LowRank.__module__

    def get_delta_weight(self, adapter):
        return super().get_delta_weight(adapter).T


def test_a_transposed_map_and_one_beside_the_attention():
    for family in ("gpt2", "bert"):
        plain = model_of(family).eval()
        (name, *_), own = Anatomy(plain).attention, Anatomy(plain)
        projection = own.projection_name(name)
        core = plain.get_submodule(projection)
        model = copy.deepcopy(plain)
        layer = (LowRank if isinstance(core, nn.Linear) else TransposedLowRank)(model.get_submodule(projection))
        parent, _, child = projection.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
        anatomy, width = Anatomy(model), own.projection_weight(name, 32).shape[1]
        assert anatomy.projection_name(name, width) == projection
        change = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        torch.testing.assert_close(anatomy.projection_weight(name, width), own.projection_weight(name, width) + change)


def test_an_attention_off_the_interface_is_seen_with_adapters_in_its_maps():
    class OwnAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = LowRank(nn.Linear(4, 4))

        def forward(self, hidden):
            return self.query(hidden)

    assert off_seam_modules(nn.Sequential(OwnAttention())) == ["0"]


@pytest.mark.parametrize("wrap", [Mixed, Tuner, lambda model: Mixed(nn.Sequential(model)[0])])
def test_models_of_peft_without_one_configuration(wrap):
    model = make_sinklm()
    assert out_of_peft(wrap(model)) is model
    assert wrap_model(wrap(model)).model is model
    assert list(named_modules(wrap(model))) == list(model.named_modules())


def test_a_module_that_is_trained_whole_is_the_copy_that_runs():
    model, copied = with_adapters(make_sinklm(), "embed_tokens", kind=TrainedCopy)
    wrapper = model.embed_tokens
    assert submodule(model, "embed_tokens") is wrapper.modules_to_save["default"]
    assert [name for name, _ in named_modules(model)] == [name for name, _ in copied.named_modules()]
    assert wrap_model(model).encoder == wrap_model(copied).encoder
    wrapper.disable_adapters = True
    assert submodule(model, "embed_tokens") is wrapper.original_module


def test_a_table_of_positions_with_adapters_has_its_end():
    config = T.GPT2Config(vocab_size=40, n_embd=16, n_head=2, n_layer=1, n_positions=12)
    for kind in (TrainedCopy, LowRank):
        model, _ = with_adapters(T.GPT2Model(config), "wpe", kind=kind)
        assert isinstance(core_module(model.wpe), nn.Embedding)
        assert learned_positions(model) == 12


def test_what_is_compiled_of_a_model_is_no_part_of_its_revision():
    model = make_sinklm()
    revision = hash_weights(model)
    layer, model.layers[0] = model.layers[0], torch.compile(model.layers[0], backend="eager")
    compiled = model.layers[0]
    assert hash_weights(model) == revision
    assert model.layers[0] is compiled
    assert compiled._orig_mod is layer
