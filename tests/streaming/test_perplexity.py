"""Losses under a policy: the definition by hand, chunks against single tokens, dense against the model itself, intervals."""

import math

import pytest
import torch
from tests.conftest import make_sinklm
from tests.streaming.decoders import slow_logits

from sinklab.errors import InputError
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.perplexity import decoding, estimate, losses, unit_means


@pytest.fixture(scope="module")
def model():
    """Random weights, sharpened: with small ones attention is flat, and who sees whom hardly shows."""
    model = make_sinklm()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(8)
    return model


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(2, 300, (2, 50), generator=torch.Generator().manual_seed(0))


def test_equal_to_the_published_rule_token_by_token(model, tokens):
    logits = slow_logits(model, tokens[:, :-1], num_sinks=2, window=7)
    expected = -logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    found = losses(model, tokens, SinkWindow(num_sinks=2, window=7))
    # Two orders of float32 sums over logits of size 1; the bound of the cache's own tests.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_window_over_everything_is_the_models_own_loss(model, tokens):
    with torch.no_grad():
        own = model(input_ids=tokens, labels=tokens).loss
    assert losses(model, tokens, SinkWindow(num_sinks=0, window=49)).mean().item() == pytest.approx(own.item(), abs=1e-5)


def test_tokens_before_the_first_are_read_and_not_scored(model, tokens):
    policy = SinkWindow(num_sinks=1, window=6)
    told = []
    part = losses(model, tokens, policy, first=30, chunk=8, progress=lambda done, total: told.append((done, total)))
    assert part.shape == (2, 20)
    torch.testing.assert_close(part, losses(model, tokens, policy)[:, 29:], atol=1e-4, rtol=0)
    assert told[-1] == (98, 98)


@pytest.mark.parametrize(("length", "first"), [(1, 1), (5, 5), (5, 0)])
def test_nothing_to_score(model, length, first):
    with pytest.raises(InputError, match=f"of {length} tokens those from {first} on cannot be scored"):
        losses(model, torch.zeros(1, length, dtype=torch.long), "sink_window", first=first)


class TestEstimate:
    def test_rows_are_the_units(self):
        values = torch.arange(8.0)[:, None].expand(8, 5)
        assert unit_means(values).tolist() == list(range(8))
        found = estimate(values)
        # Mean 3.5; standard deviation sqrt(6), t(7) = 2.3646: half width 2.3646 * sqrt(6 / 8).
        assert found.mean == 3.5
        assert found.high - found.mean == pytest.approx(2.3646 * math.sqrt(6 / 8), abs=1e-4)
        assert found.mean - found.low == pytest.approx(found.high - found.mean)

    def test_few_rows_are_cut_into_blocks(self):
        assert unit_means(torch.arange(12.0)[None]).tolist() == [0.5, 2.5, 4.5, 6.5, 8.0, 9.0, 10.0, 11.0]
        assert len(unit_means(torch.zeros(3, 30))) == 9

    def test_what_was_not_measured_is_left_out(self):
        values = torch.full((8, 4), torch.nan)
        values[:, 1] = torch.arange(8.0)
        values[3] = torch.nan
        assert unit_means(values).tolist() == [0, 1, 2, 4, 5, 6, 7]

    def test_one_unit_has_no_interval_and_none_no_mean(self):
        one = estimate(torch.tensor([[2.0]]))
        assert (one.mean, one.low, one.high) == (2.0, None, None)
        with pytest.raises(InputError, match="no value"):
            estimate(torch.full((2, 3), torch.nan))


class TestDecoding:
    def test_bytes_are_those_of_the_slots(self, model, tokens):
        policies = [SinkWindow(num_sinks=2, window=7), "full"]
        bounded, full = decoding(model, tokens[:1], policies, steps=5, warm_up=2)
        # Keys and values of 10 slots and the first form of the 2 sinks: 2 layers of 2 heads of 16 in float32.
        assert bounded.bytes_held == (2 * 10 + 2) * 2 * 2 * 16 * 4
        assert full.bytes_held == 2 * 50 * 2 * 2 * 16 * 4
        assert bounded.steps == full.steps == 5
        assert bounded.tokens_per_second > 0

    def test_a_text_that_is_too_short(self, model, tokens):
        with pytest.raises(InputError, match=r"one row of more than 16 \+ 128 tokens; got 1 of 50"):
            decoding(model, tokens[:1], ["sink_window"])
