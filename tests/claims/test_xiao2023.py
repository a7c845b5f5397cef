"""Claims of Xiao et al. 2023: texts that models read, what is measured on them, and where a hidden sink's weight goes."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from tests.claims.planted_models import by_position, drawn_rows, model_like, read_like
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from sinklab.attention.session import attend
from sinklab.corpora import resolve_corpus
from sinklab.errors import DoesNotApply
from sinklab.interventions.hide_key import HideKey
from sinklab.models.loading import load_model, wrap_model
from sinklab.registry import claims
from sinklab.streaming.perplexity import losses
from sinklab.training.rows import token_losses
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.reproduce.store import claim_called
from sinklab_claims.xiao2023 import CACHES, LINES, TOGETHER, Shares, first_tokens, freed, line_stream
from sinklab_claims.xiao2023_streams import LAST, late_in_a_stream, texts_of

# --- texts that a trained model reads -----------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    """Four texts of a draw."""
    streams = Checkpoint.streams
    monkeypatch.setattr(Checkpoint, "streams", lambda self, number=4, **how: streams(self, number, **how))


def draw(seed: int):
    return texts_of(Checkpoint(load_model("embedded:softmax"), resolve_corpus("python_source"), seed))


def test_a_seed_is_a_draw_of_texts_that_start_with_bos(few):
    texts, again, others = draw(0), draw(0), draw(1)
    assert (texts.rows.shape, texts.trained, texts.budget) == ((4, 1024), 256, 64)
    assert torch.equal(texts.rows, again.rows)
    assert not torch.equal(texts.rows, others.rows)
    assert set(texts.rows[:, 0].tolist()) == {texts.bos}


def test_texts_are_longer_than_the_cache_and_need_not_be_longer_than_the_training():
    """Of a model of today: 1,024 tokens and a cache of 256, whatever it was trained on; what is about that is not measured."""
    loaded = load_model("embedded:softmax")
    config = copy.deepcopy(loaded.model.config)
    config.max_position_embeddings = 8192
    modern = dataclasses.replace(loaded, model=SimpleNamespace(config=config, device=loaded.model.device))
    texts = texts_of(Checkpoint(modern, resolve_corpus("python_source")))
    assert (texts.rows.shape, texts.trained, texts.budget) == ((16, 1024), 8192, 256)
    assert len(range(LAST)[texts.last]) == 8
    assert texts_of(Checkpoint(modern, resolve_corpus("python_source"), streamed=512)).budget == 128
    with pytest.raises(DoesNotApply, match="trained on 8,192 tokens, and texts 4 times as long, 32,768 tokens, are more"):
        Checkpoint(modern, resolve_corpus("python_source")).streams(past_training=True)
    reads = {name: claim_called(name).checkpoint.reads for name in ("number_of_sinks", "position_inside_the_cache")}
    assert reads == {"number_of_sinks": "long", "position_inside_the_cache": "past the training"}


def test_recomputation_is_that_of_the_policy(few):
    texts = draw(0)
    rows = texts.rows[:, -8 - texts.budget - 1 :]
    expected = losses(texts.loaded.model, rows, {"name": "recompute", "window": texts.budget}, first=texts.budget + 1)
    # Float32 losses of order 1 to 10 after the same products in another order.
    assert torch.allclose(dataclasses.replace(texts, bos=None).recomputed()[:, -8:], expected, atol=1e-3)
    window = texts.rows[1, -texts.budget - 2 :].clone()
    window[0] = texts.bos
    with torch.no_grad():
        alone = token_losses(texts.loaded.model, window[None], after=texts.budget)
    assert texts.recomputed()[1, -1].item() == pytest.approx(alone.item(), abs=1e-3)


def test_windows_of_a_large_model_are_begun_anew_for_sixteen_tokens_at_a_time(few):
    """Of each group the tokens see what a text of their own has, eight fewer than a window to seven more."""
    texts = dataclasses.replace(draw(0), large=True, bos=None)
    found = texts.recomputed().view(len(texts.rows), -1, TOGETHER)
    assert found[0].numel() == LAST
    for group, column in ((0, 0), (-1, TOGETHER - 1)):
        last = texts.rows.shape[1] - LAST + (group % found.shape[1]) * TOGETHER + column
        seen = texts.budget + 1 - TOGETHER // 2 + column
        with torch.no_grad():
            alone = token_losses(texts.loaded.model, texts.rows[:1, last - seen : last + 1], after=seen - 1)
        assert found[0, group, column].item() == pytest.approx(alone.item(), abs=1e-3)


@pytest.fixture(scope="module")
def foreign():
    """A random model of another architecture with the embedded model's tokenizer."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=2048, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return wrap_model(GPTNeoXForCausalLM(config).eval(), tokenizer=load_model("embedded:softmax").tokenizer)


