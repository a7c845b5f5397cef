"""Heads edited at once: heads that stand in for each other, groups over layers, and how groups are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.studies.causes.planted import HALF, MANY, PlantedLM, induction, inert, killed_behind, no_op, repeated
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import find_causes
from sinklab.errors import ConfigurationError
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.results.table import read_table
from sinklab.sinks import Head
from sinklab.studies.causes.effects import HeadEdit, HeadGroup, one_by_one
from sinklab.studies.causes.entries import chosen_heads
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.request import ChosenHeads, parse_heads, spelled
from sinklab.studies.causes.samples import token_samples

EDITS = [HeadEdit("zero", (ZeroHead(),)), HeadEdit("resample", (ResampleHead(),))]
QUICK = {"domains": ["random_tokens"], "texts": 11, "seq_len": 16, "sink": 0}


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(50, (6, 12), generator=torch.Generator().manual_seed(1))
    return model, token_samples([("random", tokens)])


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    """Intervals decide nothing here."""
    monkeypatch.setattr("sinklab.results.intervals.RESAMPLES", 100)


def planted_pair(heads):
    """The summary of two heads, alone and at once, on texts of which the second half repeats the first and is scored."""
    samples = token_samples([("repeated", repeated(MANY, 0))])
    samples.domains[:, : HALF + 1] = -1
    model = PlantedLM(heads).eval()
    options = {"batch_size": 144, "heads": "all,0.0+0.1"}
    return find_causes(model, samples=samples, readout=NextToken(), **options).summary


def test_two_heads_that_stand_in_for_each_other():
    """Each writes enough that the other is not missed; without both the words that come next are not known."""
    heads = [induction(), induction()]
    for one in heads:
        one.output *= 5.0
    found = planted_pair(heads)
    assert [head["label"] for head in found["heads"]] == ["unneeded", "unneeded"]
    (group,) = found["groups"]
    assert (group["label"], group["called"], group["members"]) == ("text-dependent", "", ["0.0", "0.1"])
    assert group["name"] == "0.0+0.1"
    assert group["alone"] == {"unneeded": 2}
    # The text is half known with one head or two, and not at all without: 23 words, of which none is likelier.
    assert group["effects"]["zero"]["repeated"]["mean"] == pytest.approx(np.log(24), abs=1e-3)
    assert found["counts"]["text-dependent"] == 0  # heads are counted, and groups are not


def test_heads_that_are_named_twice_are_one_group(llama):
    """In their own name, as a layer, and as all heads of a label: what is done to them is the same."""
    heads = [Head(layer, head) for layer in range(2) for head in range(2)]
    _, groups = chosen_heads(ChosenHeads(groups=[((1, 1), (1, 0)), ((1, 0), (1, 1)), ((0, 0), (1, 0))], layers=True), heads)
    assert [str(group) for group in groups] == ["layer 1: 1.0+1.1", "0.0+1.0", "layer 0: 0.0+0.1"]
    found = find_causes(llama[0], **QUICK | {"texts": 12}, heads="0.0+0.1+0.2+0.3,layers").summary
    members = [frozenset(group["members"]) for group in found["groups"]]
    assert len(set(members)) == len(members)
    assert [group["called"] for group in found["groups"]][:3] == ["layer 0", "layer 1", "layer 2"]


def test_two_dormant_heads_are_dormant_together():
    samples = token_samples([("repeated", repeated(MANY, 0))])
    found = find_causes(
        PlantedLM([no_op(), no_op(), inert()]).eval(), samples=samples, readout=NextToken(), batch_size=144,
        heads="all,0.0+0.1,0.0+0.2",
    ).summary  # fmt: skip
    assert [head["label"] for head in found["heads"]] == ["dormant", "dormant", "unneeded"]
    assert [group["label"] for group in found["groups"]] == ["dormant", "dormant"]
    assert found["groups"][0]["needs_sink"] == {"repeated": "yes"}
    # Weights on the sink are means over the heads.
    weights = [head["sink_weight"] for head in found["heads"]]
    assert found["groups"][1]["sink_weight"] == pytest.approx((weights[0] + weights[2]) / 2)


def written(model, samples, replace):
    """Losses by text of the model with the inputs of its output maps, which are the heads' outputs side by side, replaced."""
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, given, number=number: (replace(number, given[0]),))
        for number, layer in enumerate(model.model.layers)
    ]
    tokens = samples.inputs["input_ids"]
    try:
        with torch.no_grad():
            logits = model(tokens).logits
    finally:
        for hook in hooks:
            hook.remove()
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses.double().mean(1).numpy()


