"""The engine equals the oracle on many architectures, says how it measured, and leaves the model as it was."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from tests.architectures.zoo import ZOO, build, shape
from tests.interventions.edited_runs import Scaled
from tests.streaming.decoders import DELTA
from tests.studies.causes.planted import SquaredError
from torch import nn

from sinklab.errors import ConfigurationError, MeasurementError, UnsupportedModelError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.redirect import Redirect
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.zero_head import ZeroHead
from sinklab.interventions.zero_value import ZeroValue
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.sinks import Head, find_sinks
from sinklab.studies.causes import engine
from sinklab.studies.causes.effects import HeadEdit, change, of_all, one_by_one, text_losses
from sinklab.studies.causes.engine import REPLAYED, measure_effects
from sinklab.studies.causes.readout import ClassLogits, MaskedToken, NextToken
from sinklab.studies.causes.samples import Samples, masked_samples, token_samples
from sinklab.testing import tiny_models

SHAPE = shape(num_hidden_layers=3)
FAMILIES = [entry for entry in ZOO.values() if entry.inputs == "tokens" and not entry.refused]
TOLERANCE = 1e-5
"""What is promised. Rounding is far below: losses of size 4 in float32, means over positions."""


def enlivened(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough that attention is far from even, and biases and tables far from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.15
    return model.eval()


def of_config(config: transformers.PretrainedConfig, kind: type = transformers.AutoModelForCausalLM) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return enlivened(kind.from_config(config))


def sinklm(**changes: object) -> nn.Module:
    fields = {**SHAPE, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return enlivened(SinkLM(SinkLMConfig(**fields)))


DECODERS = {
    "llama": lambda: tiny_models()["llama"],
    "gpt2": lambda: tiny_models()["gpt2"],
    "gemma2": lambda: of_config(transformers.Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=4)),
    "qwen3_next": lambda: of_config(
        transformers.Qwen3NextConfig(
            **SHAPE,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            **DELTA,
            **{"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        )
    ),
    "sink logit": lambda: sinklm(operation={"name": "sink_logit"}),
    "gated": lambda: sinklm(operation={"name": "gated"}),
    "added heads": lambda: sinklm(head_merge="add"),
    "sigmoid": lambda: sinklm(operation={"name": "sigmoid"}),
}


def texts(count: int = 3, length: int = 12, vocabulary: int = 40) -> Samples:
    tokens = torch.randint(1, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))
    return token_samples([("one", tokens[:1]), ("two", tokens[1:])])


def usual(samples: Samples, place: int | str = 0) -> list[HeadEdit]:
    """One of every kind: other weights, other scores, other values, no output, places by sample, and stages in a row."""
    keys = torch.arange(1, len(samples) + 1)[:, None]
    redirect = Redirect(place=place)
    return [
        HeadEdit("redirect", (redirect,)),
        HeadEdit("hide", (HideKey(place=place),)),
        HeadEdit("zero", (ZeroHead(),)),
        HeadEdit("zero_value", (ZeroValue(place=place),)),
        HeadEdit("hide control 0", (HideKey(place=keys),)),
        HeadEdit("redirect halved", (redirect, Scaled(factor=0.5))),
        HeadEdit("redirect doubled", (redirect, Scaled(factor=2.0))),
        HeadEdit("nothing", (HideKey(place=()),)),
    ]


def heads_of(layers: list[int], count: int = 4) -> list[Head]:
    return [Head(layer, head) for layer in layers for head in range(count)]


def assert_equal(found, expected, tolerance=TOLERANCE):
    for of in ("loss", "clean_loss"):
        one, other = getattr(found, of), getattr(expected, of)
        assert one.dtype == other.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance, err_msg=of)
    assert (found.variants, found.heads, found.domain_names, found.unit) == (
        expected.variants,
        expected.heads,
        expected.domain_names,
        expected.unit,
    )


@pytest.mark.parametrize("name", DECODERS)
def test_equals_the_oracle_on_decoders(name):
    model, samples = DECODERS[name](), texts()
    if name == "gemma2":
        assert model.config.final_logit_softcapping  # logits are no linear map, and heads see a window
    variants = usual(samples, "null" if name == "sink logit" else 0)
    heads = heads_of([0, 1] if name in ("llama", "gpt2", "qwen3_next") else [0, 1, 2])
    found = measure_effects(model, samples, NextToken(), variants, heads, batch_size=2)
    expected = one_by_one(model, samples, NextToken(), variants, heads, batch_size=2)
    assert np.nanmax(np.abs(expected.loss[:-1])) > 100 * TOLERANCE  # there is something to be equal to
    assert_equal(found, expected)
    assert set(found.record.values()) == {REPLAYED}
    assert np.nanmax(np.abs(found.loss[-1])) < TOLERANCE  # what changes nothing
    assert np.isnan(found.loss[:, :, 0, 1]).all()  # the first text is of the first domain alone


def test_double_precision_is_kept():
    # Losses of size 5, a few hundred roundings of 1e-16 each.
    model, samples = tiny_models()["llama"], texts()
    variants, heads = usual(samples), heads_of([0, 1])
    found = measure_effects(model, samples, NextToken(), variants, heads)
    assert_equal(found, one_by_one(model, samples, NextToken(), variants, heads), 1e-12)
    assert (found.loss[-1][~np.isnan(found.loss[-1])] == 0).all()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_equals_the_oracle_on_masked_tokens(backend):
    config = transformers.BertConfig(**SHAPE)
    model = of_config(config, transformers.AutoModelForMaskedLM)
    model.set_attn_implementation(backend)
    samples = masked_samples([("all", texts().inputs["input_ids"])], mask_token=2, share=0.4)
    mask = torch.ones_like(samples.inputs["input_ids"])
    mask[1, -3:] = 0
    samples = Samples({**samples.inputs, "attention_mask": mask}, samples.domains, samples.targets, samples.domain_names)
    variants, heads = usual(samples), heads_of([0, 1, 2])
    found = measure_effects(model, samples, MaskedToken(), variants, heads)
    assert_equal(found, one_by_one(model, samples, MaskedToken(), variants, heads))
    assert set(found.record.values()) == {REPLAYED}


def test_equals_the_oracle_on_pictures():
    config = transformers.ViTConfig(**{**SHAPE, "image_size": 16, "patch_size": 4, "num_labels": 5})
    model = of_config(config, transformers.AutoModelForImageClassification)
    pictures = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    kinds, classes = torch.tensor([[0], [1], [1]]), torch.tensor([0, 4, 2])
    samples = Samples({"pixel_values": pictures}, kinds, classes, ("cats", "dogs"))
    variants, heads = usual(samples), heads_of([0, 1, 2])
    found = measure_effects(model, samples, ClassLogits(), variants, heads, batch_size=2)
    assert_equal(found, one_by_one(model, samples, ClassLogits(), variants, heads, batch_size=2))
    assert set(found.record.values()) == {REPLAYED}


def albert(**changes: int) -> nn.Module:
    config = transformers.AlbertConfig(**SHAPE, embedding_size=16, **changes)
    return of_config(config, transformers.AutoModelForMaskedLM)


def masked() -> Samples:
    return masked_samples([("all", texts().inputs["input_ids"])], mask_token=2, share=0.4)


def a_layer_for_two() -> nn.Module:
    model = sinklm()
    model.layers[2] = model.layers[0]
    return model


def an_attention_for_two() -> nn.Module:
    """As in Zamba: layers of their own with one attention module."""
    model = sinklm()
    model.layers[2].self_attn = model.layers[0].self_attn
    return model


@pytest.mark.parametrize(
    ("build", "samples", "readout", "modules"),
    [
        (albert, masked, MaskedToken, 1),
        (lambda: albert(num_hidden_groups=2, inner_group_num=2), masked, MaskedToken, 4),
        (a_layer_for_two, texts, NextToken, 2),
        (an_attention_for_two, texts, NextToken, 2),
    ],
    ids=["albert", "groups of layers", "decoder", "attention alone"],
)
def test_equals_the_oracle_in_every_run_of_a_shared_module(build, samples, readout, modules):
    model, samples, readout = build(), samples(), readout()
    heads = find_sinks(model, samples.inputs, place=0).heads
    runs = list(dict.fromkeys(head.module for head in heads))
    names = Counter(run.partition("#")[0] for run in runs)
    assert len(names) == modules
    assert max(names.values()) > 1
    variants, seen = [*usual(samples)[:1], HeadEdit("resample", (ResampleHead(),))], []
    found = measure_effects(model, samples, readout, variants, heads, batch_size=3, progress=lambda *call: seen.append(call))
    expected = one_by_one(model, samples, readout, variants, heads, batch_size=3)
    assert_equal(found, expected)
    assert found.record == dict.fromkeys(runs, REPLAYED)
    assert seen[-1] == ("effects", 2 * len(heads), 2 * len(heads))
    by_layer = [Head(head.layer, head.head) for head in heads]
    last = measure_effects(model, samples, readout, variants[:1], by_layer[-1:], batch_size=3)
    assert last.record == {runs[-1]: REPLAYED}  # a number of a layer is a run, as names are
    np.testing.assert_allclose(last.loss[0, 0], found.loss[0, -1], rtol=0, atol=TOLERANCE)
    # Runs of one module are not one edit: the same head of another run does something else.
    of_first_head = np.array([found.loss[0, index] for index, head in enumerate(heads) if head.head == 0])
    assert np.nanmax(np.abs(np.diff(of_first_head, axis=0)), axis=(1, 2)).min() > 100 * TOLERANCE


def test_a_module_that_calls_attention_several_times_in_a_run_goes_one_by_one():
    model, samples = sinklm(), texts()
    module = model.layers[1].self_attn
    own = type(module).forward

    def by_sample(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        # Mask and rotary tables have one row for all samples.
        return torch.cat([own(module, one, *args, **kwargs)[0] for one in hidden_states.split(1)]), None

    module.forward = by_sample
    variants, heads = usual(samples)[2:3], [Head(0, 1), Head(1, 1)]
    found = measure_effects(model, samples, NextToken(), variants, heads, batch_size=3)
    assert_equal(found, one_by_one(model, samples, NextToken(), variants, heads, batch_size=3))
    assert found.record == {
        "layers.0.self_attn": REPLAYED,
        "layers.1.self_attn": "it calls the attention function 2 times in one run",  # a trial has two samples
    }


class Aside(nn.Module):
    """A model whose last layer gets at what an earlier one made, past the layers between them, unless that one did not run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.aside = model, []
        self.inner.layers[0].mlp.register_forward_hook(lambda module, args, output: self.aside.append(output))

    def forward(self, input_ids: torch.Tensor) -> object:
        self.aside.clear()
        outputs = self.inner(input_ids=input_ids)
        outputs.logits = outputs.logits * (1 + sum(one.mean() for one in self.aside))
        return outputs


