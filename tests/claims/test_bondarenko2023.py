"""The masked objective: what is hidden and asked for, that rows are read both ways, and that a planted sink is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from sinklab.models.losses import IGNORED
from sinklab.recipes.backcopy_tiny import backcopy_tiny
from sinklab.training.data import prepare_data
from sinklab_claims.bondarenko2023 import Masked, looked_at, train


@pytest.fixture(scope="module")
def config():
    """The recipe of the smallest scale, on few tokens, for a few steps."""
    config = backcopy_tiny()
    changes = {
        "data": {"max_tokens": 20_000},
        "training": {"steps": 4, "compile": False, "dtype": "float32"},
        "schedule": {"warmup_steps": 1},
    }
    return config.model_copy(update={part: getattr(config, part).model_copy(update=of) for part, of in changes.items()})


@pytest.fixture(scope="module")
def data(config, tmp_path_factory):
    return prepare_data(config, tmp_path_factory.mktemp("cache"))


def numbers(masked, held_out):
    rows = held_out[:40]
    return looked_at(masked.model.eval(), *masked.hide(rows, 0), masked.hide(rows[:, :64], 0)[0])


def test_tokens_between_the_ends_are_hidden_and_they_alone_are_asked_for(config, data):
    masked = Masked(config, data)
    rows, targets = masked.hide(data.held_out[:20], seed=3)
    asked = targets != IGNORED
    assert not asked[:, [0, -1]].any()
    assert (rows[:, -1] == masked.end).all()
    assert (rows[asked] == masked.mask).all()
    assert torch.equal(rows[~asked][rows[~asked] != masked.end], data.held_out[:20][~asked][rows[~asked] != masked.end])
    assert torch.equal(targets[asked], data.held_out[:20][asked])
    assert asked.sum(1).tolist() == [round(0.15 * (data.held_out.shape[1] - 2))] * 20
    assert masked.mask == data.identity["tokenizer"]["vocab_size"]  # a token that no text has
    assert not torch.equal(asked, masked.hide(data.held_out[:20], seed=4)[1] != IGNORED)


def test_training_is_that_of_its_seed_and_lowers_the_loss_at_what_is_hidden(config, data):
    first, again = train(config, data), train(config, data)
    before = Masked(config, data)
    rows, targets = before.hide(data.held_out[:50], seed=0)
    losses = []
    for masked in (before, first, again):
        with torch.no_grad():
            logits = masked.model.eval()(input_ids=rows).logits
        losses.append(float(cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)))
    assert losses[1] == losses[2] < losses[0]


def test_an_even_head_is_no_sink_and_a_planted_one_is(config, data):
    masked = Masked(config, data)
    for layer in masked.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()  # scores of 0: every key gets the same
    found = numbers(masked, data.held_out)
    assert found["strongest_place"] == pytest.approx(1 / 64, rel=1e-4)
    targets = masked.hide(data.held_out[:40], seed=0)[1]
    asked = targets[targets != IGNORED]
    share = torch.bincount(asked)[torch.unique(asked)] / len(asked)
    untrained = math.log(masked.mask + 1)
    assert found["gain_by_context"] == pytest.approx(-(share * share.log()).sum().item() - untrained, abs=0.2 * untrained)

    attention = masked.model.layers[0].self_attn
    bos = masked.model.embed_tokens.weight.data[data.held_out[0, 0]]
    rest = masked.model.embed_tokens.weight.data
    # Queries are one vector for all tokens, and the key of BOS alone lies along it.
    rest.zero_()
    rest[:, 0] = 1.0
    bos.zero_()
    bos[:2] = 1.0
    attention.q_proj.weight.data.zero_()
    attention.k_proj.weight.data.zero_()
    attention.q_proj.weight.data[0, 0] = attention.k_proj.weight.data[0, 1] = 30.0
    planted = numbers(masked, data.held_out)
    assert planted["strongest_place"] > 0.9