def test_a_group_over_layers_is_edited_as_plain_hooks_do_it(llama):
    """An output of 0 in both; and what both say of the next text, each as it is in that text's own run."""
    model, samples = llama
    kept = {}

    def keep(layer, outputs):
        kept[layer] = outputs.clone()
        return outputs

    clean = written(model, samples, keep)
    members = {0: 1, 2: 3}  # layer: head of 8 dimensions

    def replaced(with_what):
        def replace(layer, outputs):
            if layer in members:
                own = slice(8 * members[layer], 8 * members[layer] + 8)
                outputs = outputs.clone()
                outputs[..., own] = with_what(layer, outputs)[..., own]
            return outputs

        return written(model, samples, replace) - clean

    group = HeadGroup(tuple(Head(layer, head, f"model.layers.{layer}.self_attn") for layer, head in members.items()))
    found = one_by_one(model, samples, NextToken(), EDITS, [group])
    # float32 losses near 5, means over 11 positions: rounding of some 1e-6.
    zeroed = replaced(lambda layer, outputs: torch.zeros_like(outputs))
    assert found.of("zero")[0, :, 0] == pytest.approx(zeroed, abs=1e-5)
    others = replaced(lambda layer, outputs: kept[layer].roll(-1, dims=0))
    assert found.of("resample")[0, :, 0] == pytest.approx(others, abs=1e-5)
    # Taken from the edited run of the other text, the later head would say something else.
    compounded = replaced(lambda layer, outputs: outputs.roll(-1, dims=0))
    assert np.abs(compounded - others).max() > 1e-3


def test_groups_from_the_line_to_the_page(checkpoint, tmp_path):
    found = find_causes(str(checkpoint), **QUICK, heads="0.0+1.1,1.0,layers", out=tmp_path / "out")
    assert len(found.summary["heads"]) == 4  # those of the groups are examined alone too
    groups = found.summary["groups"]
    assert [group["name"] for group in groups] == ["0.0+1.1", "layer 0: 0.0+0.1", "layer 1: 1.0+1.1"]
    assert [group["called"] for group in groups] == ["", "layer 0", "layer 1"]
    assert set(groups[0]) == {
        "name", "called", "members", "label", "domains", "needs_sink", "undecided", "sink_weight", "sink_weights",
        "value_ratio", "effects", "alone",
    }  # fmt: skip
    effect = groups[0]["effects"]["hide"]["random_tokens"]
    table = read_table(tmp_path / "out" / "table.parquet")
    rows = table[(table["probe"] == "causes_groups") & (table["module"] == "0.0+1.1") & (table["intervention"] == "hide")]
    assert rows["value"].item() == pytest.approx(effect["mean"], rel=1e-12)
    assert rows[["layer", "head"]].isna().all().all()  # no head's row
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "at once" in page
    assert "layer 0" in page
    assert found.record["config"]["heads"] == "0.0+1.1,1.0,layers"


def test_a_killed_run_keeps_its_groups(checkpoint, tmp_path, monkeypatch):
    options = {**QUICK, "heads": "0.0+0.1,0.0+1.0", "minimal_effect": 0.01}
    whole, calls = find_causes(str(checkpoint), **options), killed_behind(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        find_causes(str(checkpoint), **options, out=tmp_path / "out")
    again = find_causes(str(checkpoint), **options, out=tmp_path / "out")
    assert [edited for edited, _ in calls[3:]] == [["0.0+0.1"], ["0.0+1.0"], ["0.0+1.0"]]
    assert again.summary == whole.summary


@pytest.mark.parametrize(
    ("heads", "asked"),
    [
        ("all", ChosenHeads()),
        ("0.1, 3.0", ChosenHeads(((0, 1), (3, 0)))),
        ("0.0+0.1,5.0", ChosenHeads(((5, 0),), (((0, 0), (0, 1)),))),
        ("layers", ChosenHeads(layers=True)),
        ("all,1.0 + 2.1", ChosenHeads(None, (((1, 0), (2, 1)),))),
        ([(0, 0), "0.0+0.1"], ChosenHeads(((0, 0),), (((0, 0), (0, 1)),))),
    ],
)
def test_how_heads_are_asked_for(heads, asked):
    assert parse_heads(heads) == parse_heads(spelled(heads)) == asked


@pytest.mark.parametrize(
    ("heads", "complaint"),
    [
        ("1.0,0.0++0.1", r"`heads` '1\.0,0\.0\+\+0\.1' must be all"),
        ("0.0+x", r"`heads` '0\.0\+x' must be all, or heads written layer\.head .* \+ joins those"),
        ("0.0+0.1+0.0", r"`heads` 0\.0\+0\.1\+0\.0: a head stands in the group more than once; name it once"),
        ([(0.5, 0)], r"`heads` \[\(0\.5, 0\)\] must be all, .* from Python a list of pairs \(layer, head\) too"),
        ((0, 0), r"`heads` \(0, 0\) must be all"),
        ("0.0+2.1", r"`heads` 2\.1: there is no such head; the model has 2 layers of 2 heads"),
    ],
)
def test_groups_that_cannot_be(checkpoint, heads, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        find_causes(str(checkpoint), **QUICK, heads=heads)


def test_groups_have_names_of_bounded_length():
    heads = tuple(Head(0, number) for number in range(24))
    assert str(HeadGroup(heads, "layer 0")) == "layer 0: 0.0+0.1+0.2+0.3+0.4+0.5+… (24 heads)"
    assert str(HeadGroup(heads[:2])) == "0.0+0.1"
