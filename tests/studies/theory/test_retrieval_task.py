"""Key-query retrieval: the task by hand and by its rules, exact solutions, and bounds that no head breaks."""

from __future__ import annotations

import pytest
import torch
from tests.studies.theory.retrieval_solutions import (
    CONTENT,
    FIRST_KEY,
    RetrievalHead,
    relu_solution,
    retrieval_batch,
    softmax_solution,
)

from sinklab.studies.theory.trigger_bounds import least_bos_weight_by_odds

LENGTH, KEYS, VALUES = 9, 8, 3
WIDTH = FIRST_KEY + KEYS + VALUES


def batch_of(size=200, seed=0, position=None, target="value"):
    generator = torch.Generator().manual_seed(seed)
    return retrieval_batch(size, LENGTH, KEYS, VALUES, generator, position, target)


@pytest.mark.parametrize("target", ["value", "token"])
def test_relu_solution_has_no_error_and_no_sink(target):
    batch = batch_of(target=target)
    outputs, weights = relu_solution(KEYS, VALUES, target)(batch.inputs)
    assert torch.equal(outputs, batch.targets)
    assert not weights[..., 0].any()
    assert not weights[~batch.is_trigger].any()
    assert weights[batch.is_trigger].sum(1).tolist() == [1.0] * len(weights)


@pytest.mark.parametrize("target", ["value", "token"])
@pytest.mark.parametrize("error", [0.5, 1e-2, 1e-6])
def test_softmax_solution_keeps_its_promise_and_has_its_sink(target, error):
    batch = batch_of(target=target)
    outputs, weights = softmax_solution(KEYS, VALUES, LENGTH, error, target)(batch.inputs)
    assert float((outputs - batch.targets).abs().max()) <= error
    off = ~batch.is_trigger[:, 1:]
    assert float(weights[:, 1:, 0][off].min()) >= 1 - error
    assert float(weights[batch.is_trigger].gather(1, batch.asked[:, None]).min()) >= 1 - error


def test_with_the_marks_kept_the_output_counts_the_weight():
    """Counting: any scores, a map that leaves coordinates 1 and 2 alone."""
    torch.manual_seed(0)
    batch = batch_of(50)
    value = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    value[1:3] = torch.eye(WIDTH, dtype=torch.float64)[1:3]
    head = RetrievalHead(3 * torch.randn(WIDTH, WIDTH, dtype=torch.float64), value, "softmax")
    outputs, weights = head(batch.inputs)
    on_trigger = weights.gather(2, batch.positions[:, None, None].expand(-1, LENGTH, 1))[..., 0]
    torch.testing.assert_close(1 - weights[..., 0] - on_trigger, outputs[..., CONTENT])
    torch.testing.assert_close(1 - weights[..., 0], outputs[..., 1] + outputs[..., CONTENT])
    error = outputs.abs().amax(-1)
    assert bool((weights[..., 0] >= 1 - 2 * error - 1e-12).all())


def test_without_marks_a_single_output_counts_nothing():
    """Values that cancel: an output of 0, and no weight on BOS beyond what is asked."""
    head = RetrievalHead(torch.zeros(WIDTH, WIDTH, dtype=torch.float64), relu_solution(KEYS, VALUES).value, "softmax")
    head.score[CONTENT, CONTENT] = 30.0
    tokens = torch.zeros(1, 3, WIDTH, dtype=torch.float64)
    tokens[0, 0, 0] = tokens[0, 1:, CONTENT] = tokens[0, 1, FIRST_KEY] = tokens[0, 2, FIRST_KEY + 1] = 1
    tokens[0, 1, -1], tokens[0, 2, -1] = 0.7, -0.7
    outputs, weights = head(tokens)
    assert float(outputs[0, 2].abs().max()) < 1e-12
    assert float(weights[0, 2, 0]) < 1e-12
    # But the same pair of tokens shows at the place before, which is what the odds are made of.
    assert float(outputs[0, 1].abs().max()) == pytest.approx(0.7)


