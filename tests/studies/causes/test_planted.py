"""Labels where the truth is known: planted heads, heads that rest at some positions, and random weights, which mean nothing."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from tests.studies.causes.planted import SquaredError, planted, sinks_of
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.studies.causes.effects import make_variants
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.labels import label_heads
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.samples import token_samples

NAMES = ("trigger", "induction", "two domains", "broadcast", "bias", "message", "constant", "key bias", "sigmoid")


@pytest.fixture(autouse=True, scope="module")
def _few_resamples():
    """Intervals decide nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinklab.results.intervals.RESAMPLES", 100)
        yield


@functools.cache
def labelled(name, seed, *, noise=0.0):
    known = planted(name, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in known.model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    sink = sinks_of(known.model, known.samples, **({"place": None} if name == "sigmoid" else {}))
    readout = SquaredError() if name == "trigger" else NextToken()
    variants = make_variants(known.model, sink, known.samples)
    effects = measure_effects(known.model, known.samples, readout, variants, sink.heads, batch_size=64)
    return known, sink, label_heads(effects, sink)


@pytest.mark.parametrize("name", NAMES)
def test_every_head_gets_the_label_that_was_planted(name):
    known, sink, labels = labelled(name, 0)
    assert (sink.main and sink.main.place) == known.place
    assert [label.label for label in labels] == known.labels


@pytest.mark.parametrize("name", ["trigger", "broadcast", "message", "key bias"])
def test_noise_on_the_weights_makes_no_label_wrong(name):
    """Heads are less and less what they were: they may become undecided, and must not become something else."""
    known, _, labels = labelled(name, 0, noise=0.03)
    found = [label.label for label in labels]
    assert all(label in (true, "undecided") for label, true in zip(found, known.labels, strict=True)), found
    assert found[0] == known.labels[0]


def test_a_switch_is_told_by_its_domains():
    _, _, (label,) = labelled("trigger", 0)
    assert label.domains == {"other": "dormant", "trigger": "text-dependent"}
    _, _, labels = labelled("two domains", 0)
    assert labels[0].domains == {"repeated": "text-dependent", "fresh": "dormant"}
    assert labels[1].domains == {"repeated": "dormant", "fresh": "dormant"}


def test_the_key_bias_is_the_sink_and_position_0_is_not():
    known = planted("key bias", 0)
    sink = sinks_of(known.model, known.samples)
    assert sink.main.place == "null"
    tried = dict(sink.tried)
    assert tried["null"] > 0.99
    assert tried[0] < 0.3


def test_a_sigmoid_model_has_no_sink():
    known = planted("sigmoid", 0)
    with pytest.raises(
        ConfigurationError, match=r"no sink found: no head gives any place a mean weight of 0.3; tried, .* position 2 \(0\.09\)"
    ):
        sinks_of(known.model, known.samples).require()


def test_which_heads_need_their_sink():
    """A no-op does, and so does a head that speaks at some queries; not one whose sink speaks, nor one that nobody reads."""
    found = {name: [label.needs_sink for label in labelled(name, 0)[2]] for name in ("induction", "broadcast", "two domains")}
    assert found["induction"] == [{"repeated": needs} for needs in ("yes", "yes", "no")]
    assert found["broadcast"] == [{"drawn": needs} for needs in ("no", "no")]
    assert found["two domains"][1] == {"repeated": "yes", "fresh": "yes"}
    assert labelled("sigmoid", 0)[2][0].needs_sink == {}


def test_what_a_sink_carries_is_told_by_its_mean():
    """A sink whose value differs from text to text, and brings the same, is a bias; one that brings another thing a message."""
    (bias, _), (message, _) = (labelled(name, 0)[2] for name in ("bias", "message"))
    assert bias.effects["zero_value"]["drawn"].low > 0.1
    assert abs(bias.effects["mean_sink"]["drawn"].mean) < 1e-12  # a linear map of means; float64
    assert message.effects["mean_sink"]["drawn"].low > 0.1
    assert "mean_sink" not in labelled("broadcast", 0)[2][0].effects  # BOS is the same everywhere


@pytest.mark.parametrize("name", ["message", "induction"])
def test_of_few_texts_the_part_that_is_decided_is_the_label(name):
    """Twenty texts show that something costs, and not that something costs nothing."""
    known = planted(name, 0, texts=20)
    sink = sinks_of(known.model, known.samples)
    variants = make_variants(known.model, sink, known.samples)
    effects = measure_effects(known.model, known.samples, NextToken(), variants, sink.heads)
    found = label_heads(effects, sink)
    if name == "message":
        assert [label.label for label in found] == ["needs-sink", "undecided"]
        assert found[0].needs_sink == {"drawn": "undecided"}  # as a place or for its value
        return
    assert [label.label for label in found] == ["text-dependent", "needs-sink", "undecided"]
    assert found[1].needs_sink == {"repeated": "yes"}
    assert found[1].undecided["repeated"].nearest == "dormant"


WORDS, LENGTH, TEXTS = 40, 16, 32
SHAPE = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "head_dim": 16, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


def random_model(family: str, seed: int, std: float, sharp: float):
    """Normal weights; queries larger by a factor, so that attention is far from uniform."""
    torch.manual_seed(seed)
    if family == "sinklm":
        model = SinkLM(SinkLMConfig(**SHAPE, operation={"name": "softmax"})).eval()
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "head_dim": 8}, num_key_value_heads=4)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=std * sharp if "q_proj" in name else std)
    return model


