"""Where the sink is: found by position and by domain, shares by hand, and what is said where there is none."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import make_sinklm
from tests.studies.causes.planted import HALF, PlantedLM, fresh, head, induction, repeated, sinks_of

from sinklab import attend
from sinklab.errors import ConfigurationError
from sinklab.probes.attention_received import AttentionReceived
from sinklab.studies.causes.samples import token_samples


def at(position: int):
    """A head that gives nearly all to the word at a position of the texts of :func:`words_at`."""
    one = head(sink=0.0)
    one.query[0, :] = 0.0
    one.query[0, -25] = 1.0  # the coordinate that is one
    one.key[0, :] = 0.0
    one.key[0, position] = 20.0  # token number ``position``, which stands there
    return one


def words_at(texts: int):
    """Texts in which token k stands at position k: the same one many times, for heads that look for a token."""
    return torch.arange(2 * HALF + 1).expand(texts, -1)


def test_a_position_that_few_queries_see_is_no_sink():
    """Two queries see position 20 of 23, and give it everything."""
    model = PlantedLM([at(20)]).eval()
    with pytest.raises(ConfigurationError, match=r"no sink found"):
        sinks_of(model, token_samples([("words", words_at(4))])).require()
    assert sinks_of(model, token_samples([("words", words_at(4))]), place=20).weights == pytest.approx([1.0], abs=1e-6)


def test_windows_that_hide_every_place_are_named():
    model = make_sinklm(window=4).eval()
    tokens = torch.randint(0, model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigurationError, match=r"in texts of 32 positions none is seen by half of a module's queries"):
        sinks_of(model, token_samples([("words", tokens)])).require()
    assert sinks_of(model, token_samples([("words", tokens[:, :6])]), threshold=0.01).main.place in range(6)


def test_shares_are_those_of_the_queries_that_are_not_the_sink():
    """Against the probe that averages columns, which counts the query at the key itself too."""
    model, tokens = make_sinklm(), torch.randint(2, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    probe = AttentionReceived()
    with torch.no_grad(), attend(model, [probe]) as session:
        model(input_ids=tokens)
    table = session.table()
    sink = sinks_of(model, token_samples([("text", tokens)]), place=0, batch_size=2)
    for (layer, number), weight in zip([(0, 0), (0, 1), (1, 0), (1, 1)], sink.weights, strict=True):
        rows = table[(table["layer"] == layer) & (table["head"] == number) & (table["key_position"] == 0)]
        column = rows["value"].item()
        # The query at position 0 gives itself 1: one of twenty. Float32 weights against float32 weights.
        assert weight == pytest.approx((20 * column - 1) / 19, abs=1e-6)


def test_a_sink_in_one_domain_is_not_hidden_by_another():
    """The induction head rests on BOS in all of a fresh text and in half of a repeated one: three times in four."""
    both = [("repeated", repeated(5, 0)), ("fresh", fresh(5, 1))]
    model = PlantedLM([induction()]).eval()
    sink = sinks_of(model, token_samples(both), threshold=0.9)
    assert sink.main.place == 0
    assert dict(sink.tried)[0] > 0.99
    assert sink.weights == pytest.approx([0.75], abs=0.01)
    with pytest.raises(ConfigurationError, match="no sink found"):
        sinks_of(model, token_samples(both[:1]), threshold=0.9).require()
