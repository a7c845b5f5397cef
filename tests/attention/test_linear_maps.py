"""Linear maps with adapters of PEFT: names, weights and what goes by them are those of a model that has them in its weights."""

from __future__ import annotations

import copy

import pandas
import pytest
import torch
import transformers as T
from tests.architectures.zoo import model_of
from tests.conftest import make_sinklm
from tests.models.adapted import LowRank, Mixed, TrainedCopy, Tuner, with_adapters
from torch import nn

from sinklab.attention.anatomy import Anatomy, off_seam_modules
from sinklab.attention.linear_maps import linear_map, weight_of
from sinklab.attention.names import core_module, named_modules, out_of_peft, submodule
from sinklab.attention.session import attend
from sinklab.models.loading import hash_weights, wrap_model
from sinklab.models.positions import learned_positions
from sinklab.probes.head_output import HeadOutput

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
