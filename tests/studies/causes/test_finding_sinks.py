"""Where the sink is: found by position and by domain, shares by hand, and what is said where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.conftest import make_sinklm
from tests.studies.causes.planted import HALF, PlantedLM, fresh, head, induction, inert, no_op, planted, repeated, sinks_of

from sinklab import attend
from sinklab.errors import ConfigurationError
from sinklab.probes.attention_received import AttentionReceived
from sinklab.studies.causes.samples import Samples, token_samples


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


def test_a_sink_need_not_be_at_the_first_position():
    model = PlantedLM([at(2), at(2), at(5)]).eval()
    sink = sinks_of(model, token_samples([("words", words_at(4))]))
    assert sink.main.place == 2
    assert sink.secondary == [5]
    assert [str(one) for one in sink.heads] == ["0.0", "0.1", "0.2"]
    assert sink.weights[:2] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert sink.weights[2] < 0.1
    assert [place for place, _ in sink.tried[:2]] == [2, 5]


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


def test_the_last_token_of_an_encoder_may_be_the_sink():
    """All queries see all keys, so that a separator at the end is a place like any other."""
    model = PlantedLM([at(22), at(3)]).eval()
    model.layers[0].self_attn.is_causal = False
    sink = sinks_of(model, token_samples([("words", words_at(4))]), threshold=0.5)
    assert sink.main.place in (3, 22)  # both get all that their head gives
    assert sink.secondary == [25 - sink.main.place]
    assert sink.weights.max() == pytest.approx(1.0, abs=1e-6)


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


def test_value_ratio_by_hand():
    model = make_sinklm().double()
    tokens = torch.randint(2, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    seen = []
    hook = model.layers[0].self_attn.v_proj.register_forward_hook(lambda _, args, output: seen.append(output))
    sink = sinks_of(model, token_samples([("text", tokens)]), place=3)
    hook.remove()
    norms = seen[0].unflatten(-1, (2, 16)).norm(dim=-1)
    others = torch.cat((norms[:, :3], norms[:, 4:]), dim=1)
    expected = norms[:, 3].mean(0) / others.flatten(0, 1).mean(0)
    np.testing.assert_allclose(sink.value_ratio[:2], expected.detach().numpy(), rtol=1e-12)


def test_batches_do_not_matter():
    known = planted("two domains", 0, texts=9)
    found = [sinks_of(known.model, known.samples, batch_size=size) for size in (1, 5, 64)]
    for one in found[1:]:
        np.testing.assert_allclose(one.weights, found[0].weights, rtol=1e-12)
        np.testing.assert_allclose(one.value_ratio, found[0].value_ratio, rtol=1e-12)


def test_padding_is_neither_a_key_nor_a_query():
    """A text padded on the left has its BOS where its mask begins, and that is position 0."""
    model = make_sinklm().double()
    tokens = torch.randint(2, 300, (1, 10), generator=torch.Generator().manual_seed(0))
    plain = sinks_of(model, token_samples([("text", tokens)]), place=0)
    padded = torch.cat((torch.ones(1, 3, dtype=torch.int64), tokens), dim=1)
    mask = torch.cat((torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 10, dtype=torch.int64)), dim=1)
    samples = Samples({"input_ids": padded, "attention_mask": mask}, torch.zeros(1, 13, dtype=torch.int64), padded)
    sink = sinks_of(model, samples, place=0)
    assert sink.length == 10
    np.testing.assert_allclose(sink.weights, plain.weights, rtol=1e-12)
    np.testing.assert_allclose(sink.value_ratio, plain.value_ratio, rtol=1e-12)


def test_heads_without_values_to_compare():
    """Values of all tokens are 0: there is no ratio, and no warning of a division."""
    model = PlantedLM([no_op(), inert()]).eval()
    model.layers[0].self_attn.v_proj.weight.data.zero_()
    sink = sinks_of(model, token_samples([("fresh", fresh(3, 0))]))
    assert np.isnan(sink.value_ratio).all()