@pytest.mark.parametrize(
    ("layer", "reason"), [(0, REPLAYED), (1, "the model does not run with layers left out: KeyError: 'full_")]
)
def test_a_layer_that_takes_the_keys_of_one_that_is_left_out(layer, reason):
    """The last layer of this Gemma 4 takes keys and values from the first one."""
    types = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 1}
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40}
    config = transformers.Gemma4TextConfig(**SHAPE, **types, **inputs, num_key_value_heads=2, head_dim=8, global_head_dim=8)
    model, samples = of_config(config), texts()
    variants, heads = usual(samples)[:3], heads_of([layer], 2)
    found = measure_effects(model, samples, NextToken(), variants, heads)
    assert next(iter(found.record.values())).startswith(reason)
    assert_equal(found, one_by_one(model, samples, NextToken(), variants, heads))


def test_a_replay_that_is_wrong_is_refused_and_said():
    model, samples = Aside(sinklm()).eval(), texts()
    variants, heads = usual(samples)[:2], heads_of([1], 2)
    found = measure_effects(model, samples, NextToken(), variants, heads)
    (reason,) = found.record.values()
    assert reason.startswith("a replay without an edit is ")
    assert "units in the last place off the model, more than 32" in reason
    assert_equal(found, one_by_one(model, samples, NextToken(), variants, heads))


