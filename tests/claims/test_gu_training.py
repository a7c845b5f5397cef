"""Claims of Gu et al. 2024 about optimisation, data and loss: published numbers pass, reversed ones fail; their read-outs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sinklab.claims import random_first_tokens
from sinklab.claims.fixed_token import TOKEN
from sinklab.claims.window_attention import ExcessOfOldest, excess_weights
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.training.rows import RandomPositions
from sinklab_claims.reproduce.cells import base_config


def test_fixed_token_is_no_special_one():
    assert TOKEN > 1  # BOS and EOS of the trained tokenizers; padding in that of the Pile
    assert base_config("tiny").data.vocab_size > TOKEN


def test_excess_of_weights_by_hand():
    """A window of 2 and three queries. Head 1 looks at the oldest key that it sees, head 2 at all evenly, head 3 at itself."""
    oldest = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    even = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    own = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    for heads, expected in (([oldest], 1.0), ([even], 0.0), ([own], -1.0), ([oldest, even], 0.5)):
        weights = torch.tensor(heads)[None]
        watcher = ExcessOfOldest(window=2)
        call = SimpleNamespace(
            weights=lambda start, stop, weights=weights: weights[:, :, start:stop],
            blocks=lambda: [(0, 2), (2, 3)],  # the last query is in a block of its own
        )
        watcher.update(call, None)
        assert watcher.by_query[0][1:].tolist() == [expected, expected]


def trained_like(**fields):
    """What the read-outs ask of a trained model, with random weights and random rows."""
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SinkLM(SinkLMConfig(**shape, max_position_embeddings=64, **fields)).eval()
    config = SimpleNamespace(model=model.config.architecture, data=SimpleNamespace(held_out_rows=8))
    rows = torch.randint(40, (8, 64))
    return SimpleNamespace(
        config=config, loaded=SimpleNamespace(model=model), rows=lambda samples, length: rows[:samples, :length]
    )


def test_window_read_out_of_a_model_that_attends_evenly():
    trained = trained_like(window=8)
    for name, weight in trained.loaded.model.named_parameters():
        if "q_proj" in name:
            weight.data.zero_()
    # Float32 weights of at most 1, off by a few units of 6e-8, over 1 - 1/n of at least a half.
    assert excess_weights(trained) == {
        "excess_of_first": pytest.approx(0, abs=1e-6),
        "excess_inside": pytest.approx(0, abs=1e-6),
    }
    assert excess_weights(trained_like(window=1)) == {}


def test_window_read_out_of_a_model_without_a_window_is_of_a_window_of_half_its_context():
    trained = trained_like()
    read = excess_weights(trained)
    assert list(read) == ["excess_of_first"]  # there is no first token inside a window
    with torch.no_grad():
        maps = trained.loaded.model(trained.rows(8, 64), output_attentions=True, use_cache=False).attentions
    on_first, even = torch.stack(maps)[..., 16:32, 0].double(), 1 / torch.arange(17, 33)
    assert read["excess_of_first"] == pytest.approx(float(((on_first - even) / (1 - even)).mean()), abs=1e-6)


def test_sinks_are_measured_on_rows_with_random_tokens_where_the_training_had_them(monkeypatch):
    seen = []
    numbers = dict.fromkeys(("sink_rate", "sink_rate_1", "sink_rate_max"), 1.0)
    monkeypatch.setattr(random_first_tokens, "attention_numbers", lambda model, rows, front: seen.append(rows) or numbers)
    text = torch.full((8, 64), 7)
    random = RandomPositions(1, 3, np.arange(20, 40), seed=0)
    for drawn in (random, None):
        trained = SimpleNamespace(
            loaded=SimpleNamespace(model=None),
            front=0,
            rows=lambda *_: text,
            data=SimpleNamespace(train=SimpleNamespace(random=drawn)),
        )
        assert set(random_first_tokens.as_trained(trained)) == {f"{name}_as_trained" for name in numbers}
    assert torch.equal(seen[1], text)  # and the text itself is as it was
    changed = seen[0] != text
    assert changed[:, 1:3].all()
    assert not changed[:, 0].any()
    assert not changed[:, 3:].any()
    assert set(seen[0][:, 1:3].flatten().tolist()) <= set(range(20, 40))
    assert len(seen[0][:, 1:3].unique(dim=0)) > 1
