"""Simulated quantisation: the error that a uniform grid must have, what an outlier does to it, and what is left alone."""

from __future__ import annotations

import copy

import pytest
import torch

from sinklab.errors import UnsupportedModelError
from sinklab_claims.numbers.losses import calibration_batches, int8, quantization_gap
from sinklab_claims.numbers.quantized import activation_grid, quantized, weight_grid


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_a_gaussian_has_the_error_of_a_uniform_grid(bits):
    torch.manual_seed(0)
    weights = torch.randn(1000, 1000)
    error = weight_grid(weights, bits)(weights) - weights
    step = weights.abs().max().item() / (2 ** (bits - 1) - 1)
    # Rounding to a grid much finer than the density leaves errors uniform over a step: variance step²/12. The mean square of a
    # million of them scatters by sqrt(4/5) / 1000, below 0.1 %; at 4 bits the step is 0.7 standard deviations, where the
    # corrections, of order exp(-2 π² / step²), are still below rounding.
    assert error.square().mean().item() == pytest.approx(step**2 / 12, rel=5e-3)
    # An index of up to 2048 in float32 is off by up to 2e-4.
    assert error.abs().max().item() <= step / 2 * (1 + 1e-3)
    assert len(weight_grid(weights, bits)(weights).unique()) <= 2**bits - 1


def test_ranges_of_activations_are_running_and_hold_zero():
    grid = activation_grid(8)
    for low, high in ((-1.0, 2.0), (-3.0, 10.0), (-1.0, 0.5)):
        grid(torch.tensor([low, high]))
    # Minimum: -1, then 0.9·(-1) + 0.1·(-3) = -1.2, then -1.18; maximum: 2, 2.8, 2.57.
    low, high = -1.18, 2.57
    assert grid.grid.scale.item() == pytest.approx((high - low) / 255)
    grid.observing = False
    found = grid(torch.tensor([-50.0, 0.0, 50.0]))
    assert found[1] == 0
    # The ends are within a step of the range, since 0 lies on the grid.
    assert found[[0, 2]].tolist() == pytest.approx([low, high], abs=(high - low) / 255)


def test_sixteen_bits_lose_nothing_and_two_lose_much(random_model):
    trained = random_model()
    before, after = quantization_gap(trained, weight_bits=16, activation_bits=16)
    # Steps of 3e-5 of the range: errors of the logits of that order, and their mean over 1,500 tokens below.
    assert after == pytest.approx(before, abs=1e-3)
    assert abs(quantization_gap(trained, weight_bits=2, activation_bits=2)[1] - before) > 0.01


def test_an_outlier_breaks_eight_bits_and_not_sixteen(trained):
    """A massive activation on the first token, as trained models have: a single 1000, and the range of all tokens is its."""
    clean = int8(trained)["int8_gap"]
    planted = copy.copy(trained)
    vars(planted)["loaded"] = copy.copy(trained.loaded)
    model = copy.deepcopy(trained.loaded.model)
    object.__setattr__(vars(planted)["loaded"], "model", model)
    with torch.no_grad():
        model.position.table[0, 5] = 1000.0
    broken = int8(planted)
    fine = quantization_gap(planted, weight_bits=16, activation_bits=16)
    assert abs(clean) < 0.02
    assert broken["int8_gap"] > clean + 0.2
    assert abs(fine[1] - fine[0]) < 0.02


def test_which_tensors_lie_on_grids(random_model):
    trained = random_model()
    model = trained.loaded.model
    coarse = quantized(model, calibration_batches(trained), weight_bits=3, activation_bits=4)
    for name, weight in coarse.named_parameters():
        plain = dict(model.named_parameters())[name]
        if "proj" in name:
            assert len(weight.unique()) <= 7, name
        else:  # norms, the embedding table, which is the head's too
            assert torch.equal(weight, plain), name
    seen: dict[str, int] = {}

    def watch(name):
        def hook(module, args, kwargs, output):
            given = args[0] if args else kwargs["hidden_states"]
            if given.is_floating_point():
                seen[f"into {name}"] = len(given.unique())
            seen[f"out of {name}"] = len((output[0] if isinstance(output, tuple) else output).unique())

        return hook

    for name, module in coarse.named_modules():
        if name.endswith(("_proj", "lm_head", "norm", "embed_tokens")) or name in ("layers.0", "layers.1"):
            module.register_forward_hook(watch(name), with_kwargs=True)
    with torch.no_grad():
        coarse(input_ids=trained.data.held_out[:4], use_cache=False)
    in_float = {name for name, values in seen.items() if values > 16}
    # Outputs of norms are put on a grid by those who read them.
    norms = {f"out of {name}" for name, module in coarse.named_modules() if name.endswith("norm")}
    assert in_float == norms | {"out of lm_head"}
    assert any("o_proj" in name for name in seen)


def test_refusals(random_model):
    trained = random_model()
    model, rows = trained.loaded.model, trained.data.held_out[:2]

    class Adapted(torch.nn.Linear):
        pass

    adapted = copy.deepcopy(model)
    adapted.layers[0].mlp.up_proj = Adapted(32, 48, bias=False)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.up_proj is a Adapted, not a plain nn\.Linear"):
        quantized(adapted, [rows])
