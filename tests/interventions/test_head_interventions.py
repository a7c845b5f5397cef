"""Interventions on scores and outputs of heads: each equals its formula, written out densely for one head."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from edited_runs import ROUNDING, Added, Scaled, Spy, first_call, head_outputs, logits

from sinklab import attend
from sinklab.errors import ConfigurationError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.set_activation import SetActivation
from sinklab.interventions.zero_head import ZeroHead
from sinklab.testing import tiny_models


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def llama():
    return tiny_models()["llama"]


@pytest.fixture(scope="module")
def dense(llama, tokens):
    """Scores, weights and values of head 1 of the first layer, and the outputs of all."""
    call = first_call(llama, input_ids=tokens)
    scores = (call.queries[:, 1] @ call.keys[:, 0].mT * call.scaling).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    return scores, scores.softmax(-1), call.values[:, 0], call.head_outputs.transpose(1, 2)


def first_head(llama, tokens, *interventions):
    return head_outputs(llama, tokens, *interventions)[0][:, :, 1]


def test_scores(llama, tokens, dense):
    scores, _, values, _ = dense
    more = scores.clone()
    more[:, :, 2] += 1.5
    found = first_head(llama, tokens, Added(heads={0: (1,)}, place=2, amount=1.5))
    assert (found - more.softmax(-1) @ values).abs().max() < ROUNDING


def test_outputs(llama, tokens, dense):
    clean = dense[3][:, 1]
    assert (first_head(llama, tokens, Scaled(heads={0: (1,)}, factor=-0.5)) + clean / 2).abs().max() < ROUNDING
    assert torch.equal(first_head(llama, tokens, ResampleHead(heads={0: (1,)})), clean[[1, 2, 0]])
    assert torch.equal(first_head(llama, tokens, ResampleHead(heads={0: (1,)}, shift=-1)), clean[[2, 0, 1]])


def resampled(model, **inputs):
    """Outputs of head 1 of the first layer, as they are and resampled."""
    return [first_call(model, *edits, **inputs).head_outputs[:, :, 1] for edits in ([], [ResampleHead(heads={0: (1,)})])]


def test_texts_of_other_lengths_give_what_they_have(llama, tokens):
    """Left-padded: position p of the long text takes position p of the short one, beyond its end counted back from there."""
    mask = torch.ones(2, 9).long()
    mask[1, :4] = 0
    padded = {"input_ids": tokens[:2], "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    clean, edited = resampled(llama, **padded)
    assert torch.equal(edited[0, :5], clean[1, 4:])
    assert torch.equal(edited[0, 5:], clean[1, [7, 6, 5, 4]])
    assert torch.equal(edited[1, 4:], clean[0, :5])


def test_rows_of_several_documents_are_refused(llama, tokens):
    rows = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    with pytest.raises(ConfigurationError, match="a row of several documents has no other text"):
        resampled(llama, input_ids=tokens[:2], position_ids=rows, use_cache=False)


def test_samples_of_different_lengths_get_the_next_longer_one(llama):
    """Long and short ones in turn: all are edited at each of their positions, the longest, which has none behind it, with the
    one before, counted back from its end."""
    texts = torch.randint(1, 50, (6, 9), generator=torch.Generator().manual_seed(1))
    for sizes, others in (
        ([9, 3, 8, 3, 9, 2], [4, 3, 0, 2, 0, 1]),
        ([8, 3, 9, 4], [2, 3, 0, 0]),
        ([9, 5], [1, 0]),
        ([9] * 4, [1, 2, 3, 0]),
    ):
        tokens = texts[: len(sizes)]
        mask = (torch.arange(9) < torch.tensor(sizes)[:, None]).long()
        clean, edited = resampled(llama, input_ids=tokens, attention_mask=mask)
        for number, (size, other) in enumerate(zip(sizes, others, strict=True)):
            last = sizes[other] - 1
            there = [position if position <= last else last - abs(position - last) for position in range(size)]
            assert torch.equal(edited[number, :size], clean[other, there])


def test_half_precision_is_rounded_once_at_the_end(tokens):
    """bfloat16 keeps 8 bits, so a number of the head's output is off by 2⁻⁹ of itself, and by as much before the edit."""
    model = tiny_models()["llama"].bfloat16()
    edits = Scaled(heads={0: (1,)}, factor=3.0), Scaled(heads={0: (1,)}, factor=1 / 3)
    calls = [first_call(model, *edits[:number], input_ids=tokens).head_outputs for number in (0, 2)]
    assert {call.dtype for call in calls} == {torch.bfloat16}
    assert torch.equal(calls[1], calls[0])