@pytest.mark.parametrize(
    "name", [name for name in claims if (how := claim_called(name).checkpoint) and how.reads in ("long", "past the training")]
)
def test_what_is_measured_is_what_is_judged(foreign, few, name):
    claim = claim_called(name)
    numbers = claim.checkpoint.measure(Checkpoint(foreign, resolve_corpus("python_source")))
    for part in (*(claim.checkpoint.parts or claim.parts), *claim.presupposes):
        assert all(math.isfinite(numbers[label][metric]) for label, metric in part.effect.needs())


@pytest.mark.parametrize(("bos", "number"), [(0, 10), (None, 10), (0, 9)])
def test_tokens_late_in_a_stream_are_those_at_the_start_of_texts(bos, number):
    """With the token itself for its loss, and no two texts alike, the means agree only if the tokens do."""
    rows = torch.arange(number)[:, None] * 1000 + torch.arange(256)
    texts = SimpleNamespace(all_rows=rows, bos=bos, budget=16, large=False)
    read = []

    def losses(policy, rows, first):
        read.append((policy, rows.shape))
        return rows[:, first:].float()

    texts.losses = losses
    numbers = late_in_a_stream(texts)
    fresh, *late = (numbers[label]["loss"] for label in ("text by itself", "late, four sinks", "late, no sinks"))
    assert late == [fresh, fresh]
    front = 0 if bos is None else 1
    # Of a text by itself nothing has left a cache of 16 tokens and the query: the last one scored sees 16 before its query.
    assert read[0] == ("full", (number - 1, front + 16))
    assert {shape for _, shape in read[1:]} == {(1, 256 + (number - 1) * (256 - front))}


def test_no_line_lies_where_a_cache_holds_a_part_of_it():
    loaded = load_model("embedded:softmax")
    found = {
        question.distance
        for back in LINES
        for question in line_stream(loaded.encoder, back, budget=160, rows=1, seed=0, bos=True)[1]
        if question.start > 160
    }
    assert found == {72, 122, 147, 222, 272}
    for size in CACHES.values():
        assert not any(size < distance <= size + 25 for distance in found)


# --- what is read from trained models -----------------------------------------------------------------------------------------


def trained_like(**fields):
    """Random weights, and random rows of 64 tokens behind token 1."""
    rows = torch.randint(2, 40, (128, 64), generator=torch.Generator().manual_seed(1))
    rows[:, 0] = 1
    return read_like(model_like(initializer_range=0.5, **fields), rows)


def test_a_window_in_one_layer_is_that_of_the_architecture_and_that_encoded_anew():
    """One layer's keys know their own token alone and rotary scores know distances, so it is the same whatever came before."""
    numbers = first_tokens(trained_like())
    windowed = trained_like(window=16)
    with torch.no_grad():
        expected = token_losses(windowed.loaded.model, windowed.rows(128, 64), after=16)[:, ::2]
    # Float32 losses of order 5, means of 3,072 of them in float64.
    assert numbers["window_0"] == pytest.approx(expected.double().mean().item(), abs=1e-5)
    assert numbers["re_computation"] == pytest.approx(numbers["window_0"], abs=1e-5)
    assert len({round(number, 6) for name, number in numbers.items() if name != "re_computation"}) == 4


def test_learned_tokens_in_front_are_the_first_ones():
    """With the token in front alone kept, the model sees what its own kind with a window would see besides it."""
    trained = trained_like(operation={"name": "sink_token"})
    numbers = first_tokens(trained)
    without = trained_like()
    without.loaded.model.load_state_dict(trained.loaded.model.state_dict(), strict=False)
    assert numbers["window_0"] == pytest.approx(first_tokens(without)["window_0"], abs=1e-5)
    assert numbers["window_1"] != pytest.approx(numbers["window_0"], abs=1e-4)


# --- where the weight of a hidden sink goes -----------------------------------------------------------------------------------


def test_the_weight_of_a_hidden_sink_falls_evenly_on_even_keys():
    """Query q gives q even keys what the sink had, w: three of them are first tokens, one is its own, q - 4 are content."""
    model, rows = by_position(0.4), drawn_rows(2)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weight = model(rows, output_attentions=True, use_cache=False).attentions[0][0, 0, :, 0].double()[4:]
    model.set_attn_implementation("sdpa")
    sums = []
    for edits in ((), (HideKey(place=0),)):
        shares = Shares(0)
        with torch.no_grad(), attend(model, (shares,), edits):
            model(rows, use_cache=False)
        sums.append(shares.sums)
    query = torch.arange(4, 64, dtype=torch.float64)
    lost = weight.sum()
    expected = {
        "freed_to_first": (3 * weight / query).sum() / lost,
        "freed_to_own": (weight / query).sum() / lost,
        "freed_to_content": ((query - 4) * weight / query).sum() / lost,
    }
    # Float32 weights off by 6e-8, over a weight lost of order 0.2.
    assert freed(*sums) == pytest.approx({name: float(number) for name, number in expected.items()}, rel=1e-5)
