"""Random weights mean nothing, however much they do: few of their heads may be called semantic, and as few the reverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.studies.causes.planted import sinks_of
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.studies.causes.effects import make_variants
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.labels import label_heads, mirrored
from sinklab.studies.causes.readout import NextToken
from sinklab.studies.causes.samples import token_samples

WORDS, LENGTH, TEXTS = 40, 16, 32
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


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


def texts(seed: int, structured: bool):
    """BOS and random tokens, independent or of a Markov chain of few likely successors."""
    generator = torch.Generator().manual_seed(1000 + seed)
    successors = torch.rand(WORDS, WORDS, generator=generator) ** (8 if structured else 0)
    successors[:, 0] = 0.0
    tokens = torch.zeros(TEXTS, LENGTH, dtype=torch.int64)
    for position in range(1, LENGTH):
        tokens[:, position] = torch.multinomial(successors[tokens[:, position - 1]], 1, generator=generator)[:, 0]
    return tokens


def judged(family: str, seed: int, std: float, sharp: float, *, structured: bool):
    """Semantic heads, mirrored ones, and sizes of what redirecting does."""
    samples = token_samples([("random", texts(seed, structured))])
    model = random_model(family, seed, std, sharp)
    sink = sinks_of(model, samples, place=0)  # there is none; the position where trained models have it
    effects = measure_effects(model, samples, NextToken(), make_variants(sink, samples, seed=seed), sink.heads)
    labels = label_heads(effects, sink)
    semantic = sum(label.label == "semantic" for label in labels)
    return semantic, mirrored(labels, 0.01)["random"], np.abs(effects.of("redirect").mean((1, 2)))


def check(cases) -> None:
    found = [
        judged(family, number, std, sharp, structured=number % 2 == 1) for number, (family, std, sharp) in enumerate(cases)
    ]
    semantic, opposed = (sum(one[number] for one in found) for number in (0, 1))
    sizes = np.concatenate([one[2] for one in found])
    # What a random head says of a text helps as often as it harms, and seldom by as much as the minimal effect.
    assert semantic <= 0.05 * len(sizes)
    assert opposed <= 0.05 * len(sizes)
    # It is not for want of effects: half of the heads, at least, change the loss by more than the minimal effect.
    assert np.median(sizes) > 0.01


def test_few_random_heads_are_semantic():
    check([("sinklm", 0.2, 1.0), ("llama", 0.15, 3.0)])


@pytest.mark.slow
def test_few_of_many_random_heads_are_semantic():
    """At the usual scale of a start, where effects are tiny; at scales at which they are not; and with sharp attention."""
    scales = [(0.02, 1.0), (0.1, 1.0), (0.15, 3.0), (0.2, 1.0), (0.2, 8.0), (0.3, 1.0), (0.3, 8.0), (0.4, 1.0)]
    check([(family, *scale) for scale in scales for family in ("sinklm", "llama")] * 2)
