"""The trigger task to the letter: layout, law of the trigger's position, both readings of the target, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.errors import ConfigurationError
from sinklab.studies.theory.trigger_task import trigger_batch


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
    assert (drawn.is_trigger.int().argmax(1) == drawn.positions[:, 0]).all()


@given(st.integers(5, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_every_one_of_several_triggers_averages_all_tokens_up_to_it(length, data):
    triggers = data.draw(st.integers(2, length - 3))
    position = data.draw(st.one_of(st.none(), st.integers(2, length - 1)))
    target = data.draw(st.sampled_from(["including", "preceding"]))
    drawn = draw(8, length, 6, data.draw(st.integers(0, 999)), triggers=triggers, position=position, target=target)
    assert drawn.positions.shape == (8, triggers)
    for tokens, targets, places in zip(drawn.inputs, drawn.targets, drawn.positions.tolist(), strict=True):
        assert places == sorted(set(places))
        assert min(places) >= 2
        assert max(places) < length
        assert position is None or position in places
        assert tokens[:, 1].nonzero()[:, 0].tolist() == places
        assert (tokens[1:, 1] + tokens[1:, -1] == 1).all()  # what the bound counts
        for index in range(length):
            last = index + 1 if target == "including" else index
            expected = tokens[1:last].mean(0) if index in places else torch.zeros(6, dtype=torch.float64)
            torch.testing.assert_close(targets[index], expected, rtol=0, atol=1e-12)


def test_several_triggers_are_uniform_over_the_places():
    counts = torch.bincount(draw(20_000, length=8, triggers=3).positions.flatten(), minlength=8)
    assert counts[:2].tolist() == [0, 0]
    # Each of six places has a trigger in half of the sequences: standard deviation 71, five of them.
    assert (counts[2:] - 10_000).abs().max() < 355


def test_position_is_uniform_from_the_third_token_on():
    counts = torch.bincount(draw(50_000).positions[:, 0], minlength=7)
    assert counts[:2].tolist() == [0, 0]
    # Five positions of mean 10,000 and standard deviation 89: five deviations.
    assert (counts[2:] - 10_000).abs().max() < 450


def test_content_is_uniform():
    content = draw(20_000).inputs[:, 1:, 2:5].flatten()
    # Mean 0, variance 1/3, fourth moment 1/5; standard errors over 360,000 numbers are 1e-3, 5e-4, 5e-4.
    for power, moment in ((1, 0.0), (2, 1 / 3), (4, 1 / 5)):
        assert (content**power).mean().item() == pytest.approx(moment, abs=5e-3)


def test_same_generator_same_batch_and_a_fixed_position():
    one, two = draw(), draw()
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.targets, two.targets)
    assert draw(position=6).positions.tolist() == [[6]] * 64
    assert trigger_batch(2, 4, 4).inputs.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"batch": 0}, "batch 0 must be at least 1"),
        ({"length": 3}, "length 3 must be at least 4"),
        ({"width": 3}, "width 3 must be at least 4"),
        ({"position": 1}, r"position 1 must be in 2 … 6, counted from 0"),
        ({"position": 7}, r"position 7 must be in 2 … 6"),
        ({"triggers": 0}, "0 triggers in 7 tokens; expected 1 … 4"),
        ({"triggers": 5}, "5 triggers in 7 tokens; expected 1 … 4: BOS and a content token come first"),
        ({"target": "following"}, "target 'following' must be one of including, preceding"),
    ],
)
def test_bad_input(arguments, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        draw(**arguments)
