"""The trigger task and its bound: the task token by token, counters, constructions, and what a search cannot beat."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.errors import ConfigurationError
from sinklab.studies.theory.trigger_bounds import (
    TriggerHeads,
    cancelling_solution,
    counter_of,
    least_bos_weight_by_error,
    relu_solution,
    softmax_solution,
    trigger_batch,
)


def draw(batch=64, length=7, width=6, seed=0, **options):
    return trigger_batch(batch, length, width, torch.Generator().manual_seed(seed), dtype=torch.float64, **options)


@given(
    st.integers(1, 9), st.integers(4, 12), st.integers(4, 12), st.sampled_from(["including", "preceding"]), st.integers(0, 999)
)
@settings(max_examples=60, deadline=None)
def test_layout_and_targets_token_by_token(batch, length, width, target, seed):
    drawn = draw(batch, length, width, seed, target=target)
    for row in range(batch):
        tokens, j = drawn.inputs[row], int(drawn.positions[row])
        assert 2 <= j < length
        for index in range(length):
            marks = [float(tokens[index, coordinate]) for coordinate in (0, 1, width - 1)]
            assert marks == ([1, 0, 0] if index == 0 else [0, 1, 0] if index == j else [0, 0, 1])
            middle = tokens[index, 2 : width - 1]
            assert (middle == 0).all() if index == 0 else ((middle.abs() < 1) & (middle != 0)).all()
            expected = torch.zeros(width, dtype=torch.float64)
            if index == j:
                expected = tokens[1 : j + 1 if target == "including" else j].mean(0)
            torch.testing.assert_close(drawn.targets[row, index], expected, rtol=0, atol=1e-12)
    assert drawn.is_trigger.sum().item() == batch
    assert (drawn.is_trigger.int().argmax(1) == drawn.positions).all()


LENGTH, WIDTH = 16, 16
# Everything is float64; counters of ill-conditioned maps lose some digits.
ROUNDING = 1e-9


def batch_of(size=256, position=None, target="including", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return trigger_batch(size, LENGTH, WIDTH, generator, position, target, dtype=torch.float64)


def random_head(seed, *, size=1.0, value=None):
    generator = torch.Generator().manual_seed(seed)
    maps = [size * torch.randn(1, WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4)]
    if value is not None:
        maps[2], maps[3] = value[None], torch.eye(WIDTH, dtype=torch.float64)[None]
    return TriggerHeads(*maps)


# --- the bound ---


@given(st.integers(0, 2**31), st.floats(0.01, 3))
@settings(max_examples=40, deadline=None)
def test_bound_of_any_invertible_map(seed, size):
    head = random_head(seed, size=size)
    outputs, weights = head(batch_of(16).inputs)
    counter = counter_of(head.output[0] @ head.value[0])
    if counter.slack > 1e-6:  # a singular draw
        return
    # What the functional counts is what the query does not give to BOS, and what BOS counts for: t = a b + 1 - a.
    counts, on_bos = outputs @ counter.functional, weights[:, 0, 1:, 0]
    expected = on_bos * counts[:, :1] + 1 - on_bos
    torch.testing.assert_close(counts[:, 1:], expected, rtol=0, atol=counter.slack + 1e-8 * (1 + counts.abs().max().item()))
    at_bos = outputs[:, 0].abs().max().item()
    for weight, error in zip(on_bos.flatten().tolist(), outputs[:, 1:].abs().amax(-1).flatten().tolist(), strict=True):
        assert weight >= counter.least_bos_weight(error, at_bos) - 1e-6


@given(st.integers(0, 2**31), st.floats(0.0, 0.4))
@settings(max_examples=60, deadline=None)
def test_bound_of_a_map_with_slack(seed, noise):
    generator = torch.Generator().manual_seed(seed)
    value = torch.eye(WIDTH, dtype=torch.float64)
    value[2:] = 0  # rank 2 and some noise of rank 1, with which no functional counts exactly
    column, row = (torch.randn(WIDTH, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    value = value + noise * column / column.norm() @ row.T / row.norm()
    value[-1] = torch.eye(WIDTH, dtype=torch.float64)[-1] + 0.05 * noise * row[:, 0]
    head = random_head(seed, size=2.0, value=value)
    outputs, weights = head(batch_of(32).inputs)
    counter = counter_of(value)
    on_bos = weights[:, 0, 1:, 0]
    at_bos = outputs[:, 0].abs().max().item()
    for weight, error in zip(on_bos.flatten().tolist(), outputs[:, 1:].abs().amax(-1).flatten().tolist(), strict=True):
        assert weight >= counter.least_bos_weight(error, at_bos) - ROUNDING
        assert weight >= counter.least_bos_weight(max(error, at_bos)) - ROUNDING


def test_gradient_search_for_a_violation():
    # Scores, and a value map that keeps the count, are moved to make BOS's weight small and the output small at once.
    torch.manual_seed(0)
    inputs = batch_of(64, seed=3).inputs
    maps = [torch.nn.Parameter(0.3 * torch.randn(1, WIDTH, WIDTH, dtype=torch.float64)) for _ in range(3)]
    eye = torch.eye(WIDTH, dtype=torch.float64)
    optimizer = torch.optim.Adam(maps, lr=0.05)
    worst = float("inf")
    for step in range(150):
        free = maps[2][0].clone()
        free[-1] = eye[1] + eye[-1] - free[1]  # rows 1 and n-1 add up to the counting functional
        outputs, weights = TriggerHeads(maps[0], maps[1], free[None], eye[None])(inputs)
        margin = weights[:, 0, 1:, 0] - (1 - 2 * outputs[:, 1:, [1, -1]].abs().amax(-1))
        worst = min(worst, margin.min().item())
        optimizer.zero_grad()
        (margin.mean() + margin.min() + 0.02 * step / 150 * outputs.square().sum(-1).mean()).backward()
        optimizer.step()
    assert worst >= -ROUNDING
    assert worst < 1e-2  # the search came close: the bound is tight


def test_the_constants_of_the_bound_by_error():
    """Of functionals u of the two coordinates that triggers fix: most |u|₁ for what they show, and least for |u| = 1."""
    angles, places = torch.linspace(0, math.pi, 400_001, dtype=torch.float64), torch.arange(2.0, LENGTH).double()
    functionals = torch.stack((angles.cos(), angles.sin()), -1)
    shown = (functionals @ torch.stack((1 / places, 1 - 1 / places))).abs().amax(-1)
    assert (functionals.abs().sum(-1) / shown).max().item() == pytest.approx(60 / 13, rel=1e-5)
    assert shown.min().item() == pytest.approx(0.28116, abs=1e-5)  # by which the bound in Euclidean norms is weaker
    for error, least, euclidean in ((5e-3, 0.954, 0.405), (1e-3, 0.991, 0.860), (1e-4, 0.9991, 0.985)):
        delta = math.sqrt(420) * error / (shown.min().item() - 2 * math.sqrt(15) * error)
        assert (1 - delta) / (1 + delta) == pytest.approx(euclidean, abs=1e-3)
        assert least_bos_weight_by_error(error, LENGTH) == pytest.approx(least, abs=5e-4)
    assert least_bos_weight_by_error(0.2, LENGTH) == 0
    for wrong in ((-1.0, 16), (0.1, 3)):
        with pytest.raises(ConfigurationError, match="at least 4"):
            least_bos_weight_by_error(*wrong)


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-3])
def test_the_bound_by_error_holds_for_maps_near_a_solution(noise):
    batch, generator, solution = batch_of(2000), torch.Generator().manual_seed(0), softmax_solution(WIDTH, LENGTH, 2e-3)
    for _ in range(20):
        maps = [getattr(solution, name) for name in ("query", "key", "value", "output")]
        moved = [of + noise * torch.randn(of.shape, generator=generator, dtype=torch.float64) for of in maps]
        outputs, weights = TriggerHeads(*moved)(batch.inputs)
        bound = least_bos_weight_by_error((outputs - batch.targets).abs().max().item(), LENGTH)
        assert weights[:, 0, :, 0][~batch.is_trigger].min() >= bound > (0.0 if noise else 0.98)


def test_counter_of_the_identity_is_the_published_one():
    counter = counter_of(torch.eye(WIDTH))
    expected = torch.zeros(WIDTH, dtype=torch.float64)
    expected[1] = expected[-1] = 1
    torch.testing.assert_close(counter.functional, expected, rtol=0, atol=1e-14)
    assert counter.norm == pytest.approx(2)
    assert counter.slack == pytest.approx(0, abs=1e-14)
    assert counter.least_bos_weight(0.1, 0.0) == pytest.approx(0.8)
    assert counter.least_bos_weight(0.7, 0.0) == 0


def test_a_map_that_loses_the_count_says_nothing():
    value = torch.eye(WIDTH)
    value[1, 1] = value[-1, -1] = 0
    counter = counter_of(value)
    assert counter.slack >= 1
    assert counter.least_bos_weight(0.0) == 0


# --- constructions ---


@pytest.mark.parametrize("position", [None, 2, 7, LENGTH - 1])
def test_relu_solves_the_task_exactly_without_bos(position):
    batch = batch_of(position=position)
    outputs, weights = relu_solution(WIDTH)(batch.inputs)
    assert (outputs - batch.targets).abs().max() < 1e-15
    assert (weights[..., 0] == 0).all()
    assert (weights[:, 0][~batch.is_trigger] == 0).all()


@pytest.mark.parametrize("target", ["including", "preceding"])
@pytest.mark.parametrize("error", [0.3, 1e-2, 1e-6])
def test_softmax_solves_the_task_to_any_error_with_a_sink(error, target):
    batch = batch_of(2000, target=target)
    outputs, weights = softmax_solution(WIDTH, LENGTH, error, target)(batch.inputs)
    errors = (outputs - batch.targets).abs()
    assert errors.max() <= error * (1 + 1e-9)
    on_bos = weights[:, 0, :, 0][~batch.is_trigger]
    assert on_bos.min() >= 1 - error - 1e-12
    # The sink that it has is the sink that it needs, up to the factor 2 of the two counting coordinates.
    assert on_bos.min() >= 1 - 2 * errors[~batch.is_trigger].max().item() - 1e-12
    if target == "including":
        assert on_bos.min() == pytest.approx(1 - error, abs=1e-9)


def test_two_heads_solve_the_task_without_a_sink_off_the_trigger():
    batch = batch_of(2000)
    outputs, weights = cancelling_solution(WIDTH, LENGTH, 1e-6)(batch.inputs)
    assert (outputs - batch.targets).abs().max() <= 1e-6
    assert (outputs[~batch.is_trigger] == 0).all()
    uniform = 1 / torch.arange(1, LENGTH + 1, dtype=torch.float64)
    for head in range(2):
        on_bos = weights[:, head, :, 0]
        torch.testing.assert_close(on_bos[~batch.is_trigger], uniform.expand_as(on_bos)[~batch.is_trigger], rtol=0, atol=1e-15)
    # … and some head sinks at some query all the same: the second at the trigger.
    assert weights[:, 1, :, 0][batch.is_trigger].min() > 1 - 1e-6
    # Head by head the bound is right: what each writes is large where it does not sink.
    first = dataclasses.replace(cancelling_solution(WIDTH, LENGTH, 1e-6), output=torch.zeros(2, WIDTH, WIDTH).double())
    first.output[0] = torch.eye(WIDTH)
    alone, _ = first(batch.inputs)
    torch.testing.assert_close(alone[..., 1] + alone[..., -1], 1 - weights[:, 0, :, 0], rtol=0, atol=1e-12)


def test_eight_heads_solve_the_task_and_none_sinks_anywhere():
    """Even weights off the trigger, j/(j + b) on what is averaged at it: of eight b up to 2 a sum is 1 for all j, to 0.002."""
    odds = torch.tensor([0.0, 0.05, 0.15, 0.35, 0.65, 1.0, 1.5, 2.0], dtype=torch.float64)  # of BOS to another token
    places = torch.arange(2, LENGTH, dtype=torch.float64)
    kept = torch.linalg.lstsq(
        -odds[1:] / (places[:, None] + odds[1:]), torch.ones(LENGTH - 2, 1).double(), driver="gelsd"
    ).solution
    signs = torch.cat((-kept.sum()[None], kept[:, 0]))  # which sum to 0, so that even weights cancel
    heads, eye = len(odds), torch.eye(WIDTH, dtype=torch.float64)
    query, key, value = (torch.zeros(heads, WIDTH, WIDTH).double() for _ in range(3))
    query[:, 0, 1] = 1
    key[:, 0, 1] = key[:, 0, -1] = -odds.clamp(min=1e-18).log()
    value[:, 1:, 1:] = eye[1:, 1:]
    batch = batch_of(500)
    outputs, weights = TriggerHeads(query, key, value, signs[:, None, None] * eye)(batch.inputs)
    assert (outputs - batch.targets).abs().max() < 5e-3  # the paper's tolerance
    assert weights[:, :, 1:, 0].max() <= 0.5 + 1e-12


def test_reference_forward_by_hand():
    # One head with zero scores: uniform weights, so the output is a running mean.
    zero, eye = torch.zeros(1, WIDTH, WIDTH).double(), torch.eye(WIDTH).double()[None]
    inputs = batch_of(3).inputs
    outputs, weights = TriggerHeads(zero, zero, eye, 2 * eye)(inputs)
    counts = torch.arange(1, LENGTH + 1).double()
    torch.testing.assert_close(outputs, 2 * inputs.cumsum(1) / counts[:, None])
    torch.testing.assert_close(weights[0, 0], torch.ones(LENGTH, LENGTH).double().tril() / counts[:, None])