def bound_of(head, inputs):
    """The bound on the last token, by plain loops over the short sequences."""
    norms = (inputs @ head.value.mT).abs().amax(-1)
    errors = []
    for other in (None, *range(1, inputs.shape[1] - 1)):
        short = inputs[:, [0, -1] if other is None else [0, other, -1]]
        errors.append(head(short)[0][:, -1].abs().amax(-1))
    return least_bos_weight_by_odds(torch.stack(errors).amax(0), norms[:, 0], norms[:, -1], norms[:, 1:-1])


@pytest.mark.parametrize("seed", range(6))
def test_no_softmax_head_breaks_the_bound(seed):
    """Solutions of every quality, disturbed in scores and map: the weight is never below what outputs of pairs allow."""
    torch.manual_seed(seed)
    batch, said = batch_of(300, seed, position=6), 0
    for error in (0.3, 1e-2, 1e-4):
        for noise in (0.0, 0.03, 0.3):
            solution = softmax_solution(KEYS, VALUES, LENGTH, error)
            score = solution.score + noise * torch.randn(WIDTH, WIDTH, dtype=torch.float64)
            value = solution.value + noise * 0.1 * torch.randn(WIDTH, WIDTH, dtype=torch.float64)
            head = RetrievalHead(score, value, "softmax")
            for count in (1, 2, 5):
                before = batch.inputs[:, : count + 1]
                bound, weight = bound_of(head, before), head(before)[1][:, -1, 0]
                assert bool((weight >= bound - 1e-12).all())
                said += int((bound > 0.5).sum())
            behind = torch.cat((batch.inputs[:, :3], batch.inputs[:, 6:]), dim=1)  # the trigger among them, at place 3
            on = head(behind)[1][:, -1]
            others = behind[:, [0, 1, 2, 4, 5]]
            assert bool((on[:, 0] + on[:, 3] >= bound_of(head, others) - 1e-12).all())
    assert said > 1000  # it does say something


def test_the_bound_by_hand():
    one = torch.tensor(1.0)
    # No error, no doubt; alone behind BOS: odds (η + β) / (μ - η).
    assert float(least_bos_weight_by_odds(0 * one, 0 * one, one, torch.ones(3))) == 1
    assert float(least_bos_weight_by_odds(0.1 * one, 0 * one, one, torch.ones(0))) == pytest.approx(1 / (1 + 0.1 / 0.9))
    # One more: 0.12 / 0.9 · (1 + 2 / (0.5 - 0.1)) = 0.8.
    assert float(least_bos_weight_by_odds(0.1 * one, 0.02 * one, one, torch.tensor([0.5]))) == pytest.approx(1 / 1.8)
    assert float(least_bos_weight_by_odds(0.5 * one, 0 * one, one, torch.tensor([0.5]))) == 0


def test_the_bound_of_one_token_is_attained():
    """BOS, x with a weight a on x and nothing on BOS's value: the output is a M x, and the bound is the weight itself."""
    solution = softmax_solution(KEYS, VALUES, LENGTH, 0.1)
    inputs = batch_of(20).inputs[:, :2]
    torch.testing.assert_close(bound_of(solution, inputs), solution(inputs)[1][:, -1, 0])


def test_divided_weights_obey_the_identity_behind_the_proof():
    """d(4) times the output behind x, y less d(3) times that behind x does not depend on x, for any maps."""
    torch.manual_seed(0)
    score, value = torch.randn(2, WIDTH, WIDTH, dtype=torch.float64)
    bos, trigger, one, two, y = torch.randn(5, WIDTH, dtype=torch.float64)

    def output(*tokens):
        states = torch.stack((bos, *tokens, trigger))
        return (trigger @ score @ states.T).relu() / (len(states) - 1) @ states @ value.T

    first, second = (3 * output(x, y) - 2 * output(x) for x in (one, two))
    torch.testing.assert_close(first, second)
