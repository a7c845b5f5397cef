"""Hull certificate: hands-on cases in the plane, the needed weight against a fine grid, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from sinklab.errors import InputError
from sinklab.studies.theory.hull_certificate import certify_hulls
from sinklab.studies.theory.nearest_point import nearest_to_origin
from sinklab.studies.theory.trigger_task import trigger_batch

TIGHT = 1e-6


def certify(vectors, sink=0, delta=None, tolerance=TIGHT):
    vectors = torch.as_tensor(vectors, dtype=torch.float64)
    visible = torch.ones(1, 1, len(vectors), dtype=torch.bool)
    return certify_hulls((vectors @ vectors.T)[None], visible, sink, delta=delta, tolerance=tolerance)


def near(value, **options):
    return pytest.approx(value, abs=1e-5, **options)


def test_a_head_that_needs_its_sink():
    # Content at height 1; the sink writes nothing. Weight a leaves 1 - a.
    found = certify([[0.0, 0.0], [1.0, 1.0], [-1.0, 1.0], [3.0, 1.0]], delta=0.25)
    assert found.with_upper.item() == near(0.0)
    assert found.without_upper.item() == near(1.0)
    assert found.gap.item() == near(1.0)
    assert found.chosen_weight.item() == near(1.0)
    assert found.sink_norm.item() == 0.0
    assert found.needed_lower.item() == near(0.75)
    assert found.needed_upper.item() == near(0.75)


def test_a_sink_that_pulls_below_zero():
    # Sink at height -1: weight a gives 1 - 2a, so that 1/2 makes it 0 and (1 - δ)/2 makes it δ.
    found = certify([[0.0, 1.0], [5.0, 1.0], [0.0, -1.0]], sink=2, delta=0.5)
    assert found.with_upper.item() == near(0.0)
    assert found.chosen_weight.item() == near(0.5)
    assert (found.needed_lower.item(), found.needed_upper.item()) == (near(0.25), near(0.25))


def test_a_head_that_needs_no_sink():
    found = certify([[0.1, 0.0], [1.0, 0.0], [-1.0, 0.0]], delta=0.2)
    assert found.gap.item() == near(0.0)
    assert (found.needed_lower.item(), found.needed_upper.item()) == (0.0, 0.0)


def test_a_head_that_cannot_be_silent_at_all():
    found = certify([[0.0, 1.0], [1.0, 2.0], [-1.0, 2.0]], delta=0.5)
    assert found.with_lower.item() == near(1.0)
    assert found.without_lower.item() == near(2.0)
    assert found.needed_lower.item() == found.needed_upper.item() == float("inf")


def test_a_sink_of_no_use():
    # It lies farther out than the others: no weight on it helps.
    found = certify([[0.0, 3.0], [1.0, 1.0], [-1.0, 1.0]], delta=0.5)
    assert found.gap.item() == near(0.0)
    assert found.chosen_weight.item() == near(0.0)
    assert found.needed_lower.item() == float("inf")


def test_no_output_at_all_needs_all_the_weight():
    found = certify([[0.0, 0.0], [1.0, 1.0], [-1.0, 1.0]], delta=0.0)
    assert found.needed_lower.item() == near(1.0)


def least_at(vectors, sink, weight):
    """D(a) by the solver, of hulls whose vertices were pulled by hand."""
    others = torch.cat((vectors[:sink], vectors[sink + 1 :]))
    pulled = weight * vectors[sink] + (1 - weight) * others
    members = torch.ones(1, 1, len(pulled), dtype=torch.bool)
    return nearest_to_origin((pulled @ pulled.T)[None], members, tolerance=TIGHT).upper.item()


@given(st.integers(2, 9), st.integers(1, 6), st.floats(0, 1.5), st.floats(0.02, 0.98), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_needed_weight_against_the_definition(count, dim, shift, where, seed):
    vectors = torch.as_tensor(np.random.default_rng(seed).normal(size=(count, dim)) + shift)
    vectors[0] *= 0.1
    plain = certify(vectors)
    least, most = plain.with_upper.item(), plain.without_upper.item()
    if most - least < 1e-3:
        return
    delta = least + where * (most - least)
    found = certify(vectors, delta=delta)
    lower, upper = found.needed_lower.item(), found.needed_upper.item()
    assert 0 <= lower <= upper <= plain.chosen_weight.item() + 1e-9
    scale = plain.scale.item()
    # Up to the tolerances of two solves: not enough on the left, enough on the right.
    assert least_at(vectors, 0, max(lower - 1e-9, 0)) >= delta - 4 * TIGHT * scale
    assert least_at(vectors, 0, upper) <= delta + 4 * TIGHT * scale
    # The bracket is as narrow as the tolerance of the norm and the slope at the end allow.
    slope = (most - delta) / max(upper, 1e-9)
    if (delta - least) > 0.05 * (most - least):
        assert upper - lower <= 1e-4 + 1e-4 * scale / slope


def test_the_least_output_is_convex_and_its_minimum_is_the_whole_hull():
    vectors = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 1
    vectors[0] *= 0.1
    found = certify(vectors)
    best = minimize_scalar(
        lambda weight: least_at(vectors, 0, weight), bounds=(0, 1), method="bounded", options={"xatol": 1e-9}
    )
    assert found.with_upper.item() == pytest.approx(best.fun, abs=1e-5)


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_coarse_bounds_enclose_the_tight_ones(seed):
    vectors = torch.as_tensor(np.random.default_rng(seed).normal(size=(20, 6)) + 0.7)
    vectors[0] *= 0.05
    delta = 0.5 * certify(vectors).without_upper.item() + 0.5 * certify(vectors).with_upper.item()
    tight, coarse = certify(vectors, delta=delta), certify(vectors, delta=delta, tolerance=0.05)
    room = 1e-4
    for which in ("with", "without"):
        assert getattr(coarse, f"{which}_lower") <= getattr(tight, f"{which}_upper") + room
        assert getattr(coarse, f"{which}_upper") >= getattr(tight, f"{which}_lower") - room
    assert coarse.needed_lower <= tight.needed_upper + room
    assert coarse.needed_upper >= tight.needed_lower - room


def test_the_trigger_task_needs_its_sink():
    # Two coordinates of every token but BOS add up to 1: no mixture is shorter than 1/√2, and δ leaves √2 δ off BOS.
    drawn = trigger_batch(4, 16, 16, torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = drawn.inputs.clone()
    tokens[:, 0] = 0  # the value of BOS in a model that has solved the task
    visible = torch.ones(16, 16, dtype=torch.bool).tril().repeat(4, 1, 1)
    asked = torch.arange(16).expand(4, 16) > 0
    for delta in (0.0, 0.1, 0.5):
        found = certify_hulls(tokens @ tokens.mT, visible, 0, delta=delta, tolerance=TIGHT, asked=asked)
        assert (found.without_lower >= 0.5**0.5 - 1e-5)[asked].all()
        assert (found.with_upper <= 1e-5)[asked].all()
        assert (found.needed_lower >= 1 - 2**0.5 * delta - 1e-5)[asked].all()


def test_many_heads_and_queries_at_once_are_those_alone():
    vectors = torch.randn(3, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.4
    vectors[:, 0] *= 0.1
    visible = torch.ones(8, 8, dtype=torch.bool).tril().repeat(3, 1, 1)
    asked = torch.ones(3, 8, dtype=torch.bool)
    asked[:, 0] = False  # sees the sink alone
    found = certify_hulls(vectors @ vectors.mT, visible, 0, delta=0.3, tolerance=TIGHT, asked=asked)
    assert torch.equal(found.counted, asked)
    for head in range(3):
        for query in range(1, 8):
            alone = certify(vectors[head, : query + 1], delta=0.3)
            for name in ("with_upper", "without_lower", "needed_lower", "needed_upper"):
                ours, theirs = getattr(found, name)[head, query].item(), getattr(alone, name).item()
                assert ours == pytest.approx(theirs, abs=1e-4 if name.startswith("needed") else 1e-5), (name, head, query)


TRIANGLE = torch.ones(3, 3, dtype=torch.bool).tril()[None]
EYE = torch.eye(3)[None]


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        ((EYE, TRIANGLE, 0), {}, "query 0 of head 0 sees 1 keys; .* needs at least two"),
        ((EYE, TRIANGLE[:, 1:], 2), {}, "query 0 of head 0 does not see its sink, key 2"),
        ((EYE, TRIANGLE[:, 1:], 3), {}, "sink 3 is not the index of a key; there are 3"),
        ((EYE, TRIANGLE[:, 1:], 0), {"delta": -0.5}, "delta -0.5 must be at least 0"),
        ((EYE, TRIANGLE[:, 1:], 0), {"delta": float("nan")}, "delta nan must be at least 0"),
        ((EYE * float("inf"), TRIANGLE[:, 1:], 0), {}, "not finite"),
    ],
)
def test_bad_input(arguments, options, complaint):
    with pytest.raises(InputError, match=complaint):
        certify_hulls(*arguments, **options)
