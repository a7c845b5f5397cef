"""Operations that turn a row of scores into weights: each on three tokens by hand, and the identities that it has."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sinklab.operations.clipped_softmax import ClippedSoftmax
from sinklab.operations.elu import Elu
from sinklab.operations.p_normalized import PNormalized
from sinklab.operations.relu import Relu
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.operations.softpick import Softpick

# --- softmax -----------------------------------------------------------------------------------------------------------------


def test_a_row_that_sees_nothing_gives_nothing():
    weights = Softmax().weights(torch.randn(1, 1, 2, 3), torch.tensor([[True, True, False], [False, False, False]]))
    assert torch.equal(weights[0, 0, 1], torch.zeros(3))
    assert weights[0, 0, 0, 2] == 0.0


def test_a_null_score_of_minus_infinity_is_no_null_score():
    """In a row that sees nothing, too: there is no mass to give, and no NaN forward or backward."""
    scores = torch.randn(1, 1, 3, 3, requires_grad=True)
    visible = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    null = torch.full((1, 1, 3), -math.inf)
    weights = Softmax().weights(scores, visible, null)
    torch.testing.assert_close(weights, Softmax().weights(scores, visible))
    weights[..., 0].sum().backward()
    assert bool(torch.isfinite(scores.grad).all())
    assert Softmax().null_mass(scores.detach(), visible, null).eq(0.0).all()
    assert Softmax().null_mass(scores.detach(), visible, torch.zeros(1, 1, 3))[0, 0, 1] == 1.0


# --- softmax_plus_one --------------------------------------------------------------------------------------------------------
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()


def null_scores(heads: int = 1) -> torch.Tensor:
    return SoftmaxPlusOne().null_scores(torch.zeros(1, heads, 3, 4), 0.5, {})


def test_it_is_softmax_over_one_more_key_of_zeros():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    outputs, weights = SoftmaxPlusOne().head_outputs(queries, keys, values, None, 0.5)
    padded = [torch.cat((torch.zeros_like(states[:, :, :1]), states), dim=2) for states in (keys, values)]
    expected, full = Softmax().head_outputs(queries, *padded, None, 0.5)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(weights, full[..., 1:], rtol=0, atol=1e-14)


def test_a_row_that_sees_nothing_or_only_repulsive_keys_spends_everything_on_nothing():
    hidden = torch.zeros(1, 3, dtype=torch.bool)
    for scores, visible in ((torch.randn(1, 1, 1, 3), hidden), (torch.full((1, 1, 1, 3), -200.0), ~hidden)):
        assert float(SoftmaxPlusOne().weights(scores, visible, null_scores()).abs().max()) == 0.0
        assert float(SoftmaxPlusOne().null_mass(scores, visible, null_scores())) == 1.0


def test_a_small_null_mass_keeps_its_digits():
    mass = SoftmaxPlusOne().null_mass(torch.full((1, 1, 1, 2), 40.0), None, null_scores())
    assert abs(float(mass) / (math.exp(-40.0) / 2) - 1) < 1e-5


# --- clipped_softmax ---------------------------------------------------------------------------------------------------------
STRETCHED = torch.tensor([[1.0, 9.0, 9.0], [3.0, 1.0, 9.0], [2.0, 5.0, 3.0]]).log()[None, None]
"""Softmax of the rows: 1; 3/4 and 1/4; 1/5, 1/2 and 3/10."""


def test_without_a_stretch_it_is_softmax():
    torch.testing.assert_close(ClippedSoftmax(gamma=0.0).weights(STRETCHED, CAUSAL), Softmax().weights(STRETCHED, CAUSAL))
    assert torch.equal(
        ClippedSoftmax(alpha=0.0).weights(STRETCHED, CAUSAL), ClippedSoftmax(gamma=0.0).weights(STRETCHED, CAUSAL)
    )


def test_alpha_counts_what_the_query_sees():
    visible = torch.tensor([[True, False, True, True, False]])
    scores = torch.randn(1, 1, 1, 5, dtype=torch.float64)
    alone = ClippedSoftmax(alpha=0.5).weights(scores[..., [0, 2, 3]], None)
    torch.testing.assert_close(ClippedSoftmax(alpha=0.5).weights(scores, visible)[..., [0, 2, 3]], alone)


def test_clipped_weights_have_no_gradient():
    scores = STRETCHED[:, :, 1:2, :2].clone().requires_grad_()
    weights = ClippedSoftmax(gamma=-0.5).weights(scores, None)
    assert torch.equal(torch.autograd.grad(weights[..., 1].sum(), scores)[0], torch.zeros(1, 1, 1, 2))


def test_no_row_sums_to_more_than_one():
    scores = 3 * torch.randn(1, 2, 64, 40, dtype=torch.float64)
    for operation in (ClippedSoftmax(), ClippedSoftmax(gamma=-2.0), ClippedSoftmax(alpha=4.0)):
        rows = operation.weights(scores, None).sum(-1)
        assert float(rows.max()) <= 1.0 + 1e-12
        torch.testing.assert_close(rows + operation.null_mass(scores, None), torch.ones_like(rows))


# --- elu ---------------------------------------------------------------------------------------------------------------------


def test_it_is_elu_plus_one_with_the_digits_of_small_weights():
    scores = torch.linspace(-8, 8, 33)[None, None, None]
    torch.testing.assert_close(Elu().weights(scores, None), F.elu(scores) + 1, rtol=0, atol=1e-6)
    assert float(Elu().weights(torch.full((1, 1, 1, 1), -50.0), None)) == pytest.approx(math.exp(-50), rel=1e-5)


def test_normalised_negative_scores_are_a_softmax():
    scores = -torch.rand(1, 1, 4, 6, dtype=torch.float64) * 900
    torch.testing.assert_close(Elu(normalize=True).weights(scores, None), Softmax().weights(scores, None), rtol=0, atol=1e-13)


@pytest.mark.parametrize("number", [-20.0, -1.0, 0.0, 3.0])
def test_the_slope_is_one_from_zero_on(number):
    """At 0 itself too, where that of ``clamp`` is 1 or 0 by the version of torch."""
    scores = torch.full((1, 1, 1, 1), number, requires_grad=True)
    for values, slope in (
        (Elu().weights(scores, None), math.exp(min(number, 0.0))),
        (Elu().log_similarity(scores), 1 / (1 + max(number, 0.0))),
    ):
        (found,) = torch.autograd.grad(values.sum(), scores)
        assert float(found) == pytest.approx(slope, rel=1e-6)


# --- relu --------------------------------------------------------------------------------------------------------------------
RECTIFIED = torch.tensor([[2.0, 9.0, 9.0], [-1.0, 3.0, 9.0], [1.0, -4.0, 2.0]])[None, None]


def test_the_construction_that_needs_no_sink():
    """Ran-Milo: the trigger scores 1 on every key but BOS, so its weights average these keys; all other rows are silent."""
    scores = torch.zeros(1, 1, 6, 6)
    scores[..., 3, 1:] = 1.0
    weights = Relu(uncounted=1).weights(scores, torch.ones(6, 6, dtype=torch.bool).tril())[0, 0]
    expected = torch.zeros(6, 6)
    expected[3, 1:4] = 1 / 3
    assert torch.equal(weights, expected)


def test_the_divisor_counts_what_the_query_sees():
    visible = torch.tensor([[True, False, False, True], [False, False, False, False]])
    weights = Relu().weights(torch.ones(1, 1, 2, 4), visible)[0, 0]
    assert torch.equal(weights, torch.tensor([[0.5, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]]))


def test_the_mass_of_a_silent_row_is_on_nothing():
    silent = RECTIFIED.clone()
    silent[..., 1, :2] = -1.0
    operation = Relu(normalize=True)
    assert operation.null_mass(silent, CAUSAL).tolist() == [[[0.0, 1.0, 0.0]]]
    assert operation.weights(silent, CAUSAL)[0, 0, 1].tolist() == [0.0, 0.0, 0.0]
    assert operation.null_mass(-silent.abs(), None).tolist() == [[[1.0, 1.0, 1.0]]]
    assert Relu().null_mass(silent, CAUSAL) is None
    assert (operation.normalized, Relu().normalized) == (True, False)


# --- sigmoid -----------------------------------------------------------------------------------------------------------------


def test_bias_minus_log_n_makes_an_even_row_sum_to_about_one():
    size = 64
    weights = Sigmoid(bias=-math.log(size)).weights(torch.zeros(1, 1, 1, size), None)
    # sigmoid(-ln n) = 1/(n + 1), n of them
    assert float(weights.sum()) == pytest.approx(size / (size + 1), abs=1e-6)
    assert torch.allclose(Sigmoid(length_bias=True).weights(torch.zeros(1, 1, 1, size), None), weights)


def test_the_length_bias_counts_what_the_query_sees():
    visible = torch.tensor([[True, False, False, False], [True, True, False, True], [False, False, False, False]])
    weights = Sigmoid(length_bias=True).weights(torch.zeros(1, 1, 3, 4), visible)[0, 0]
    expected = torch.tensor([[1 / 2, 0, 0, 0], [1 / 4, 1 / 4, 0, 1 / 4], [0, 0, 0, 0]])
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-7)


def test_keys_do_not_compete():
    scores = torch.randn(1, 1, 1, 5)
    louder = scores.clone()
    louder[..., 2] += 10
    before, after = Sigmoid().weights(scores, None), Sigmoid().weights(louder, None)
    assert torch.equal(before[..., [0, 1, 3, 4]], after[..., [0, 1, 3, 4]])


def test_normalised_low_scores_are_a_softmax():
    # sigmoid(s) is exp(s) but for a factor of 1 - exp(s), and rows of exp(-500) do not underflow.
    scores = torch.randn(1, 1, 3, 5, dtype=torch.float64)
    for low in (-40.0, -500.0):
        torch.testing.assert_close(Sigmoid(normalize=True).weights(scores + low, None), Softmax().weights(scores + low, None))
    assert Sigmoid(normalize=True).weights(scores.float() - 500, None).sum(-1).allclose(torch.ones(1))


# --- softpick ----------------------------------------------------------------------------------------------------------------


def test_a_negative_score_has_a_gradient_through_the_denominator():
    scores = torch.tensor([3.0, 0.5], dtype=torch.float64).log().requires_grad_()
    weight = Softpick().weights(scores[None, None, None], None)[0, 0, 0, 0]
    (gradient,) = torch.autograd.grad(weight, scores)
    # w = a/(a + b) with a = exp(s) - 1 = 2 and b = 1 - exp(t) = 1/2: dw/ds = 3 b/(a + b)², dw/dt = exp(t) a/(a + b)²
    assert gradient.tolist() == pytest.approx([3 * 0.5 / 6.25, 0.5 * 2 / 6.25])


def test_a_row_of_zeros_gives_everything_to_nothing():
    scores = torch.zeros(1, 1, 1, 4, requires_grad=True)
    weights = Softpick().weights(scores, None)
    assert torch.equal(weights, torch.zeros(1, 1, 1, 4))
    assert Softpick().null_mass(scores, None).item() == 1.0
    assert torch.equal(torch.autograd.grad(weights.sum(), scores)[0], torch.zeros(1, 1, 1, 4))
    assert Softpick().null_mass(torch.zeros(1, 1, 1, 2), torch.tensor([[False, False]])).item() == 1.0


def test_negative_rows_are_silent_and_large_rows_are_a_softmax():
    scores = torch.randn(1, 1, 4, 6, dtype=torch.float64)
    assert torch.equal(Softpick().weights(-scores.abs() - 1, None), torch.zeros_like(scores))
    for shift in (45.0, 900.0):  # exp(-40) is far below the rounding of what it is subtracted from
        torch.testing.assert_close(
            Softpick().weights(scores + shift, None), Softmax().weights(scores, None), rtol=0, atol=1e-12
        )


def test_small_scores_keep_their_digits():
    scores = 1e-6 * torch.tensor([[[[1.0, 3.0, -4.0]]]])
    # exp(s) - 1 = s but for s²/2
    torch.testing.assert_close(Softpick().weights(scores, None)[0, 0, 0], torch.tensor([1 / 8, 3 / 8, 0.0]), rtol=0, atol=1e-6)


# --- p_normalized ------------------------------------------------------------------------------------------------------------


def test_powers_of_a_sigmoid_by_hand():
    # sigmoid(ln 3) = 3/4, sigmoid(0) = 1/2: of squares, 9/16 and 4/16, the root is sqrt(13)/4
    scores = torch.tensor([[[[math.log(3.0), 0.0]]]])
    weights = PNormalized(p=2.0, sigmoid=True).weights(scores, None)[0, 0, 0]
    torch.testing.assert_close(weights, torch.tensor([3.0, 2.0]) / math.sqrt(13.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", [0.25, 0.5, 2.0, 4.0])
def test_it_is_the_root_of_a_tempered_softmax(p):
    scores = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    weights = PNormalized(p=p).weights(scores, None)
    torch.testing.assert_close(weights, Softmax().weights(p * scores, None) ** (1 / p), rtol=1e-12, atol=0)
    sums = weights.sum(-1)
    assert bool((sums < 1).all() if p < 1 else ((sums > 1) & (sums <= 6 ** (1 - 1 / p))).all())


@pytest.mark.parametrize("sigmoid", [False, True])
def test_powers_sum_to_one_at_any_size_of_the_scores(sigmoid):
    for size in (1.0, 1e2, 1e4):
        scores = size * torch.randn(2, 3, 5, 6, dtype=torch.float64)
        weights = PNormalized(p=3.0, sigmoid=sigmoid).weights(scores, None)
        torch.testing.assert_close((weights**3).sum(-1), torch.ones(2, 3, 5, dtype=torch.float64), rtol=0, atol=1e-12)


# --- constant gains ----------------------------------------------------------------------------------------------------------


def test_it_is_the_plain_operation_with_the_output_map_scaled():
    queries, keys, values = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    outputs, weights = Sigmoid(scale=0.05).head_outputs(queries, keys, values, None, 0.5)
    expected, same = Sigmoid().head_outputs(queries, keys, values, None, 0.5)
    assert torch.equal(weights, same)
    assert torch.equal(outputs, expected * 0.05)  # in float64: the factor was not rounded on the way


# --- three tokens of each by hand --------------------------------------------------------------------------------------------

LN2, LN3, LN4, LN5 = (math.log(number) for number in (2, 3, 4, 5))
ROWS = [[0.0, 9.0, 9.0], [LN3, 0.0, 9.0]]
ELU = [[0.0, 7.0, 7.0], [-LN2, 1.0, 7.0], [-LN4, 0.0, 2.0]], [[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.25, 1.0, 3.0]]
"""Scores and ``exp(s)`` up to 0, ``s + 1`` beyond."""
LOGISTIC = [[0.0, 5.0, 5.0], [LN3, -LN3, 5.0], [0.0, 0.0, LN4]], [[0.5, 0.0, 0.0], [0.75, 0.25, 0.0], [0.5, 0.5, 0.8]]
"""Scores and sigmoid(ln x) = x/(1 + x)."""
BY_HAND = [
    # 1; 3 to 1; 2, 5 and 3 of 10
    (Softmax(), [*ROWS, [LN2, LN5, LN3]], [[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.2, 0.5, 0.3]], None),
    # 1 and the one; 3, 1 and the one; 2, 5, 2 and the one
    (SoftmaxPlusOne(), [*ROWS, [LN2, LN5, LN2]], [[0.5, 0.0, 0.0], [0.6, 0.2, 0.0], [0.2, 0.5, 0.2]], [0.5, 0.2, 0.1]),
    # 3/2 p - 1/2; (1 + 1/2i) p - 1/2i; 2 p
    (ClippedSoftmax(gamma=-0.5), STRETCHED, [[1.0, 0.0, 0.0], [5 / 8, 0.0, 0.0], [0.0, 1 / 4, 0.0]], [0.0, 3 / 8, 3 / 4]),
    (
        ClippedSoftmax(alpha=0.5), STRETCHED,
        [[1.0, 0.0, 0.0], [11 / 16, 1 / 16, 0.0], [1 / 15, 5 / 12, 11 / 60]], [0.0, 1 / 4, 1 / 3],
    ),
    (ClippedSoftmax(gamma=0.0, zeta=2.0), STRETCHED, [[1.0, 0.0, 0.0], [1.0, 1 / 2, 0.0], [2 / 5, 1.0, 3 / 5]], None),
    (Elu(), *ELU, None),
    (Elu(normalize=True), ELU[0], [[1.0, 0.0, 0.0], [0.2, 0.8, 0.0], [1 / 17, 4 / 17, 12 / 17]], None),
    (Relu(), RECTIFIED, [[2.0, 0.0, 0.0], [0.0, 3 / 2, 0.0], [1 / 3, 0.0, 2 / 3]], None),
    (Relu(uncounted=1), RECTIFIED, [[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [1 / 2, 0.0, 1.0]], None),
    (Relu(power=0.5), RECTIFIED, [[2.0, 0.0, 0.0], [0.0, 3 / 2**0.5, 0.0], [1 / 3**0.5, 0.0, 2 / 3**0.5]], None),
    (Relu(power=0.0), RECTIFIED, [[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [1.0, 0.0, 2.0]], None),
    (Relu(normalize=True), RECTIFIED, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1 / 3, 0.0, 2 / 3]], [0.0, 0.0, 0.0]),
    (Sigmoid(), *LOGISTIC, None),
    (Sigmoid(normalize=True), LOGISTIC[0], [[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [5 / 18, 5 / 18, 8 / 18]], None),
    # exp(s) - 1: 1; 2 and -1/2; 1, 3 and -1/2
    (
        Softpick(), [[LN2, 9.0, 9.0], [LN3, -LN2, 9.0], [LN2, LN4, -LN2]],
        [[1.0, 0.0, 0.0], [4 / 5, 0.0, 0.0], [2 / 9, 6 / 9, 0.0]], [0.0, 1 / 5, 1 / 9],
    ),
    # Of squares 3² + 4² = 5²; of roots (1 + 2 + 3)² = 36
    (
        PNormalized(p=2.0), [*ROWS[:1], [LN3, LN4, 9.0], [LN3, -900.0, LN4]],
        [[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.6, 0.0, 0.8]], None,
    ),
    (
        PNormalized(p=0.5), [*ROWS[:1], [0.0, 0.0, 9.0], [0.0, LN4, 2 * LN3]],
        [[1.0, 0.0, 0.0], [1 / 4, 1 / 4, 0.0], [1 / 36, 4 / 36, 9 / 36]], None,
    ),
]  # fmt: skip
"""Operation, scores of a causal text, weights, and null mass where one is defined."""


@pytest.mark.parametrize(("operation", "scores", "weights", "mass"), BY_HAND, ids=lambda value: str(value)[:40])
def test_three_tokens_by_hand(operation, scores, weights, mass):
    scores, null = torch.as_tensor(scores).view(1, 1, 3, 3), operation.null_scores(torch.zeros(1, 1, 3, 4), 0.5, {})
    torch.testing.assert_close(operation.weights(scores, CAUSAL, null)[0, 0], torch.tensor(weights), rtol=0, atol=1e-6)
    found = operation.null_mass(scores, CAUSAL, null)
    assert (found is None) == (mass is None)
    if mass is not None:
        torch.testing.assert_close(found[0, 0], torch.tensor(mass), rtol=0, atol=1e-6)