def random_texts(seed: int, structured: bool):
    """BOS and random tokens, independent or of a Markov chain of few likely successors."""
    generator = torch.Generator().manual_seed(1000 + seed)
    successors = torch.rand(WORDS, WORDS, generator=generator) ** (8 if structured else 0)
    successors[:, 0] = 0.0
    tokens = torch.zeros(TEXTS, LENGTH, dtype=torch.int64)
    for position in range(1, LENGTH):
        tokens[:, position] = torch.multinomial(successors[tokens[:, position - 1]], 1, generator=generator)[:, 0]
    return tokens


def judged(family: str, seed: int, std: float, sharp: float, *, structured: bool):
    """Text-dependent heads, and sizes of what redirecting does."""
    samples = token_samples([("random", random_texts(seed, structured))])
    model = random_model(family, seed, std, sharp)
    sink = sinks_of(model, samples, place=0)  # there is none; the position where trained models have it
    effects = measure_effects(model, samples, NextToken(), make_variants(model, sink, samples), sink.heads)
    labels = label_heads(effects, sink)
    dependent = sum(label.label == "text-dependent" for label in labels)
    return dependent, np.abs(effects.of("redirect").mean((1, 2)))


def check(cases) -> None:
    found = [
        judged(family, number, std, sharp, structured=number % 2 == 1) for number, (family, std, sharp) in enumerate(cases)
    ]
    dependent, sizes = sum(one[0] for one in found), np.concatenate([one[1] for one in found])
    # What a random head says of a text helps as often as it harms, and seldom by as much as the minimal effect.
    assert dependent <= 0.05 * len(sizes)
    # It is not for want of effects: half of the heads, at least, change the loss by more than the minimal effect.
    assert np.median(sizes) > 0.01


def test_few_random_heads_are_dependent():
    check([("sinklm", 0.2, 1.0), ("llama", 0.15, 3.0)])


@pytest.mark.slow
def test_few_of_many_random_heads_are_dependent():
    """At the usual scale of a start, where effects are tiny; at scales at which they are not; and with sharp attention."""
    scales = [(0.02, 1.0), (0.1, 1.0), (0.15, 3.0), (0.2, 1.0), (0.2, 8.0), (0.3, 1.0), (0.3, 8.0), (0.4, 1.0)]
    check([(family, *scale) for scale in scales for family in ("sinklm", "llama")] * 2)
