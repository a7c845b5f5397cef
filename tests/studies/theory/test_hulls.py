"""Distances of convex hulls from 0 and the certificate made of them, against other solvers, fine grids and known hulls."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.errors import InputError, MeasurementError
from sinklab.studies.theory.hull_certificate import certify_hulls, nearest_to_origin
from sinklab.studies.theory.trigger_bounds import trigger_batch


def solve(vectors, tolerance=1e-6, **options):
    """The result for one hull of all vectors ``(count, dim)``, checked for what every result promises."""
    vectors = torch.as_tensor(vectors, dtype=torch.float64)
    members = torch.ones(1, 1, len(vectors), dtype=torch.bool)
    found = nearest_to_origin((vectors @ vectors.T)[None], members, tolerance=tolerance, **options)
    weights = found.weights[0, 0]
    assert (weights >= 0).all()
    assert weights.sum().item() == pytest.approx(1, abs=1e-12)
    scale = vectors.norm(dim=-1).max().item()
    assert found.scale.item() == pytest.approx(scale)
    # |y| from a Gram matrix has the root of the rounding error of |y|²: √(42 · 2.2e-16) for 40 vectors.
    norm = (weights @ vectors).norm().item()
    assert norm * (1 - 1e-12) <= found.upper.item() <= norm + 1e-7 * scale
    assert 0 <= found.lower.item() <= found.upper.item() <= found.lower.item() + tolerance * scale
    return found


def by_enumeration(vectors):
    """Distance by the definition: over all faces, the nearest point of the affine hull where its weights are not negative."""
    count = len(vectors)
    best = float("inf")
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = vectors[list(chosen)]
            system = np.block([[part @ part.T, np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
            weights = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0][:size]
            if (weights >= -1e-9).all() and abs(weights.sum() - 1) < 1e-6:
                best = min(best, np.linalg.norm(weights @ part))
    return best


@given(st.integers(1, 6), st.integers(1, 5), st.floats(-2, 2), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_against_all_faces(count, dim, shift, seed):
    vectors = np.random.default_rng(seed).normal(size=(count, dim)) + shift
    found = solve(vectors)
    assert found.upper.item() == pytest.approx(by_enumeration(vectors), abs=1.1e-6 * found.scale.item())


@pytest.mark.parametrize("kind", ["nearly flat", "repeated", "a cluster far away", "many lengths", "whole numbers", "wide"])
@pytest.mark.parametrize(("count", "dim"), [(3, 1), (17, 4), (64, 3), (64, 32), (150, 8)])
def test_hulls_on_which_iterations_stall(kind, count, dim):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(8, *shape, generator=generator, dtype=torch.float64)

    vectors = normal(count, dim)
    if kind == "nearly flat":
        vectors = normal(count, 2) @ normal(2, dim) + 1e-4 * vectors + 0.2
    elif kind == "repeated":
        vectors = vectors[:, torch.randint(count, (count,), generator=generator)]
    elif kind == "a cluster far away":
        vectors = vectors[:, :1] + 1e-6 * vectors
    elif kind == "many lengths":
        vectors = vectors * torch.exp(4 * normal(count, 1))
    elif kind == "whole numbers":
        vectors = vectors.round()
    members = torch.rand(8, 10, count, generator=generator) < 0.7
    members[..., 0] = True
    found = nearest_to_origin(vectors @ vectors.mT, members, tolerance=1e-6, max_rounds=200)
    assert (found.upper - found.lower <= 1e-6 * found.scale).all()
    norms = (found.weights @ vectors).norm(dim=-1)
    assert (norms <= found.upper * (1 + 1e-12)).all()
    # Where there is a plane, no member lies on this side of it.
    point = found.weights @ vectors
    along = (vectors @ point.mT).mT.masked_fill(~members, float("inf")).amin(-1)
    assert (along >= found.lower * norms - 1e-12 * found.scale**2)[found.lower > 0].all()


@pytest.mark.parametrize(
    ("vectors", "distance"),
    [
        ([[3.0, 4.0]], 5.0),
        ([[0.0, 0.0], [3.0, 4.0]], 0.0),
        ([[0.0, 0.0], [0.0, 0.0]], 0.0),
        ([[3.0, 4.0]] * 7, 5.0),
        ([[1.0, 0.0], [-1.0, 0.0]], 0.0),
        ([[1.0, 1.0], [-1.0, 1.0], [0.0, 1.0], [0.0, 2.0]], 1.0),
        ([[1e-8, 1e8], [-1e-8, 1e8]], 1e8),
        ([[1e-150, 0.0], [0.0, 1e-150]], 1e-150 / 2**0.5),
    ],
    ids=["one", "origin", "all-zero", "copies", "segment", "face-in-a-plane", "long-and-thin", "tiny"],
)
def test_special_hulls(vectors, distance):
    found = solve(vectors)
    assert found.upper.item() == pytest.approx(distance, rel=1e-9, abs=1e-6 * found.scale.item())


def test_hulls_of_a_group_share_vertices_and_empty_ones_have_no_distance():
    vectors = torch.randn(2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    members = torch.ones(9, 9, dtype=torch.bool).tril().repeat(2, 1, 1)
    members[0, 4] = False
    found = nearest_to_origin(vectors @ vectors.mT, members, tolerance=1e-6)
    assert (found.weights[~members] == 0).all()
    for group, hull in itertools.product(range(2), range(9)):
        if (group, hull) == (0, 4):
            assert found.upper[group, hull] == found.lower[group, hull] == float("inf")
            continue
        alone = solve(vectors[group, : hull + 1])
        assert found.upper[group, hull].item() == pytest.approx(alone.upper.item(), abs=1e-6 * alone.scale.item())


@given(st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_pulled_hulls_are_hulls_of_pulled_vertices(share, seed):
    vectors = torch.randn(2, 10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
    members = torch.ones(2, 3, 10, dtype=torch.bool)
    anchors = torch.tensor([[0, 3, 9], [1, 1, 5]])
    members.scatter_(2, anchors[..., None], False)
    found = nearest_to_origin(vectors @ vectors.mT, members, pull=(anchors, torch.full((2, 3), share)), tolerance=1e-6)
    for group, hull in itertools.product(range(2), range(3)):
        anchor = vectors[group, anchors[group, hull]]
        pulled = share * anchor + (1 - share) * vectors[group][members[group, hull]]
        assert found.upper[group, hull].item() == pytest.approx(
            solve(pulled).upper.item(), abs=2e-6 * found.scale[group, hull].item()
        )


def test_start_is_taken_and_its_own_bounds_hold_at_once():
    vectors = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1
    found = solve(vectors)
    again = solve(vectors, start=found.weights, max_rounds=0)
    assert again.upper.item() == pytest.approx(found.upper.item(), rel=1e-12)
    with pytest.raises(MeasurementError, match=r"1 of 1 hulls, of up to 8 vectors, have .* known only to .* after 0 rounds"):
        solve(vectors, start=torch.full((1, 1, 8), 0.125), max_rounds=0)


@pytest.mark.parametrize(
    ("gram", "members", "options", "complaint"),
    [
        (torch.full((1, 2, 2), float("nan")), torch.ones(1, 1, 2).bool(), {}, "not finite"),
        (torch.eye(2)[None], torch.ones(1, 1, 2).bool(), {"tolerance": 0.0}, "tolerance 0.0 must be at least 1e-6 of"),
    ],
)
def test_bad_input(gram, members, options, complaint):
    with pytest.raises(InputError, match=complaint):
        nearest_to_origin(gram, members, **options)


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


def test_a_sink_of_free_value_needs_what_the_best_value_needs():
    # Content at height 1. A value of norm 2 straight below leaves |1 - a - 2a|, so 0.25 takes (1 - 0.25) / (1 + 2) = 1/4.
    others = [[0.0, 1.0], [5.0, 1.0]]
    for radius in (0.0, 2.0):
        best = certify([*others, [0.0, -radius]], sink=2, delta=0.25)
        assert best.needed_lower.item() == near(0.75 / (1 + radius))
        worse = certify([*others, [radius, 0.0]], sink=2, delta=0.25)
        assert radius == 0 or worse.needed_lower > best.needed_lower + 0.1


def test_a_head_that_needs_no_sink():
    found = certify([[0.1, 0.0], [1.0, 0.0], [-1.0, 0.0]], delta=0.2)
    assert found.gap.item() == near(0.0)
    assert (found.needed_lower.item(), found.needed_upper.item()) == (0.0, 0.0)


def test_a_head_that_cannot_be_silent_at_all():
    found = certify([[0.0, 1.0], [1.0, 2.0], [-1.0, 2.0]], delta=0.5)
    assert found.with_lower.item() == near(1.0)
    assert found.without_lower.item() == near(2.0)
    assert found.needed_lower.item() == found.needed_upper.item() == float("inf")


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