@pytest.mark.parametrize(("room", "stack", "batch_size"), [(0, 2**24, 3), (2**30, 0, 2), (2**30, 2**14, 1)])
def test_memory_bounds_change_nothing(monkeypatch, room, stack, batch_size):
    model, samples = sinklm(), texts()
    variants, heads = usual(samples)[:4], heads_of([0, 2])
    expected = measure_effects(model, samples, NextToken(), variants, heads)
    monkeypatch.setattr(engine, "ROOM", room)  # no room for the second call: the unedited model runs once a module
    monkeypatch.setattr(engine, "STACK", stack)
    found = measure_effects(model, samples, NextToken(), variants, heads, batch_size=batch_size)
    assert_equal(found, expected)
    assert found.record == expected.record == {"layers.0.self_attn": REPLAYED, "layers.2.self_attn": REPLAYED}


def forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module) or module._forward_hooks]


def test_the_model_is_left_as_it_was():
    model, samples = sinklm(), texts()
    before, hooked = model(**samples.inputs).logits, forwards(model)
    seen: list[tuple[str, int, int]] = []

    def stop(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))
        if done > 4:
            raise KeyboardInterrupt

    measure_effects(model, samples, NextToken(), usual(samples)[:1], heads_of([0]))
    with pytest.raises(KeyboardInterrupt):
        measure_effects(model, samples, NextToken(), usual(samples), heads_of([0, 1]), progress=stop)
    assert seen[0][0] == "effects"
    assert seen[0][2] == 8 * 8
    assert forwards(model) == hooked
    assert torch.equal(model(**samples.inputs).logits, before)


