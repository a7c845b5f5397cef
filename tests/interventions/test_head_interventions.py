"""Interventions on scores, values and outputs of heads: each equals its formula, written out densely for one head."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import transformers
from edited_runs import ROUNDING, Spy, first_call, head_outputs, logits

from sinklab import attend
from sinklab.attention.editing import edited_outputs
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.interventions._random_rotation import random_rotation
from sinklab.interventions.add_score import AddScore
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.insert_bos import InsertBos
from sinklab.interventions.mean_head import MeanHead
from sinklab.interventions.mean_value import MeanValue
from sinklab.interventions.null_score import NullScore
from sinklab.interventions.redirect import Redirect
from sinklab.interventions.resample_head import ResampleHead
from sinklab.interventions.resample_value import ResampleValue
from sinklab.interventions.rotate_change import RotateChange
from sinklab.interventions.scale_head import ScaleHead
from sinklab.interventions.set_activation import SetActivation
from sinklab.interventions.temperature import Temperature
from sinklab.interventions.zero_head import ZeroHead
from sinklab.models.language_model import SinkLM, SinkLMConfig
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
    exponentials = scores.exp()
    expected = {
        AddScore(heads={0: (1,)}, place=2, amount=1.5): more.softmax(-1) @ values,
        Temperature(heads={0: (1,)}, temperature=2.0): (scores / 2).softmax(-1) @ values,
        NullScore(heads={0: (1,)}, score=0.5): exponentials / (math.exp(0.5) + exponentials.sum(-1, keepdim=True)) @ values,
    }
    for intervention, outputs in expected.items():
        assert (first_head(llama, tokens, intervention) - outputs).abs().max() < ROUNDING, intervention.name
    # Two null scores are two terms of the denominator.
    twice = exponentials / (math.exp(0.5) + math.exp(-1.0) + exponentials.sum(-1, keepdim=True)) @ values
    found = first_head(llama, tokens, NullScore(heads={0: (1,)}, score=0.5), NullScore(heads={0: (1,)}, score=-1.0))
    assert (found - twice).abs().max() < ROUNDING
    # One that has been given can be redirected to, and then the head is silent.
    silent = first_head(llama, tokens, NullScore(heads={0: (1,)}, score=0.5), Redirect(heads={0: (1,)}, place="null"))
    assert (silent == 0).all()


def test_values(llama, tokens, dense):
    _, weights, values, _ = dense
    expected = weights @ values
    for query in range(1, 9):
        others = [key for key in range(query + 1) if key != 2]
        mean = values[:, others].mean(1)
        if query >= 2:
            expected[:, query] += weights[:, query, 2, None] * (mean - values[:, 2])
    assert (first_head(llama, tokens, MeanValue(heads={0: (1,)}, place=2)) - expected).abs().max() < ROUNDING
    # Position 0 is all that the first query sees, so that row stays.
    at_zero = first_head(llama, tokens, MeanValue(heads={0: (1,)}))
    assert (at_zero[:, 0] - values[:, 0]).abs().max() < ROUNDING
    assert (at_zero[:, 1] - values[:, 1]).abs().max() < ROUNDING
    other = values.clone()
    other[:, 2] = values[[1, 2, 0], 2]
    assert (first_head(llama, tokens, ResampleValue(heads={0: (1,)}, place=2)) - weights @ other).abs().max() < ROUNDING


def test_outputs(llama, tokens, dense):
    clean = dense[3][:, 1]
    assert (first_head(llama, tokens, ScaleHead(heads={0: (1,)}, factor=-0.5)) + clean / 2).abs().max() < ROUNDING
    mean = clean.mean(1, keepdim=True).expand_as(clean)
    assert (first_head(llama, tokens, MeanHead(heads={0: (1,)})) - mean).abs().max() < ROUNDING
    assert torch.equal(first_head(llama, tokens, ResampleHead(heads={0: (1,)})), clean[[1, 2, 0]])
    assert torch.equal(first_head(llama, tokens, ResampleHead(heads={0: (1,)}, shift=-1)), clean[[2, 0, 1]])


def test_means_of_texts_of_one_s_own(llama, tokens, dense):
    batches = [{"input_ids": tokens[:2]}, {"input_ids": tokens[2:]}]
    over = MeanHead.over(llama, batches, heads={0: (1, 2)})
    means = over.means
    assert {name: tuple(mean.shape) for name, mean in means.items()} == {
        "model.layers.0.self_attn": (4, 8),
        "model.layers.1.self_attn": (4, 8),
    }
    mean = dense[3].mean((0, 2))
    assert (means["model.layers.0.self_attn"] - mean).abs().max() < ROUNDING
    found = first_head(llama, tokens, over)
    assert (found - mean[1]).abs().max() < ROUNDING


def test_packed_documents_have_means_of_their_own(llama, tokens):
    edit = MeanHead(heads={0: (1,)})
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]).expand(3, 9)
    call = first_call(llama, edit, input_ids=tokens, position_ids=positions, use_cache=False)
    assert call.query_documents.tolist() == [[0] * 5 + [1] * 4] * 3
    alone = torch.cat([first_head(llama, text, edit) for text in (tokens[:, :5], tokens[:, 5:])], dim=1)
    assert (alone[:, 4] - alone[:, 5]).abs().min() > 1e-6
    assert (call.head_outputs[:, :, 1] - alone).abs().max() < 1e-7  # angles are float32


def test_padding_is_no_part_of_a_mean_and_gets_none(llama, tokens):
    mask = torch.ones(1, 9).long()
    mask[:, :4] = 0
    padded = {"input_ids": tokens[:1], "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    outputs = first_call(llama, MeanHead(heads={0: (1,)}), **padded).head_outputs[:, :, 1]
    assert (outputs[:, 4:] - outputs[:, 4:5]).abs().max() == 0
    alone = first_head(llama, tokens[:1, 4:], MeanHead(heads={0: (1,)}))
    assert (outputs[:, 4:] - alone).abs().max() < 1e-7  # angles are float32
    means = MeanHead.over(llama, [padded]).means["model.layers.0.self_attn"]
    assert (means[1] - alone[0, 0]).abs().max() < 1e-7


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


def test_every_query_of_a_packed_row_is_resampled(llama, tokens):
    """Documents that are shorter in the other row are counted back from their ends, and further ones come from its first."""
    rows = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    clean, edited = resampled(llama, input_ids=tokens[:2], position_ids=rows, use_cache=False)
    assert torch.equal(edited[0], clean[1, rows[0]])
    assert torch.equal(edited[1], clean[0, [0, 1, 2, 3, 4, 3, 2, 1, 0]])


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


# --- rotated changes --------------------------------------------------------------------------------------------------------


def test_a_rotated_change_has_the_same_norm_at_every_query(llama, tokens):
    clean = head_outputs(llama, tokens)[0]
    for edit in (Redirect, HideKey, ZeroHead):
        change = head_outputs(llama, tokens, edit(heads={0: (1, 2)}))[0] - clean
        rotated = head_outputs(llama, tokens, edit(heads={0: (1, 2)}), RotateChange(heads={0: (1, 2)}, seed=3))[0] - clean
        assert (change.norm(dim=-1) - rotated.norm(dim=-1)).abs().max() < ROUNDING
        apart = (change - rotated).norm(dim=-1) / change.norm(dim=-1)
        assert apart[:, 1:, [1, 2]].min() > 0.3  # another direction, whatever the size
        rotation = random_rotation("3/model.layers.0.self_attn/2", 8)
        assert (rotated[:, :, 2] - change[:, :, 2] @ rotation).abs().max() < ROUNDING
        assert torch.equal(rotated[:, :, [0, 3]], torch.zeros_like(rotated[:, :, [0, 3]]))


def test_half_precision_is_rounded_once_at_the_end(tokens):
    """bfloat16 keeps 8 bits, so a number of the head's output is off by 2⁻⁹ of itself, and by as much before the edit."""
    model = tiny_models()["llama"].bfloat16()
    edits = Redirect(heads={0: (1,)}), RotateChange(heads={0: (1,)})
    calls = [first_call(model, *edits[:number], input_ids=tokens).head_outputs for number in range(3)]
    assert {call.dtype for call in calls} == {torch.bfloat16}
    clean, edited, rotated = (call.double() for call in calls)
    assert torch.equal(rotated[:, :, [0, 2, 3]], clean[:, :, [0, 2, 3]])
    sizes = [(other - clean)[:, :, 1].norm(dim=-1) for other in (edited, rotated)]
    allowed = 2.0**-8 * (clean.norm(dim=-1) + edited.norm(dim=-1) + rotated.norm(dim=-1))[:, :, 1]
    assert ((sizes[0] - sizes[1]).abs() <= allowed).all()


