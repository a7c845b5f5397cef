"""The value that says where sinks are: how places are told apart, which key it is in a call, and ids of tokens in calls."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from tests.conftest import make_loud, make_sinklm, mask_of_documents
from transformers import BartConfig, BartForCausalLM, BertConfig, BertModel, SegformerConfig, SegformerModel

from sinklab import attend
from sinklab.attention.probe import Watcher
from sinklab.errors import ConfigurationError, SessionError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.policies.pinned import Pinned
from sinklab.results.intervals import LEAST_SHARE
from sinklab.sinks import Head, Sink, SinkFinder, Sinks, find_sinks
from sinklab.sinks.finder import Hits, enough_documents, places
from sinklab.sinks.finding import SinkWeights
from sinklab.studies.measure.from_weights import from_weights

LOUD = 7


def planted(*, loud: float = 40.0, operation=None):
    """Two layers, the first of which attends to the key of token 7, wherever it stands."""
    return make_loud(LOUD, operation=operation, score=loud)


def texts(*positions: int, length: int = 24):
    """One text for each position, at which the loud token stands; other tokens are random."""
    tokens = torch.randint(10, 300, (len(positions), length), generator=torch.Generator().manual_seed(0))
    tokens[torch.arange(len(positions)), list(positions)] = LOUD
    return tokens


class Calls(Watcher):
    name, needs = "calls", frozenset()

    def __init__(self):
        self.seen = []

    def update(self, call, statistics):
        self.seen.append(call)


def calls_of(model, **inputs):
    watcher = Calls()
    with torch.no_grad(), attend(model, [watcher]):
        model(**inputs)
    return watcher.seen


class TestKinds:
    def test_the_place_is_fixed_and_the_token_is_not(self):
        tokens = texts(2, 2, 2, 2)
        model = planted()
        with torch.no_grad():
            model.embed_tokens.weight[tokens[:, 2], 1] = 1.0
            for row, token in enumerate((7, 8, 9, 6)):
                tokens[row, 2] = token
                model.embed_tokens.weight[token, :2] = 1.0
        found = find_sinks(model, tokens)
        assert (found.main.kind, found.main.position) == ("position", 2)
        assert found.main.token_share == 0.25
        assert found.describe() == "position 2"
        assert found.main.heads[:2] == ((Head(0, 0), 100.0), (Head(0, 1), 100.0))

    def test_the_token_is_fixed_and_the_place_is_not(self):
        found = find_sinks(planted(), texts(2, 5, 3, 9), decode=lambda token: {LOUD: "\n"}.get(token, "x"))
        assert (found.main.kind, found.main.token, found.main.position) == ("token", LOUD, None)
        assert found.describe() == "the first “↵”"
        assert found.main.rate == 50.0  # one layer of two
        assert found.weights[:2] == pytest.approx([1.0, 1.0], abs=1e-3)
        assert found.positions == found.secondary == []

    def test_both_are_fixed(self):
        """Nothing says which of the two it is; a position needs no token to be found by."""
        found = find_sinks(planted(), texts(2, 2, 2), decode=str)
        assert found.main.kind == "position"
        assert found.describe() == "position 2, token “7”"

    @pytest.mark.parametrize("window", [10, 20])
    def test_a_mean_as_large_as_the_threshold_makes_no_sink(self, window):
        finder = SinkFinder(threshold=1 / window)
        model = SinkLM(SinkLMConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, window=window))
        with torch.no_grad(), attend(model.eval(), [finder]):
            model.layers[0].self_attn.q_proj.weight.zero_()  # rows are even: 1/window for each key once the window is full
            model(torch.randint(32, (3, 2 * window), generator=torch.Generator().manual_seed(0)))
        # Half of the queries see these two positions, and all of them 1/window at a time.
        assert finder.candidates == window + 1
        assert finder.rates()[window - 1] == finder.rates()[window] == 0.0

    def test_there_is_none(self):
        found = find_sinks(planted(loud=0.0), texts(2, 5, 3))
        assert found.main is None
        assert found.describe() == "none"
        assert np.isnan(found.weights).all()
        with pytest.raises(ConfigurationError, match=r"no sink found: no head gives any place a mean weight of 0\.3; tried"):
            found.require()

    def test_of_rows_that_do_not_sum_to_one_each_place_needs_a_weight_of_its_own(self):
        """Divided by their sums, nearly empty rows show position 0; what a head does elsewhere makes no sink of it."""
        found = find_sinks(planted(operation={"name": "sigmoid", "bias": -8.0}), texts(5, 5, 5), threshold=0.1)
        assert [sink.position for sink in found.sinks] == [5]
        assert 0 in [sink.position for sink in found.silent]
        assert found.heads_by_weight == 2

    def test_a_token_that_wanders_is_loud_where_it_stands(self):
        """It has all of 0.9 in each text and, over the texts, a quarter of that at each of its positions."""
        found = find_sinks(planted(operation={"name": "sigmoid", "bias": -8.0}), texts(2, 5, 3, 9))
        assert found.describe() == f"the first token {LOUD}"
        assert found.heads_by_weight == 0

    def test_a_token_of_quiet_rows_is_silent_whatever_another_head_gives(self):
        """Head 0 gives the token 0.002 and the others 0.0001; head 1 gives 0.9 to every key."""
        tokens = texts(2, 5, 3, 9)
        weights = torch.stack((torch.full((4, 24, 24), 1e-4), torch.full((4, 24, 24), 0.9)), dim=1)
        weights[:, 0] = weights[:, 0].where(tokens[:, None] != LOUD, 2e-2)
        found = from_weights(weights.tril()[None], tokens=tokens, row_sums="any").sinks
        assert (found.main, found.heads_by_weight) == (None, 1)
        assert [sink.describe() for sink in found.silent] == [f"the first token {LOUD}"]
        weights[:, 0] *= 40
        assert from_weights(weights.tril()[None], tokens=tokens, row_sums="any").sinks.main.token == LOUD

    @pytest.mark.parametrize(("loud", "bias", "found"), [(19.0, -8.0, "the pair (positions 1, 3)"), (1.0, -20.0, "none")])
    def test_positions_with_a_role_in_common_are_judged_by_their_weights_together(self, loud, bias, found):
        """Each has half of the rows of a head, which sum to two, or to next to nothing."""
        tokens = texts(1, 1, 1)
        tokens[:, 3] = LOUD
        model = planted(loud=loud, operation={"name": "sigmoid", "bias": bias})
        sinks = find_sinks(model, tokens, threshold=0.6, together={"the pair": (1, 3)})
        assert sinks.describe() == found
        assert [sink.name for sink in (*sinks.sinks, *sinks.silent)] == ["the pair"]

    def test_the_null_score(self):
        model = make_sinklm({"name": "sink_logit"})
        with torch.no_grad():
            for layer in model.layers:
                next(p for n, p in layer.self_attn.named_parameters() if n.startswith("operation_state")).fill_(20.0)
        found = find_sinks(model, texts(2, 3))
        assert found.describe() == "null score (learned sink logit)"
        assert found.main.rate == 100.0
        assert found.main.mass > 0.99
        assert found.weights == pytest.approx([1.0] * 4, abs=1e-3)


def hits(*rows: tuple[int, int, int, bool, int]) -> Hits:
    """Rows of head, token, position, first of its kind, documents."""
    head, token, position, first, count = (np.array(column) for column in zip(*rows, strict=True))
    once, ones = np.ones(len(head), dtype=bool), np.ones(len(head))
    return Hits(head, token, position, first.astype(bool), once, count, ones, ones, count)


class TestWhatCounts:
    """Every head is decided by the documents in which it sinks; how many heads there are beside it plays no part."""

    @pytest.mark.parametrize(("documents", "least"), [(1, 1), (2, 2), (8, 3), (32, 7), (1000, 119)])
    def test_a_head_sinks_if_the_whole_interval_of_its_share_lies_above_a_tenth(self, documents, least):
        cases = np.array([documents] * 144)
        assert enough_documents(cases).tolist() == [least] * 144
        for count in (least - 1, least):
            low = scipy.stats.binomtest(count, documents).proportion_ci(0.95, method="wilson").low
            assert (low > LEAST_SHARE) == (count == least)

    def test_one_head_of_many_is_enough(self):
        """0.69 % of (document, head), all of them in one head."""
        assert list(places(hits((5, 7, 0, True, 32)), np.full(144, 32.0))) == [("position", 0)]

    def test_a_token_is_followed_if_it_is_not_its_first_occurrence_that_counts(self):
        first = [(0, LOUD, position, True, 5) for position in (4, 7, 10)]
        later = [(0, LOUD, position, False, 5) for position in (10, 12)]
        assert list(places(hits(*first), np.full(4, 32.0))) == [("first", LOUD)]
        assert list(places(hits(*first, *later), np.full(4, 32.0))) == [("anywhere", LOUD)]

    def test_a_token_wherever_it_stands_is_no_position(self):
        """A head that shares its attention among all line breaks: the verdict names the token, and says what is not known."""
        places_of = [(3, 6), (2, 9), (5, 8), (4, 7), (3, 9), (2, 6)]
        tokens = texts(*(first for first, _ in places_of))
        for row, (_, second) in enumerate(places_of):
            tokens[row, second] = LOUD
        found = find_sinks(planted(), tokens, decode=lambda token: {LOUD: "\n"}.get(token, "x"))
        (followed,) = found.followed
        assert found.main is None
        assert (followed.token, followed.anywhere, followed.rate, followed.sinking) == (LOUD, True, 50.0, 2)
        assert followed.heads == ((Head(0, 0), 100.0), (Head(0, 1), 100.0))  # twice in every document, counted once
        with pytest.raises(ConfigurationError, match=r"no sink found that stays at a place: “↵” wherever it stands in 50 %"):
            found.require()

    @pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
    def test_the_value_that_stands_there(self, scale):
        model = planted()
        with torch.no_grad():
            model.layers[0].self_attn.v_proj.weight.zero_()
            model.layers[0].self_attn.v_proj.weight[:, 0] = 1.0  # all tokens have 1 there, and the loud one has scale
            model.embed_tokens.weight[LOUD, 0] = scale
            model.embed_tokens.weight[:, 2:] = 0.0
            model.embed_tokens.weight[LOUD, 2] = 1.0
        tokens = texts(2, 2, 2)
        (call, _) = calls_of(model, input_ids=tokens)
        norms = call.values.norm(dim=-1)
        others = norms[:, :, torch.arange(24) != 2].mean(-1)
        expected = float((norms[:, :, 2] / others).mean())
        found = find_sinks(model, tokens)
        if scale == 1.0:
            assert expected == pytest.approx(1.0, rel=0.5)
        assert found.main.position == 2
        assert found.main.value_ratio == pytest.approx(expected, rel=1e-5)


class TestFinder:
    def test_by_itself_it_finds_what_find_sinks_finds(self):
        """The audit asks it after one pass of its own, without the merging of domains."""
        tokens, finder = texts(2, 5, 3, 9), SinkFinder()
        model = planted()
        with torch.no_grad(), attend(model, [finder]):
            model(input_ids=tokens)
        assert finder.sinks(decode=str) == dataclasses.replace(
            find_sinks(model, tokens, decode=str), sinks=finder.sinks(decode=str).sinks
        )
        (found,) = finder.sinks(decode=str).sinks
        assert dataclasses.replace(find_sinks(model, tokens, decode=str).main, mass=None) == found

    def test_the_strongest_comes_first_whatever_its_kind(self):
        """Three of four heads rest on the null score, one on position 2."""
        model = planted(operation={"name": "sink_logit"})
        with torch.no_grad():
            first, second = (
                next(p for n, p in layer.self_attn.named_parameters() if n.startswith("operation_state"))
                for layer in model.layers
            )
            first.copy_(torch.tensor([-30.0, 3e4]).view_as(first))
            second.fill_(30.0)
        found = find_sinks(model, texts(2, 2, 2))
        assert [(sink.kind, sink.rate) for sink in found.sinks] == [("null", 75.0), ("position", 25.0)]
        assert found.main.sinking == 3

    def test_padding_is_no_value(self):
        tokens = texts(2, 2, 2)
        padded = torch.cat((torch.full((3, 5), 11), tokens), dim=1)
        mask = torch.ones_like(padded)
        mask[:, :5] = 0
        plain = find_sinks(planted(), tokens)
        other = find_sinks(planted(), {"input_ids": padded, "attention_mask": mask})
        assert other.main.value_ratio == pytest.approx(plain.main.value_ratio, rel=1e-4)
        np.testing.assert_allclose(other.value_ratio, plain.value_ratio, rtol=1e-4)

    def test_values_of_one_text_and_of_heads_without_any(self):
        model, tokens = planted(), texts(2)
        (call, _) = calls_of(model, input_ids=tokens)
        norms = call.values.norm(dim=-1)[0]
        expected = norms[:, 2] / norms[:, torch.arange(24) != 2].mean(-1)
        np.testing.assert_allclose(find_sinks(model, tokens).value_ratio[:2], expected, rtol=1e-5)
        with torch.no_grad():
            model.layers[0].self_attn.v_proj.weight.zero_()
        found = find_sinks(model, tokens)
        assert np.isnan(found.value_ratio[:2]).all()
        assert np.isfinite(found.value_ratio[2:]).all()
        assert found.main.value_ratio is None

    def test_a_null_value_is_one_value_for_all_batches(self):
        model = make_sinklm({"name": "key_value_bias"})
        whole, parts = (find_sinks(model, texts(2, 3, 4, 5), place="null", batch_size=size) for size in (4, 1))
        np.testing.assert_allclose(whole.value_ratio, parts.value_ratio, rtol=1e-5)
        assert np.isfinite(whole.value_ratio).all()

    @pytest.mark.parametrize("operation", [None, {"name": "sigmoid", "bias": -1.0}])
    def test_what_was_tried_is_the_share_of_the_queries_that_do_not_stand_there(self, operation):
        model, tokens = planted(loud=0.5, operation=operation), texts(2, 2)
        shares = []
        for call in calls_of(model, input_ids=tokens):
            weights = call.weights(0, 24)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-8)
            shares.append(torch.stack([weights[:, :, key + 1 :, key].mean((0, 2)) for key in range(12)]).T)
        expected = torch.cat(shares).amax(0)
        tried = dict(find_sinks(model, tokens, threshold=0.9).tried)
        np.testing.assert_allclose([tried[key] for key in range(12)], expected, rtol=1e-5)


def test_it_is_a_value_that_can_be_written_down():
    found = find_sinks(planted(), texts(2, 5, 3, 9), decode=str, corpus="mine", bos=0)
    assert found == find_sinks(planted(), texts(2, 5, 3, 9), decode=str, corpus="mine", bos=0)
    record = json.loads(json.dumps(found.to_dict()))
    assert [(one["position"], one["rate"]) for one in record["sinks"]] == [(sink.position, sink.rate) for sink in found.sinks]
    assert (record["corpus"], record["samples"], record["seq_len"], record["threshold"]) == ("mine", 4, 24, 0.3)


def test_batches_do_not_matter():
    whole, parts = (find_sinks(planted(), texts(2, 5, 3, 9, 9), batch_size=size) for size in (5, 2))
    assert whole == dataclasses.replace(parts, sinks=whole.sinks)
    assert [sink.place for sink in whole.sinks] == [sink.place for sink in parts.sinks]
    np.testing.assert_allclose(whole.weights, parts.weights, rtol=1e-5)


def test_a_cache_is_refused():
    model = planted()
    with torch.no_grad(), attend(model, [SinkFinder()]):
        cache = model(input_ids=texts(2)[:, :6], use_cache=True).past_key_values
        with pytest.raises(SessionError, match="run the model without a cache"):
            model(input_ids=texts(2)[:, 6:9], past_key_values=cache)


def test_fewer_keys_than_queries():
    """SegFormer merges its keys, so that no query stands on one; only in its last stage is every token a key."""
    torch.manual_seed(0)
    shape = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2]}
    model = SegformerModel(SegformerConfig(**shape, attn_implementation="eager")).eval()
    finder, known = SinkFinder(), SinkWeights(Sinks.at(0))
    pictures = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), attend(model, [finder, known]):
        model(pixel_values=pictures)
    with torch.no_grad():
        weights = model(pixel_values=pictures, output_attentions=True).attentions
    assert [tuple(one.shape[2:]) for one in weights] == [(256, 4), (64, 4), (16, 4), (4, 4)]
    expected = torch.cat([one[:, :, 1 if one.shape[2] == 4 else 0 :, 0].mean((0, 2)) for one in weights])
    np.testing.assert_allclose(known.completed().weights, expected, rtol=1e-5)
    behind = [(one.sum(2) - one.diagonal(dim1=2, dim2=3)) / 3 if one.shape[2] == 4 else one.mean(2) for one in weights]
    best = torch.cat([one.mean(0) for one in behind]).amax(0)
    np.testing.assert_allclose([finder.tried()[key] for key in range(4)], best, rtol=1e-5)


class TestKeys:
    def test_a_token_stands_elsewhere_in_every_row(self):
        tokens = texts(2, 5)
        tokens[0, 9] = LOUD  # a later one is not the first
        (call, _) = calls_of(planted(), input_ids=tokens)
        sinks = Sinks.at(Sink(kind="token", token=LOUD))
        assert sinks.keys(call).tolist() == [[2] * 24, [5] * 24]
        assert Sinks.at(3).keys(call).tolist() == [[3] * 24] * 2
        for none in (Sinks.at("null"), Sinks.at(None), Sinks.at(99), Sinks.at(Sink(kind="token", token=5))):
            assert (none.keys(call) == -1).all()

    def test_padding_moves_the_key_and_not_the_position(self):
        tokens = torch.cat((torch.full((1, 3), LOUD), texts(2)), dim=1)
        mask = torch.ones_like(tokens)
        mask[:, :3] = 0
        (call, _) = calls_of(planted(), input_ids=tokens, attention_mask=mask)
        assert call.key_tokens[0, :3].tolist() == [-1] * 3
        for sinks in (Sinks.at(2), Sinks.at(Sink(kind="token", token=LOUD))):
            assert sinks.keys(call)[0].tolist() == [-1] * 3 + [5] * 24
            place = torch.as_tensor(sinks.place_in(tokens, mask))
            assert place.flatten().tolist() == [2]

    def test_every_document_of_a_packed_row_has_its_own(self):
        tokens = torch.cat((texts(2, length=8), texts(5, length=8)), dim=1)
        positions = torch.arange(8).repeat(2)[None]
        (call, _) = calls_of(planted(), input_ids=tokens, position_ids=positions, attention_mask=mask_of_documents(positions))
        sinks = Sinks.at(Sink(kind="token", token=LOUD))
        assert call.key_documents.max() == 1
        assert sinks.keys(call)[0].tolist() == [2] * 8 + [13] * 8


def test_tokens_behind_a_cache_are_not_known():
    model, tokens = planted(), texts(2)
    with torch.no_grad():
        cache = model(input_ids=tokens[:, :6], use_cache=True).past_key_values
    call = calls_of(model, input_ids=tokens[:, 6:8], past_key_values=cache)[0]
    assert call.key_tokens is None
    assert Sinks.at(2).keys(call).tolist() == [[2, 2]]
    with pytest.raises(
        ConfigurationError, match=r"the sink is the first token \d+, and which tokens the cache holds is not known"
    ):
        Sinks.at(Sink(kind="token", token=LOUD)).keys(call)


def test_a_text_of_one_token_has_no_other_value_to_compare_with():
    """It has a sink, which is all that it has, and says nothing of how long the value there is."""
    model, tokens = planted(), texts(0, 0, 0)
    mask = torch.ones_like(tokens)
    expected = find_sinks(model, {"input_ids": tokens[:2], "attention_mask": mask[:2]}).main
    mask[2, 1:] = 0
    found = find_sinks(model, {"input_ids": tokens, "attention_mask": mask}).main
    assert found.rate > expected.rate
    heads = {head for head, _ in expected.heads}
    assert heads < {head for head, _ in found.heads}
    assert found.value_ratio == pytest.approx(expected.value_ratio, rel=1e-6)


def test_texts_so_short_that_an_even_share_passes_for_a_sink_are_said():
    model, tokens = make_sinklm({"name": "softmax"}), torch.arange(9).expand(2, 9)
    bert = BertModel(BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    with pytest.warns(
        UserWarning, match=r"find_sinks: In texts of 9 tokens .* position 0\.31 of its attention, more than 0\.3:"
    ):
        find_sinks(model, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_sinks(model, torch.arange(10).expand(2, 10))
        find_sinks(model, tokens, threshold=0.32)
        # In both directions an even share is one of all keys, and no position is the first to be seen.
        find_sinks(bert.eval(), torch.arange(4).expand(2, 4))


class TestInFront:
    """Learned tokens in front have the first positions of a text and no id, and are called what they are."""

    def fronted(self, count, *, loud=()):
        """Heads of the first layer attend to the keys of some of the tokens in front, and to those of token 7."""
        model = planted(operation={"name": "sink_token", "count": count})
        with torch.no_grad():
            model.front_tokens.weight[:, :2] = torch.tensor([1.0, 0.0])
            model.front_tokens.weight[list(loud), 1] = 1.0
        return model

    @pytest.mark.parametrize("padded", [False, True])
    def test_calls_know_which_keys_have_no_id(self, padded):
        tokens = texts(2, 3, length=6)
        mask = torch.ones_like(tokens)
        if padded:
            mask[0, :2] = 0
        call = calls_of(self.fronted(2), input_ids=tokens, attention_mask=mask)[0]
        assert call.front == 2
        assert call.key_tokens.tolist() == [[-1, -1, *row] for row in tokens.masked_fill(mask == 0, -1).tolist()]
        assert calls_of(make_sinklm(), input_ids=tokens)[0].front == 0

    @pytest.mark.parametrize(("count", "name"), [(1, "the learned token in front"), (3, "learned token 1 of 3 in front")])
    def test_the_sink_is_the_learned_token(self, count, name):
        found = find_sinks(self.fronted(count, loud=[0]), torch.randint(10, 300, (4, 24)))
        assert (found.main.position, found.main.name, found.front) == (0, name, count)
        assert found.describe() == f"{name} (position 0)"
        assert found.positions_in_text == []
        with pytest.raises(ConfigurationError, match="which every policy keeps"):
            Pinned.of(found, window=4)

    def test_a_policy_pins_the_token_of_the_text(self):
        tokens = texts(3, 3, 3, 3)
        model = self.fronted(2)
        with torch.no_grad():
            for row in range(4):
                tokens[row, 3] = LOUD + row
                model.embed_tokens.weight[LOUD + row, 1] = 1.0
        found = find_sinks(model, tokens)
        assert (found.main.position, found.main.called, found.positions_in_text) == (5, None, [3])
        assert Pinned.of(found, window=4).pinned == (3,)


def test_padding_that_a_model_takes_for_text():
    config = BartConfig(vocab_size=40, d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32)
    ids, mask = torch.randint(4, 40, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    with pytest.warns(UserWarning, match="BartForCausalLM gives a row padded in front other logits than the row alone"):
        find_sinks(BartForCausalLM(config).eval(), {"input_ids": ids, "attention_mask": mask})