def test_errors():
    model, samples = sinklm(), texts()
    variants = usual(samples)
    with pytest.raises(ConfigurationError, match="module 3 did not run, so nothing of it was edited"):
        measure_effects(model, samples, NextToken(), variants, [Head(3, 0)])
    with pytest.raises(ConfigurationError, match=r"layers\.1\.self_attn has no head 4; expected 0 to 3"):
        measure_effects(model, samples, NextToken(), variants, heads_of([0, 1], 5)[5:])
    with pytest.raises(UnsupportedModelError, match="no null score"):
        measure_effects(model, samples, NextToken(), usual(samples, "null"), heads_of([0]))


@pytest.mark.parametrize("measure", [one_by_one, measure_effects])
def test_numbers_that_are_not_finite_are_refused(measure):
    model, samples = sinklm(), texts()
    burst = HeadEdit("burst", (Scaled(factor=3e38),))
    with pytest.raises(MeasurementError, match=r"the change of the loss under 'burst' on head 0\.1 is not finite at \d+ of "):
        measure(model, samples, NextToken(), [burst], heads_of([0])[1:2])
    with torch.no_grad():  # one token that is never a target: its logit alone makes every loss infinite or NaN
        model.lm_head.weight[0] = torch.inf
    with pytest.raises(
        MeasurementError, match=r"domain 'one': the loss of the unedited model is not finite at \d+ of 33 scored"
    ):
        measure(model, samples, NextToken(), usual(samples)[:1], heads_of([0])[:1])


def test_losses_of_texts_that_are_not_finite_are_refused():
    model, samples = sinklm(), texts()
    assert np.isfinite(text_losses(model, samples, NextToken())).all()
    with pytest.raises(MeasurementError, match=r"the loss under 'scaled' is not finite at \d+ of "):
        text_losses(model, samples, NextToken(), of_all(Scaled(factor=3e38, heads={0: (1,)})))
    with pytest.raises(MeasurementError, match="a thing: 1 of 2 texts change by infinity; run the model in float32"):
        change(np.array([np.inf, 1.0, np.nan]), np.array([1.0, 1.0, 1.0]), "a thing")


@pytest.mark.slow
@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.id)
def test_equals_the_oracle_on_every_family_of_the_zoo(entry):
    model, tokens = build(entry), texts().inputs["input_ids"]
    samples, readout = token_samples([("all", tokens)]), NextToken()
    outputs = model(**samples.inputs)
    if not hasattr(outputs, "logits"):
        zeros = torch.zeros_like(outputs.last_hidden_state)
        samples, readout = Samples(samples.inputs, torch.zeros_like(tokens), zeros), SquaredError()
    variants, heads = usual(samples)[:3], [Head(0, 0), *([Head(1, 1)] if entry.calls > 1 else [])]
    found = measure_effects(model, samples, readout, variants, heads)
    assert_equal(found, one_by_one(model, samples, readout, variants, heads))
    assert set(found.record.values()) == {REPLAYED}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gated"])
def test_changes_multiplied_in_bfloat16_err_by_a_share_of_the_change(name):
    """Also where a change is a thousandth of a head: rounded is what an edit changes, not what the model computes."""
    model, samples = DECODERS[name](), texts()
    heads = heads_of([0, 1])[:6]
    for edits in (usual(samples)[:4], [HeadEdit("scale", (Scaled(factor=1.001),))]):
        exact = one_by_one(model, samples, NextToken(), edits, heads)
        coarse = engine.Engine(model, samples, NextToken(), edits, coarse=True)
        found = coarse.measure(heads)
        assert set(found.record.values()) == {engine.COARSELY}
        np.testing.assert_allclose(found.clean_loss, exact.clean_loss, rtol=0, atol=TOLERANCE)
        there = np.isfinite(exact.loss)
        error, size = (np.sqrt(np.square(one[there]).mean()) for one in (found.loss - exact.loss, exact.loss))
        assert error < engine.COARSE * size + 1e-6


def test_changes_are_multiplied_exactly_where_rounding_errs_by_more(monkeypatch):
    monkeypatch.setattr(engine.Replay, "_weight", lambda replay, linear: -30 * linear.weight.bfloat16())
    model, samples, heads = DECODERS["gated"](), texts(), heads_of([0, 1])
    exact = one_by_one(model, samples, NextToken(), usual(samples), heads)
    found = engine.Engine(model, samples, NextToken(), usual(samples), coarse=True).measure(heads)
    assert set(found.record.values()) == {REPLAYED}
    assert_equal(found, exact)