def test_it_turns_only_what_stands_before_it(llama, tokens):
    before = logits(llama, tokens, RotateChange(heads={0: (1,)}), ScaleHead(heads={0: (1,)}, factor=0.5))
    assert (before - logits(llama, tokens, ScaleHead(heads={0: (1,)}, factor=0.5))).abs().max() < 1e-9
    other = logits(llama, tokens, Redirect(heads={0: (2,)}), RotateChange(heads={0: (1,)}))
    assert (other - logits(llama, tokens, Redirect(heads={0: (2,)}))).abs().max() < 1e-9


def test_rotations_are_orthogonal_even_and_their_own():
    one = random_rotation("0/attention/0", 6)
    assert (one @ one.T - torch.eye(6)).abs().max() < 1e-12
    assert not torch.equal(one, random_rotation("0/attention/1", 6))
    assert not torch.equal(one, random_rotation("1/attention/0", 6))
    # Haar measure: every entry has mean 0 and mean square 1 / width; 2,000 draws have standard errors of 1/160 and 1/190.
    many = torch.stack([random_rotation(f"{number}", 3) for number in range(2000)])
    assert many.mean(0).abs().max() < 4 * (1 / 3 / 2000) ** 0.5
    assert (many.square().mean(0) - 1 / 3).abs().max() < 4 * (4 / 45 / 2000) ** 0.5


