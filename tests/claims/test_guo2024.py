"""Bigram-backcopy by hand: counts, the trigger rule, the best prediction, the released model, and what its heads do."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sinklab.attention.session import attend
from sinklab.corpora import bigram_backcopy
from sinklab.errors import InputError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab_claims import guo2024
from sinklab_claims.guo2024 import (
    NUMBERS,
    BackcopyProblem,
    HeadNumbers,
    Settings,
    estimate_laws,
    evaluate,
    knocked_out,
    laws_of,
    make_model,
    only_letters,
    risks,
)

FOLLOWING = np.array([[0, 0.5, 0.5], [0.5, 0, 0.5], [0, 1, 0]])
# "t" is the trigger; a goes to t or b, b always to a. Behind "at" comes a again.
BY_HAND = laws_of(FOLLOWING, np.array([0.2, 0.4, 0.4]), 1)


def problem_of(seed: int = 0, length: int = 12, size: int = 6, triggers: int = 2) -> BackcopyProblem:
    generator = np.random.default_rng(seed)
    following = generator.dirichlet(np.full(size, 0.5), size=size)
    return BackcopyProblem(laws_of(following, generator.dirichlet(np.ones(size)), triggers), triggers, length)


PROBLEM = problem_of()

# --- the language -------------------------------------------------------------------------------------------------------------


def test_counts_by_hand():
    # Most frequent first: a 3 times, then b and c twice each in the order of their code points; z is rarer and taken out.
    # Pairs: ab, bc, ca | cb, ba; none across the two texts. a is the trigger, and b and c are as likely to come first.
    assert estimate_laws(["abzca", "cba"], 3, 1).tolist() == [[0, 0, 0], [0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    # The budget ends in the middle of a text: a, b, c twice, and a; without a trigger the first character is of their law.
    assert estimate_laws(["abccab", "bbbb"], 3, 0, budget=5)[-1].tolist() == [0.4, 0.4, 0.2]
    assert only_letters("for i in range(10):\n    It's") == "for i in range it s"


def plain(task: BackcopyProblem, numbers: list[float]) -> list[int]:
    """One sequence, character by character, as the rule says it."""
    sequence = [task.vocab_size - 1]
    for number in numbers:
        now = sequence[-1]
        if now < task.triggers:
            sequence.append(sequence[-2])
            continue
        law = task.laws[now]
        sums = [sum(law[: token + 1]) for token in range(len(law))]
        sequence.append(next(token for token, total in enumerate(sums) if number < total))
    return sequence


@pytest.mark.parametrize("seed", range(3))
def test_sequences_are_those_of_the_plain_rule(seed):
    task = problem_of(seed, 20)
    uniforms = torch.rand(50, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert task.from_uniforms(uniforms).tolist() == [plain(task, row) for row in uniforms.tolist()]


def test_what_cannot_follow_is_never_drawn():
    # The extreme numbers: 0 must not draw a first character of probability 0, nor the largest one below 1 a last.
    task = BackcopyProblem(laws_of(FOLLOWING, np.array([0.2, 0.8, 0.0]), 1), 1, 6)
    uniforms = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)[:, None].expand(-1, 6)
    assert ["".join("tab^"[token] for token in row) for row in task.from_uniforms(uniforms).tolist()] == ["^atatat", "^ababab"]


def test_the_best_prediction_has_no_excess():
    task = problem_of(2)
    read = task.draw(2000, torch.Generator().manual_seed(0))[:, :-1]
    copied = torch.nn.functional.one_hot(read.roll(1, 1), task.vocab_size)[..., :-1].double()
    best = torch.where(task.is_trigger(read)[..., None], copied, torch.from_numpy(task.laws)[read])
    # exp(-200) is nothing in float64 beside 1; BOS is never predicted.
    logits = torch.cat((best.log().clamp(min=-200), torch.full((*read.shape, 1), -200.0)), dim=-1)
    assert float(task.excess(read, logits).abs().max()) < 1e-12


def test_excess_by_hand():
    excess = BackcopyProblem(BY_HAND, 1, 4).excess(torch.tensor([[3, 1, 0, 1]]), torch.zeros(1, 4, 4))  # ^ a t a
    # Uniform over four tokens: ln 4 less the entropy of the truth, which at the trigger is 0.
    assert excess.tolist() == [pytest.approx([math.log(2), math.log(2), math.log(4), math.log(2)])]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: estimate_laws(["abc"], 4, 1), "has 3 different .*, and the task needs 4"),
        (lambda: estimate_laws(["aabc"], 3, 1), "nothing follows 'c' in the text"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()


# --- the model and its heads --------------------------------------------------------------------------------------------------


def model_of() -> SinkLM:
    return make_model(PROBLEM.vocab_size, PROBLEM.length, width=16, layers=2, heads=2).eval()


@torch.no_grad()
def test_a_head_that_is_knocked_out_is_one_without_output():
    model, tokens = model_of(), PROBLEM.draw(4)[:, :-1]
    before = model(tokens, use_cache=False).logits
    with knocked_out(model, 1, 0):
        without = model(tokens, use_cache=False).logits
    torch.testing.assert_close(model(tokens, use_cache=False).logits, before, rtol=0, atol=0)
    model.layers[1].self_attn.o_proj.weight[:, :8] = 0
    torch.testing.assert_close(model(tokens, use_cache=False).logits, without)
    assert float((without - before).abs().max()) > 1e-3


@torch.no_grad()
def test_numbers_of_heads_are_those_of_plain_loops():
    model = model_of()
    tokens = PROBLEM.draw(5, torch.Generator().manual_seed(3))[:, :-1]
    probe = HeadNumbers(PROBLEM.is_trigger(tokens))
    with attend(model, [probe]):
        states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    layer, head, inner = 1, 1, model.layers[1].self_attn
    normed = model.layers[1].input_layernorm(states[1])
    queries, keys, values = (
        linear(normed).unflatten(-1, (2, 8))[:, :, head] for linear in (inner.q_proj, inner.k_proj, inner.v_proj)
    )
    scores = queries @ keys.mT / math.sqrt(8)
    for row in range(len(tokens)):
        found = {"bos_weight": [], "bos_weight_trigger": [], "previous_weight": [], "previous_weight_trigger": []}
        for query in range(2, PROBLEM.length):
            weights = torch.softmax(scores[row, query, : query + 1], -1)
            trigger = "_trigger" if int(tokens[row, query]) < PROBLEM.triggers else ""
            found[f"bos_weight{trigger}"].append(float(weights[0]))
            found[f"previous_weight{trigger}"].append(float(weights[query - 1]))
        for name, numbers in found.items():
            expected = sum(numbers) / len(numbers) if numbers else math.nan
            # float32 sums of a dozen weights up to 1.
            assert float(probe.heads[layer][name][row, head]) == pytest.approx(expected, abs=1e-5, nan_ok=True)
    norms = values.norm(dim=-1)
    torch.testing.assert_close(probe.heads[layer]["value_ratio"][:, head], norms[:, 0] / norms[:, 1:].mean(1))


@torch.no_grad()
def test_what_is_read_of_a_model_is_of_the_head_that_triggers_miss_most():
    model = model_of()
    numbers = evaluate(model, PROBLEM, 8)
    assert numbers.keys() == {metric.name for metric in NUMBERS}
    tokens = PROBLEM.draw(8, torch.Generator().manual_seed(1_000_003))[:, :-1]
    excess, triggers = PROBLEM.excess(tokens, model(tokens, use_cache=False).logits), PROBLEM.is_trigger(tokens)
    by_row = [float(excess[row][triggers[row]].mean()) for row in range(8) if bool(triggers[row].any())]
    assert numbers["trigger_excess"] == pytest.approx(sum(by_row) / len(by_row))
    without, probe = {}, HeadNumbers(triggers)
    with attend(model, [probe]):
        model(tokens, use_cache=False)
    for layer in range(2):
        for head in range(2):
            with knocked_out(model, layer, head):
                without[layer, head] = risks(model, PROBLEM, tokens)
    layer, head = max(without, key=without.get)
    assert numbers["bos_weight"] == pytest.approx(float(probe.heads[layer]["bos_weight"][:, head].double().nanmean()))


# --- the claims ---------------------------------------------------------------------------------------------------------------


def test_what_is_measured_has_all_numbers_that_are_judged(monkeypatch):
    monkeypatch.setattr(guo2024, "SETTINGS", {"tiny": Settings(width=8, length=8, steps=2, batch=2)})
    assert guo2024.measure(0, "tiny")["softmax"].keys() <= {metric.name for metric in NUMBERS}
    found = guo2024.adam_and_sgd(0, "tiny")
    assert found.keys() == {"adamw", "sgd"}
    assert found["sgd"] != found["adamw"]
    # Two steps at 0.03 and 1e-3 hardly move it.
    assert found["sgd"]["bos_weight"] == pytest.approx(found["adamw"]["bos_weight"], abs=0.02)


def test_copy_head_is_the_one_of_the_maps():
    assert guo2024.TRIGGERS == bigram_backcopy.TRIGGERS
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    positions = {"max_position_embeddings": 64, "position": {"name": "learned"}, "initializer_range": 0.3}
    model, rows = SinkLM(SinkLMConfig(**shape, **positions)).eval(), torch.randint(1, 40, (8, 64))
    rows[:, 0] = 0
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: 1 + guo2024.TRIGGERS.index(token))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = torch.stack(model(rows, output_attentions=True, use_cache=False).attentions, 1)  # (rows, layers, heads, q, k)
    model.set_attn_implementation("sdpa")
    triggers = ((rows >= 1) & (rows <= 3))[:, 2:]
    previous = maps.diagonal(-1, -2, -1)[..., 1:] * triggers[:, None, None]
    by_row = previous.sum(-1) / triggers.sum(-1)[:, None, None]
    trained = SimpleNamespace(
        config=SimpleNamespace(model=model.config.architecture),
        loaded=SimpleNamespace(model=model, tokenizer=tokenizer),
        rows=lambda samples: rows,
    )
    numbers = guo2024.copy_head(trained)
    assert numbers["previous_at_trigger"] == pytest.approx(by_row.nanmean(0).max().item(), rel=1e-5)
    assert numbers.keys() == {metric.name for metric in guo2024.METRICS}
