"""Location: hand-set models whose sink hangs on a token, or on a position, and whose second sink is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.studies.causes.planted import PlantedAttention, PlantedHead, PlantedLayer, sinks_of
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from sinklab.errors import ConfigurationError
from sinklab.operations.softmax import Softmax
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.studies.causes.location import location
from sinklab.studies.causes.samples import token_samples
from sinklab.testing import tiny_models

WORDS, LENGTH, SECOND = 20, 16, 5
BOS = 0


class Parked(nn.Module):
    """One head whose score on a key is what its token and its position bring, and which copies tokens into the logits."""

    def __init__(self, tokens, positions=(), operation=None, length=LENGTH):
        super().__init__()
        self.bonus = torch.zeros(length, dtype=torch.float64)
        for position, score in dict(positions).items():
            self.bonus[position] = score
        width = 2 * WORDS + 2  # tokens, bonus of the position, one, logits
        query, key = torch.zeros(2, 1, width, dtype=torch.float64)
        query[0, WORDS + 1] = key[0, WORDS] = 1.0
        for token, score in tokens.items():
            key[0, token] = score
        value = torch.eye(WORDS, width, dtype=torch.float64)
        output = torch.zeros(width, WORDS, dtype=torch.float64)
        output[WORDS + 2 :] = 3.0 * torch.eye(WORDS, dtype=torch.float64)
        attention = PlantedAttention([PlantedHead(query, key, value, output)], operation or Softmax())
        self.layers = nn.ModuleList([PlantedLayer(attention, residual=True)])

    def forward(self, input_ids):
        words = torch.eye(WORDS, dtype=torch.float64)[input_ids]
        bonus = self.bonus[: words.shape[1]].expand(len(words), -1)[..., None]
        states = torch.cat((words, bonus, torch.ones_like(bonus), torch.zeros_like(words)), dim=-1)
        return CausalLMOutput(logits=self.layers[0](states)[..., WORDS + 2 :])


def texts(count=6, second=False):
    """BOS and words from 6 to 19; with a second sink, token 5 at position 3."""
    tokens = torch.randint(6, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = BOS
    if second:
        tokens[:, 3] = SECOND
    return token_samples([("words", tokens)])


def found_in(model, samples, **settings):
    return location(model, samples, sinks_of(model, samples, place=settings.pop("place", 0)), **settings)


def test_a_hidden_sink_gives_way_to_the_second_one():
    # exp(30) against exp(20): the second sink gets e^-10 of a row while the first is there, and all without it.
    found = found_in(Parked({BOS: 30.0, SECOND: 20.0}), texts(second=True))
    shown = found.conditions
    assert shown["as it is"].strongest.position == 0
    assert shown["as it is"].at_place[0] == pytest.approx(1.0, abs=1e-4)
    for name, position in (("hidden", 3), ("removed", 2), ("replaced", 3)):
        top = shown[name].strongest
        # Queries behind it give it all but 12 e^-20 of their rows; those before do not see it.
        assert (top.position, top.head) == (position, "0.0"), name
        assert top.weight == pytest.approx(1.0, abs=1e-6)
    assert shown["hidden"].at_place == [None]


def test_a_sink_that_hangs_on_its_token_goes_with_it():
    found = found_in(Parked({BOS: 30.0}), texts())
    shown = found.conditions
    assert found.follows == "token"
    assert [shown[name].first_token_at for name in ("moved", "random prefix", "duplicated")] == [4, 4, 1]
    assert shown["moved"].at_first_token[0] == pytest.approx(1.0, abs=1e-9)
    assert shown["random prefix"].at_first_token[0] == pytest.approx(1.0, abs=1e-9)
    assert shown["duplicated"].at_place[0] == pytest.approx(0.5, abs=1e-9)
    assert shown["removed"].first_token_at is None
    assert shown["removed"].at_first_token == [None]


def test_a_sink_that_hangs_on_its_position_stays():
    found = found_in(Parked({}, {0: 30.0}), texts())
    shown = found.conditions
    assert found.follows == "position"
    for name in ("as it is", "removed", "replaced", "moved", "random prefix", "duplicated"):
        assert shown[name].at_place[0] == pytest.approx(1.0, abs=1e-9), name
        assert shown[name].strongest.position == 0


def test_losses_are_compared_on_targets_that_follow_the_same_token():
    model, samples = Parked({BOS: 1.0}, {2: 0.7}), texts()
    shown = found_in(model, samples).conditions
    tokens = samples.inputs["input_ids"]

    def losses(ids):
        logits = model(ids).logits[:, :-1].log_softmax(-1)
        return -logits.gather(-1, ids[:, 1:, None])[..., 0].detach()

    clean = losses(tokens)
    moved = losses(torch.cat((tokens[:, 1:5], tokens[:, :1], tokens[:, 5:]), 1))
    # Old position p stands at p - 1 up to 4, then at p. Target 0 has lost its place before, target 4 stands behind BOS now.
    pairs = {
        "removed": losses(tokens[:, 1:]).mean(1) - clean[:, 1:].mean(1),
        "duplicated": losses(torch.cat((tokens[:, :1], tokens[:, :-1]), 1))[:, 1:].mean(1) - clean[:, :-1].mean(1),
        "moved": torch.cat((moved[:, :3], moved[:, 5:]), 1).mean(1) - torch.cat((clean[:, 1:4], clean[:, 5:]), 1).mean(1),
    }
    for name, expected in pairs.items():
        assert shown[name].loss.mean == pytest.approx(float(expected.mean()), abs=1e-12), name
    assert shown["as it is"].loss is None


def test_the_null_score_is_a_place():
    model, samples = Parked({BOS: -9.0}, operation=SoftmaxPlusOne()), texts()
    found = found_in(model, samples, place="null")
    # Scores are 0 but that of BOS: row t is shared by t words and nothing, and nearly 0 for BOS.
    expected = np.mean([1 / (1 + t + np.exp(-9.0)) for t in range(LENGTH)])
    assert found.conditions["as it is"].at_place[0] == pytest.approx(expected, abs=1e-12)
    assert found.conditions["hidden"].at_place[0] == 0
    assert found.follows is None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shares_of_real_architectures_are_those_of_the_sinks(name):
    tokens = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 0
    model, samples = tiny_models()[name], token_samples([("words", tokens)])
    sink = sinks_of(model, samples, place=0)
    found = location(model, samples, sink, batch_size=2)
    assert np.allclose(found.conditions["as it is"].at_place, sink.weights, rtol=0, atol=1e-6)  # statistics are float32
    assert found.heads == [str(head) for head in sink.heads]


def test_what_cannot_be_is_refused():
    model, samples = Parked({BOS: 30.0}), texts()
    with pytest.raises(ConfigurationError, match="needs one at a place, and none was found"):
        found_in(model, samples, place=None)
    with pytest.raises(ConfigurationError, match="needs two texts or more"):
        found_in(model, samples.part(0, 1))