# --- operations without normalisation or with a null score -----------------------------------------------------------------


def tiny(operation, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = SinkLMConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            operation={"name": operation, **settings},
        )
        return SinkLM(config).double().eval()


def test_sigmoid_scores_are_log_odds(tokens):
    model = tiny("sigmoid")
    clean, edited = (first_call(model, *edits, input_ids=tokens) for edits in ([], [AddScore(place=2, amount=1.5)]))
    before, after = clean.weights(0, 9)[..., 2:, 2], edited.weights(0, 9)[..., 2:, 2]
    assert (torch.logit(after) - torch.logit(before) - 1.5).abs().max() < 1e-9
    rest = [key for key in range(9) if key != 2]
    assert torch.equal(clean.weights(0, 9)[..., rest], edited.weights(0, 9)[..., rest])


@pytest.mark.parametrize("operation", ["sigmoid", "sink_logit", "identity", "relu"])
def test_a_mean_value_keeps_row_sums(operation, tokens):
    call = first_call(tiny(operation), input_ids=tokens)
    _, _, weights = edited_outputs(call, [MeanValue(place=(0, 2))], want_weights=True)
    assert weights is not None
    assert (weights.sum(-1) - call.signed_weights(0, 9).sum(-1)).abs().max() < 1e-9
    assert (weights[:, :, 1:, 0] == 0).all()
    assert torch.equal(weights[:, :, 0], call.signed_weights(0, 9)[:, :, 0])