# --- refusals --------------------------------------------------------------------------------------------------------------


def test_batches_that_do_not_do(llama, tokens):
    for intervention in (ResampleHead(), ResampleHead(shift=3)):
        with pytest.raises(ConfigurationError, match="in a batch of 1 is the text itself; give larger batches"):
            logits(llama, tokens[:1], intervention)


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}


@torch.no_grad()
def test_cross_attention_goes_by_its_name(tokens):
    torch.manual_seed(0)
    model = transformers.T5Model(transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4))
    name, spy = "decoder.block.1.layer.1.EncDecAttention", Spy()
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :4]}
    edits = [HideKey(heads={name: (1, 3)}, place=(0, 2)), ZeroHead(heads={3: (0,)})]
    with attend(model.eval(), [spy], edits):
        model(**inputs)
    calls = {call.site.module: call for call in spy.calls}
    weights = calls[name].weights(0, 4)
    assert (weights[:, [1, 3]][..., [0, 2]] == 0).all()
    assert (weights[:, [0, 2]][..., [0, 2]] > 0).all()
    assert (weights.sum(-1) - 1).abs().max() < 1e-6  # float32
    # Numbers run over self-attention alone, the encoder's first: 3 is the decoder's second.
    assert (calls["decoder.block.1.layer.0.SelfAttention"].head_outputs[:, :, 0] == 0).all()
    with (
        pytest.raises(
            ConfigurationError, match=r"module 4 did not run.*3 \(decoder\.block\.1.*by name: decoder.*EncDecAttention"
        ),
        attend(model, interventions=[ZeroHead(heads={4: (0,)})]),
    ):
        model(**inputs)
    with (
        pytest.raises(ConfigurationError, match=r"module 'decoder\.block\.1.*' did not run, so nothing of it was edited"),
        attend(model, interventions=edits[:1]),
    ):
        model.encoder(input_ids=tokens)


@torch.no_grad()
def test_a_layer_that_runs_several_times_is_edited_in_the_turn_that_is_named(tokens):
    torch.manual_seed(0)
    model = transformers.AlbertModel(transformers.AlbertConfig(embedding_size=16, **SHAPE)).eval()
    spy = Spy()
    with attend(model, [spy], [ZeroHead(heads={1: (0,)})]):
        model(input_ids=tokens)
    assert [bool((call.head_outputs[:, :, 0] == 0).all()) for call in spy.calls] == [False, True, False]
    by_name = Spy()
    with attend(model, [by_name], [ZeroHead(heads={spy.calls[1].site.module: (0,)})]):
        model(input_ids=tokens)
    assert [bool((call.head_outputs[:, :, 0] == 0).all()) for call in by_name.calls] == [False, True, False]
    with (
        pytest.raises(ConfigurationError, match="module 3 did not run"),
        attend(model, interventions=[ZeroHead(heads={3: (0,)})]),
    ):
        model(input_ids=tokens)


@pytest.mark.parametrize("intervention", [ZeroHead(), SetActivation(channels=(1,))], ids=lambda one: one.name)
def test_another_thread_is_not_edited(llama, tokens, intervention):
    with torch.no_grad():
        clean = llama(input_ids=tokens).logits
    found = []

    def run():
        with torch.no_grad():
            found.append(llama(input_ids=tokens).logits)

    with torch.no_grad(), attend(llama, interventions=[intervention]):
        llama(input_ids=tokens)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert torch.equal(found[0], clean)


def test_rows_of_positions_are_cut_with_the_samples():
    place = torch.tensor([[0], [1], [2]])
    intervention = HideKey(place=place)
    assert intervention.of_samples(1, 3).place.tolist() == [[1], [2]]
    assert intervention.of_samples(1, 3).heads is intervention.heads
    assert HideKey(place=(1, 2)).of_samples(0, 1).place == (1, 2)
