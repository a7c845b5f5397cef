"""Nearest point: hulls with known answers, a quadratic program solver on small cases, bounds that hold, and bad input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.errors import InputError, MeasurementError
from sinklab.studies.theory import nearest_point
from sinklab.studies.theory.nearest_point import nearest_to_origin


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


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
@settings(deadline=None)
def test_simplex(lengths):
    # Vertices on the axes at heights h: the plane Σ x_k / h_k = 1 is 1/√(Σ h_k⁻²) away.
    heights = torch.tensor(lengths, dtype=torch.float64)
    found = solve(torch.diag(heights))
    assert found.upper.item() == pytest.approx(heights.pow(-2).sum().item() ** -0.5, abs=1.1e-6 * max(lengths))


@given(st.integers(1, 6), st.integers(1, 10), st.integers(0, 2**31))
@settings(deadline=None)
def test_origin_inside(dim, extra, seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(dim + extra, dim, generator=generator, dtype=torch.float64)
    shares = torch.rand(dim + extra, generator=generator, dtype=torch.float64) + 0.05
    closing = -(shares @ points)[None] / 0.5
    found = solve(torch.cat((points, closing)))
    assert found.lower.item() == 0
    assert found.upper.item() <= 1e-6 * found.scale.item()


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


def test_blocks_do_not_matter(monkeypatch):
    vectors = torch.randn(3, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    members = torch.ones(12, 12, dtype=torch.bool).tril().repeat(3, 1, 1)
    whole = nearest_to_origin(vectors @ vectors.mT, members)
    monkeypatch.setattr(nearest_point, "_BLOCK_NUMBERS", 700)
    torch.testing.assert_close(nearest_to_origin(vectors @ vectors.mT, members).upper, whole.upper, rtol=0, atol=1e-3)


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
        (torch.ones(1, 3, 2), torch.ones(1, 1, 3).bool(), {}, r"gram has shape \(1, 3, 2\)"),
        (torch.ones(1, 3, 3), torch.ones(2, 1, 3).bool(), {}, r"members \(2, 1, 3\); expected \(groups, vertices, vertices\)"),
        (torch.full((1, 2, 2), float("nan")), torch.ones(1, 1, 2).bool(), {}, "not finite"),
        (torch.eye(2)[None], torch.ones(1, 1, 2).bool(), {"tolerance": 0.0}, "tolerance 0.0 must be at least 1e-6 of"),
    ],
)
def test_bad_input(gram, members, options, complaint):
    with pytest.raises(InputError, match=complaint):
        nearest_to_origin(gram, members, **options)
