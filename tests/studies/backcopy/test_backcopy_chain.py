"""The chain: counts by hand, the trigger rule, stationary shares and entropies that can be worked out on paper, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sinklab.errors import ConfigurationError, InputError
from sinklab.studies.backcopy.chain import BigramChain, estimate_chain, only_letters
from sinklab.studies.backcopy.problem import BackcopyProblem

# "t" is the trigger; a goes to t or b, b always to a. Behind "at" comes a again.
BY_HAND = BigramChain("tab", np.array([[0, 0.5, 0.5], [0.5, 0, 0.5], [0, 1, 0]]), np.array([0.2, 0.4, 0.4]), 1)


def chain_of(seed: int = 0, size: int = 6, triggers: int = 2) -> BigramChain:
    generator = np.random.default_rng(seed)
    laws = generator.dirichlet(np.full(size, 0.5), size=size)
    return BigramChain("tuabcd"[:size], laws, generator.dirichlet(np.ones(size)), triggers)


def test_counts_by_hand():
    # Most frequent first: a 3 times, then b and c twice each in the order of their code points; z is rarer and taken out.
    chain = estimate_chain(["abzca", "cba"], 3, 1)
    assert chain.characters == "abc"
    assert chain.marginal.tolist() == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    # Pairs: ab, bc, ca | cb, ba; none across the two texts.
    assert chain.following.tolist() == [[0, 1, 0], [0.5, 0, 0.5], [0.5, 0.5, 0]]
    assert chain.trigger_probability.tolist() == [0, 0.5, 0.5]
    assert chain.first.tolist() == [0, 0.5, 0.5]


def test_the_budget_ends_in_the_middle_of_a_text():
    assert estimate_chain(["abccab", "bbbb"], 3, 1, budget=5).marginal.tolist() == [0.4, 0.4, 0.2]


def test_only_letters():
    assert only_letters("for i in range(10):\n    It's") == "for i in range it s"


def stationary(chain):
    """Shares of each character, and of triggers behind it, in an endless sequence.

    Without triggers and copies what remains is a chain with ``K(a, b) = P(a, b) / (1 - q(a))``, where ``q(a)`` is the
    probability of a trigger behind ``a``. A visit of it to ``a`` shows ``a`` 1 / (1 - q(a)) times on average, copies included,
    and ``q(a)`` triggers for each.
    """
    plain = slice(chain.num_triggers, None)
    stay = chain.trigger_probability[plain]
    kernel = chain.following[plain, plain] / (1 - stay)[:, None]
    count = len(kernel)
    # w K = w with w summing to 1, as one system.
    system = np.vstack((kernel.T - np.eye(count), np.ones(count)))
    visits = np.linalg.lstsq(system, np.append(np.zeros(count), 1.0), rcond=None)[0].clip(min=0) / (1 - stay)
    character = np.zeros(chain.size)
    character[plain] = visits / (visits * (1 + stay)).sum()
    return character, character * chain.trigger_probability


def test_stationary_shares_by_hand():
    # Without triggers a b a b …: w = (1/2, 1/2). a shows 1 / (1 - 1/2) = 2 times, with half a trigger each: a, t, a, b.
    character, behind = stationary(BY_HAND)
    assert character.tolist() == pytest.approx([0, 1 / 2, 1 / 4])
    assert behind.tolist() == pytest.approx([0, 1 / 4, 0])


def test_entropy_by_hand():
    # First character: a or b alike. Behind a: t or b alike. Behind b, and behind the trigger, no choice.
    assert BY_HAND.entropies().tolist() == pytest.approx([0, math.log(2), 0, math.log(2)])
    # Places 1, 2, 3: a with 1/2, then b→a: 1/2, then from a: 1/4 trigger, 1/4 b; from b 1/2 a … place 3: a 1/4 + 1/4.
    character, behind = BY_HAND.shares(4)
    assert character[:, 1].tolist() == pytest.approx([1 / 2, 1 / 2, 1 / 2])
    assert behind[:, 1].tolist() == pytest.approx([0, 1 / 4, 1 / 4])
    assert BY_HAND.entropy_floor(4) == pytest.approx(math.log(2) * (1 + 3 / 2) / 4)


@pytest.mark.parametrize("seed", range(4))
def test_shares_tend_to_the_stationary_ones_and_the_floor_is_the_entropy(seed):
    chain = chain_of(seed)
    character, behind = chain.shares(2000)
    assert (character + behind).sum(axis=1) == pytest.approx(np.ones(1999))
    limit, limit_behind = stationary(chain)
    # A sequence may come back to a character in two steps only; the mean of two places does not care.
    assert character[-2:].mean(axis=0) == pytest.approx(limit, abs=1e-6)
    assert behind[-2:].mean(axis=0) == pytest.approx(limit_behind, abs=1e-6)
    assert limit @ chain.entropies()[:-1] == pytest.approx(chain.entropy_floor(200_000), rel=1e-4)


def plain(task: BackcopyProblem, numbers: list[float]) -> list[int]:
    """One sequence, character by character, as the rule says it."""
    chain = task.chain
    sequence = [chain.bos]
    for number in numbers:
        now = sequence[-1]
        if now < chain.num_triggers:
            sequence.append(sequence[-2])
            continue
        law = chain.first if now == chain.bos else chain.following[now]
        sums = [sum(law[: token + 1]) for token in range(chain.size)]
        sequence.append(next(token for token, total in enumerate(sums) if number < total))
    return sequence


@pytest.mark.parametrize("seed", range(3))
def test_sequences_are_those_of_the_plain_rule(seed):
    task = BackcopyProblem(chain_of(seed), 20)
    uniforms = torch.rand(50, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert task.from_uniforms(uniforms).tolist() == [plain(task, row) for row in uniforms.tolist()]


def test_what_cannot_follow_is_never_drawn():
    # The extreme numbers: 0 must not draw a first character of probability 0, nor the largest one below 1 a last.
    task = BackcopyProblem(BigramChain("tab", BY_HAND.following, np.array([0.2, 0.8, 0.0]), 1), 6)
    uniforms = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)[:, None].expand(-1, 6)
    assert ["".join("tab^"[token] for token in row) for row in task.from_uniforms(uniforms).tolist()] == ["^atatat", "^ababab"]


def test_the_trigger_rule_and_the_shares_in_what_is_drawn():
    chain = chain_of(1)
    tokens = BackcopyProblem(chain, 30).draw(4000, torch.Generator().manual_seed(0))
    assert (tokens[:, 0] == chain.bos).all()
    assert (tokens[:, 1:] < chain.size).all()
    triggers = tokens < chain.num_triggers
    assert not triggers[:, :2].any()
    assert not (triggers[:, 1:] & triggers[:, :-1]).any()
    rows, places = torch.nonzero(triggers[:, :-1], as_tuple=True)
    assert (tokens[rows, places + 1] == tokens[rows, places - 1]).all()
    character, behind = chain.shares(31)
    share = (tokens[:, 30, None] == torch.arange(chain.num_triggers, chain.size)).double().mean(0)
    # 4,000 draws: five standard errors are 0.04 at most.
    assert share.numpy() == pytest.approx(character[-1, chain.num_triggers :], abs=0.04)
    assert float(triggers[:, 30].double().mean()) == pytest.approx(behind[-1].sum(), abs=0.04)


def test_the_best_prediction_has_no_excess_and_its_loss_is_the_floor():
    chain = chain_of(2)
    task = BackcopyProblem(chain, 12)
    tokens = task.draw(20_000, torch.Generator().manual_seed(0))
    read, targets = tokens[:, :-1], tokens[:, 1:]
    laws = torch.from_numpy(chain.laws())[read]
    copied = torch.nn.functional.one_hot(read.roll(1, 1), chain.vocab_size)[..., : chain.size].double()
    best = torch.where(task.is_trigger(read)[..., None], copied, laws)
    # exp(-200) is nothing in float64 beside 1; BOS is never predicted.
    logits = torch.cat((best.log().clamp(min=-200), torch.full((*read.shape, 1), -200.0)), dim=-1)
    excess = task.excess(read, logits)
    assert float(excess.abs().max()) < 1e-12
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    margin = 5 * float(losses.reshape(targets.shape).mean(1).std()) / len(tokens) ** 0.5
    assert float(losses.mean()) == pytest.approx(chain.entropy_floor(12), abs=margin)


def test_excess_by_hand():
    task = BackcopyProblem(BY_HAND, 4)
    tokens = torch.tensor([[3, 1, 0, 1]])  # ^ a t a
    excess = task.excess(tokens, torch.zeros(1, 4, 4))
    # Uniform over four tokens: ln 4 less the entropy of the truth, which at the trigger is 0.
    assert excess.tolist() == [pytest.approx([math.log(2), math.log(2), math.log(4), math.log(2)])]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BigramChain("tab", BY_HAND.following, BY_HAND.marginal, 0), ConfigurationError, "0 triggers among 3"),
        (lambda: BigramChain("tab", BY_HAND.following, BY_HAND.marginal, 2), ConfigurationError, "2 triggers among 3"),
        (lambda: BigramChain("ta", BY_HAND.following, BY_HAND.marginal, 1), ConfigurationError, "1 triggers among 2"),
        (lambda: BigramChain("tab", BY_HAND.following[:2], BY_HAND.marginal, 1), InputError, r"shapes \(2, 3\) and \(3,\)"),
        (lambda: BigramChain("tab", BY_HAND.following / 2, BY_HAND.marginal, 1), InputError, "probabilities that sum to 1"),
        (
            lambda: BigramChain("tab", np.eye(3)[[0, 0, 1]], BY_HAND.marginal, 1),
            InputError,
            "nothing but triggers follows 'a'.* take fewer `triggers`, or a longer text",
        ),
        (lambda: BigramChain("tab", BY_HAND.following, np.eye(3)[0], 1), InputError, "no sequence can begin"),
        (lambda: BY_HAND.shares(1), ConfigurationError, "length 1 must be at least 2"),
        (lambda: BackcopyProblem(BY_HAND, 3), ConfigurationError, "length 3 must be at least 4"),
        (lambda: estimate_chain(["abc"], 4, 1), InputError, "has 3 different .*, and the task needs 4; take a text with more"),
        (lambda: estimate_chain([], 4, 1), InputError, "has 0 different characters"),
        (lambda: estimate_chain(["aabc"], 3, 1), InputError, "nothing follows 'c' in the text; take a longer text"),
        (lambda: estimate_chain(["abc"], 3, 1, budget=1), ConfigurationError, "budget of 1"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()
