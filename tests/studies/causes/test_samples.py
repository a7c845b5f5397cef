"""Samples: what is scored, means by domain, and parts."""

from __future__ import annotations

import math

import pytest
import torch

from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.studies.causes.samples import Samples, masked_samples, token_samples, whole_samples


def test_means_by_domain_by_hand():
    samples = Samples({"x": torch.zeros(2, 3)}, torch.tensor([[0, 1, 0], [-1, 1, 1]]), domain_names=("trigger", "other"))
    values = torch.tensor([[1.0, 2.0, 4.0], [math.nan, 3.0, 5.0]])  # what is not scored may be anything
    found = samples.by_domain(values, "the loss")
    assert found.dtype == torch.float64
    assert found[0].tolist() == [2.5, 2.0]
    assert math.isnan(found[1, 0])
    assert found[1, 1] == 4.0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_numbers_of_scored_positions_that_are_not_finite_are_refused(broken):
    samples = Samples({"x": torch.zeros(2, 3)}, torch.tensor([[0, 1, 0], [-1, 1, 1]]), domain_names=("trigger", "other"))
    values = torch.zeros(2, 3)
    values[0, 1] = values[1, 2] = broken
    message = r"domain 'other': the loss is not finite at 2 of 5 scored positions; run the model in float32"
    with pytest.raises(MeasurementError, match=message):
        samples.by_domain(values, "the loss")
    values = torch.zeros(2, 3)
    values[1, 0] = broken  # not scored
    assert samples.by_domain(values, "the loss").nan_to_num(nan=-1.0).tolist() == [[0.0, 0.0], [-1.0, 0.0]]


def test_next_tokens_are_scored_everywhere_but_at_the_end():
    samples = token_samples([("code", torch.arange(6).view(2, 3)), ("prose", torch.arange(3)[None])])
    assert samples.domains.tolist() == [[0, 0, -1], [0, 0, -1], [1, 1, -1]]
    assert samples.domain_names == ("code", "prose")
    assert torch.equal(samples.targets, samples.inputs["input_ids"])
    with pytest.raises(ConfigurationError, match=r"one length of 2 tokens or more, got \[1\]"):
        token_samples([("code", torch.zeros(2, 1, dtype=torch.int64))])


def test_masked_tokens_are_scored_and_no_others():
    tokens = torch.arange(10, 32).view(2, 11)
    samples = masked_samples([("one", tokens[:1]), ("two", tokens[1:])], mask_token=3, share=1 / 3, seed=5)
    masked = samples.inputs["input_ids"] == 3
    assert masked.sum(1).tolist() == [3, 3]  # a third of the nine between the first and the last
    assert not masked[:, [0, -1]].any()
    assert torch.equal(samples.inputs["input_ids"][~masked], tokens[~masked])
    assert torch.equal(samples.targets, tokens)
    assert torch.equal(samples.domains, torch.where(masked, torch.tensor([[0], [1]]), -1))
    again = masked_samples([("one", tokens[:1]), ("two", tokens[1:])], mask_token=3, share=1 / 3, seed=5)
    assert torch.equal(again.inputs["input_ids"], samples.inputs["input_ids"])
    assert masked_samples([("one", tokens)], mask_token=3, share=0.01).domains.ge(0).sum(1).tolist() == [1, 1]
    with pytest.raises(ConfigurationError, match="above 0 and at most 1, got 0"):
        masked_samples([("one", tokens)], mask_token=3, share=0)
    with pytest.raises(ConfigurationError, match="3 tokens or more"):
        masked_samples([("one", tokens[:, :2])], mask_token=3)


def test_padding_is_neither_masked_nor_scored():
    tokens = torch.arange(10, 32).view(2, 11)
    tokens[0, 8:] = 0
    samples = masked_samples([("one", tokens)], mask_token=3, padding=0, share=1.0)
    assert samples.inputs["attention_mask"].sum(1).tolist() == [8, 11]
    assert samples.domains.ge(0).nonzero().tolist() == [[0, k] for k in range(1, 7)] + [[1, k] for k in range(1, 10)]
    # Of six and of nine tokens a third.
    assert masked_samples([("one", tokens)], mask_token=3, padding=0, share=1 / 3).domains.ge(0).sum(1).tolist() == [2, 3]
    for wrong in (torch.tensor([[5, 0, 6, 7]]), torch.tensor([[0, 5, 6, 7]]), torch.tensor([[5, 6, 0, 0]])):
        with pytest.raises(ConfigurationError, match="padding 0 must stand behind the end of a text"):
            masked_samples([("one", wrong)], mask_token=3, padding=0)


def test_next_tokens_of_texts_of_different_lengths_are_scored_up_to_the_end_of_each():
    tokens = torch.tensor([[5, 6, 7, 9], [5, 8, 9, 9]])
    samples = token_samples([("one", tokens)], padding=9)
    assert samples.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert samples.domains.tolist() == [[0, 0, -1, -1], [0, -1, -1, -1]]
    with pytest.raises(ConfigurationError, match=r"padding 9 .* a text must have 2 tokens or more before it"):
        token_samples([("one", torch.tensor([[5, 9]]))], padding=9)


def test_one_output_a_sample():
    samples = whole_samples({"pixel_values": torch.zeros(3, 1, 4, 4)}, torch.tensor([1, 0, 1]), [("cats", 2), ("dogs", 1)])
    assert samples.domains.tolist() == [[0], [0], [1]]
    assert samples.domain_names == ("cats", "dogs")
    assert whole_samples({"x": torch.zeros(2)}).domains.tolist() == [[0], [0]]
    with pytest.raises(ConfigurationError, match="must be as many in every tensor"):
        whole_samples({"x": torch.zeros(2)}, groups=[("cats", 3)])
    with pytest.raises(ConfigurationError, match="must be as many in every tensor, got"):
        whole_samples({})


def test_parts():
    samples = token_samples([("a", torch.arange(14).view(7, 2))])
    parts = list(samples.parts(3))
    assert [(start, len(part)) for start, part in parts] == [(0, 2), (2, 2), (4, 3)]
    assert torch.equal(torch.cat([part.targets for _, part in parts]), samples.targets)
    assert samples.bounds(2) == [(0, 2), (2, 4), (4, 7)]  # no sample is alone,
    assert samples.bounds(1) == [(number, number + 1) for number in range(7)]  # unless that is asked for
    assert samples.bounds(16) == [(0, 7)]


def test_parts_have_samples_of_one_kind():
    """What is taken from the next sample of a part comes from the same domain."""
    tokens = torch.zeros(5, 3, dtype=torch.int64)
    samples = token_samples([("a", tokens), ("b", tokens[:2])])
    assert samples.bounds(4) == [(0, 2), (2, 5), (5, 7)]
    mixed = Samples({"x": torch.zeros(4, 2)}, torch.tensor([[0, 0], [1, 1], [0, 0], [1, 1]]), None, ("a", "b"))
    assert mixed.bounds(4) == [(0, 4)]
