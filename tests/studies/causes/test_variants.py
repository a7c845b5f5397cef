"""Variants and their controls: names, budgets, keys that are drawn, and outputs that are rotated."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import make_sinklm
from tests.studies.causes.planted import FAR, PlantedLM, fresh, induction, no_op, planted, sinks_of

from sinklab import attend
from sinklab.errors import ConfigurationError
from sinklab.interventions.rotate_head import RotateHead
from sinklab.sinks import Head
from sinklab.studies.causes.effects import KEYS, ROTATED, make_variants
from sinklab.studies.causes.samples import token_samples


@pytest.fixture(scope="module")
def known():
    found = planted("induction", 0)
    return found, sinks_of(found.model, found.samples)


@pytest.mark.parametrize("budget", ["fast", "full"])
def test_names(known, budget):
    found, sink = known
    names = {variant.name for variant in make_variants(sink, found.samples, budget=budget)}
    expected = {"redirect", "hide", "zero", "zero_value", "resample"}
    controls = {*(f"redirect control {key}" for key in range(KEYS)), *(f"rotated {number}" for number in range(ROTATED))}
    assert names == (expected | {"mean"} | controls if budget == "full" else expected)


def test_control_keys_are_drawn_by_text_early_and_off_the_sinks(known):
    found, sink = known
    variants = {variant.name: variant for variant in make_variants(sink, found.samples, budget="full", seed=3)}
    first, second = (variants[f"redirect control {key}"].interventions[0].place for key in range(2))
    assert first.shape == second.shape == (len(found.samples), 1)
    assert (first != second).all()
    # The first quarter of 23 positions, without the sink.
    assert set(first.flatten().tolist()) <= set(range(1, 6))
    assert len(set(first.flatten().tolist())) > 1
    again = {variant.name: variant for variant in make_variants(sink, found.samples, budget="full", seed=3)}
    assert torch.equal(again["redirect control 1"].interventions[0].place, second)
    other = {variant.name: variant for variant in make_variants(sink, found.samples, budget="full", seed=4)}
    assert not torch.equal(other["redirect control 0"].interventions[0].place, first)


def test_control_keys_are_none_behind_the_end_of_a_text(known):
    found, sink = known
    tokens = found.samples.inputs["input_ids"].clone()
    size = torch.tensor([23, 5, 2, 12]).repeat(len(tokens))[: len(tokens)]
    padding = 999
    tokens[torch.arange(23) >= size[:, None]] = padding
    samples = token_samples([("repeated", tokens)], padding=padding)
    variants = {variant.name: variant for variant in make_variants(sink, samples, budget="full")}
    keys = torch.cat([variants[f"redirect control {key}"].interventions[0].place for key in range(KEYS)], dim=1)
    assert (keys < size[:, None]).all()
    assert (keys > 0).all()
    assert (keys[size == 2] == 1).all()  # it has no other one
    assert (keys[size > 2][:, 0] != keys[size > 2][:, 1]).all()
    assert set(keys[size == 23].flatten().tolist()) == {1, 2, 3, 4}  # of the first quarter


def test_texts_too_short_for_controls():
    model, tokens = PlantedLM([no_op()]).eval(), fresh(3, 0)[:, :2]
    samples = token_samples([("short", tokens)])
    sink = sinks_of(model, samples, place=0)
    make_variants(sink, samples)
    message = r"controls need 2 keys besides the sink, and texts of 2 tokens leave 1; take longer texts"
    with pytest.raises(ConfigurationError, match=message):
        make_variants(sink, samples, budget="full")


def test_hiding_and_zeroing_the_value_take_the_same_mass_away():
    """The control of the second axis. Both leave the content; hiding scales it up to mass 1, the other leaves it what it has.

    Values are one for a token and 0 for BOS, so that the sum of an output is its mass on content.
    """
    model, tokens = PlantedLM([induction(sink=2.0), no_op(sink=FAR / 2)]).eval(), fresh(3, 0)
    samples = token_samples([("fresh", tokens)])
    sink = sinks_of(model, samples, place=0)
    variants = {variant.name: variant for variant in make_variants(sink, samples)}
    outputs = {}
    attention = model.layers[0].self_attn
    for name in ("as it is", "hide", "zero_value"):
        edits = [edit for head in range(2) for edit in variants[name].on(Head(0, head), 0, 3)] if name in variants else []
        hook = attention.o_proj.register_forward_pre_hook(
            lambda _, args, name=name: outputs.update({name: args[0].unflatten(-1, (2, -1))[:, 1:].clone()})
        )
        with torch.no_grad(), attend(model, interventions=edits):
            model(input_ids=tokens)
        hook.remove()
    content = outputs["zero_value"].sum(-1, keepdim=True)
    assert ((content > 0.01) & (content < 0.99)).any()
    # float64, sums of 23 numbers of at most 1.
    torch.testing.assert_close(outputs["zero_value"], outputs["as it is"], atol=1e-14, rtol=0)  # BOS says 0 here
    torch.testing.assert_close(outputs["hide"], outputs["zero_value"] / content, atol=1e-13, rtol=0)
    weights = (1 - content).mean((0, 1))[:, 0].tolist()
    assert weights == pytest.approx(sink.weights.tolist(), abs=1e-12)  # what the sink is found by


def test_a_rotated_head_keeps_its_norms_and_every_head_has_a_direction_of_its_own():
    model, tokens = make_sinklm().double(), torch.randint(2, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    seen = []
    hook = model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with torch.no_grad():
        for seeds in ((), (0,), (1,)):
            with attend(model, interventions=[RotateHead(seed=seed, heads={1: (0, 1)}) for seed in seeds]):
                model(input_ids=tokens)
    hook.remove()
    clean, first, second = (one.unflatten(-1, (2, 16)) for one in seen)
    for rotated in (first, second):
        assert torch.allclose(rotated.norm(dim=-1), clean.norm(dim=-1), rtol=1e-12)
        # One matrix for all queries and texts: inner products of outputs of a head stay what they were.
        for head in range(2):
            before, after = clean[:, :, head].flatten(0, 1), rotated[:, :, head].flatten(0, 1)
            assert torch.allclose(after @ after.T, before @ before.T, atol=1e-14)
    assert not torch.allclose(first, second)
    solved = [torch.linalg.lstsq(clean[:, :, head].flatten(0, 1), first[:, :, head].flatten(0, 1)).solution for head in (0, 1)]
    assert not torch.allclose(*solved, atol=0.1)