def test_null_scores_of_a_model_that_has_them(tokens):
    model = tiny("sink_logit", initial=0.5)
    added = logits(model, tokens, AddScore(place="null", amount=1.0))
    assert (added - logits(tiny("sink_logit", initial=1.5), tokens)).abs().max() < 1e-9
    given = logits(model, tokens, NullScore(score=0.0))
    both = math.log(math.exp(0.5) + 1.0)
    assert (given - logits(tiny("sink_logit", initial=both), tokens)).abs().max() < 1e-6  # the logit is learned in float32
    # Nothing is shared out evenly over what the query sees: rows then sum to one.
    call = first_call(model, input_ids=tokens)
    _, _, weights = edited_outputs(call, [MeanValue(place="null")], want_weights=True)
    assert weights is not None
    assert (weights.sum(-1) - 1).abs().max() < 1e-9


def test_softmax_plus_one_is_a_null_score_of_zero(tokens):
    plain, plus_one = tiny("softmax"), tiny("softmax_plus_one")
    assert (logits(plain, tokens, NullScore(score=0.0)) - logits(plus_one, tokens)).abs().max() < 1e-9


# --- refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AddScore(amount=math.inf), "amount must be a finite score, got inf; to hide a key use hide_key"),
        (lambda: Temperature(temperature=0.0), "temperature must be positive and finite, got 0.0"),
        (lambda: NullScore(score=math.nan), "score must be a number or minus infinity, got nan"),
        (lambda: ScaleHead(factor=math.nan), "factor must be a finite number, got nan"),
        (lambda: ResampleValue(place="null"), "the null value is the same in all texts; give positions"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_what_an_attention_does_not_have(llama, tokens):
    for model, edit, message in (
        (llama, AddScore(place="null"), r"layers\.0\.self_attn: its attention has no null score to add to"),
        (llama, MeanValue(place="null"), "has no null value to replace"),
        (tiny("sigmoid"), NullScore(), "a null score is a term of a softmax, and its operation is 'sigmoid'"),
        (tiny("key_value_bias"), NullScore(), "its null score carries a value"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            logits(model, tokens, edit)


def test_batches_and_caches_that_do_not_do(llama, tokens):
    for intervention in (ResampleHead(), ResampleValue(), ResampleHead(shift=3)):
        with pytest.raises(ConfigurationError, match="in a batch of 1 is the text itself; give larger batches"):
            logits(llama, tokens[:1], intervention)
    with torch.no_grad(), attend(llama, interventions=[MeanHead()]):
        cache = llama(input_ids=tokens[:, :4], use_cache=True).past_key_values
        with pytest.raises(ConfigurationError, match=r"4 keys in a cache.*MeanHead.over"):
            llama(input_ids=tokens[:, 4:], past_key_values=cache)
    with pytest.raises(ConfigurationError, match=r"no means for model\.layers\.0\.self_attn; there are some for no module"):
        logits(llama, tokens, MeanHead(means={}))


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


def test_vision_models_have_keys_to_hide():
    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    model, spy = transformers.ViTModel(transformers.ViTConfig(image_size=12, patch_size=4, **shape)).eval(), Spy()
    with torch.no_grad(), attend(model, [spy], [HideKey(place=0)]):
        model(pixel_values=torch.randn(2, 3, 12, 12))
    assert all((call.weights(0, 10)[..., 0] == 0).all() for call in spy.calls)


@pytest.mark.parametrize(
    "intervention", [ZeroHead(), SetActivation(channels=(1,)), InsertBos(token=1)], ids=lambda one: one.name
)
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
    for intervention in (HideKey(place=place), AddScore(place=place), MeanValue(place=place)):
        assert intervention.of_samples(1, 3).place.tolist() == [[1], [2]]
        assert intervention.of_samples(1, 3).heads is intervention.heads
    assert HideKey(place=(1, 2)).of_samples(0, 1).place == (1, 2)
