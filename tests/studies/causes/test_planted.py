"""Labels where the truth is known: planted heads, heads that rest at some positions, and random weights, which mean nothing."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from tests.conftest import make_sinklm
from tests.studies.causes.planted import planted, sinks_of
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import attend
from sinklab.attention.probe import Watcher
from sinklab.errors import ConfigurationError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.results.store import Store
from sinklab.sinks import find_sinks
from sinklab.studies.causes import resumable
from sinklab.studies.causes.effects import make_variants
from sinklab.studies.causes.engine import measure_effects
from sinklab.studies.causes.labels import _candidates, _where_it_rests, label_heads, mirrored, split, switches_within
from sinklab.studies.causes.measurement import examine
from sinklab.studies.causes.readout import ClassLogits, MaskedToken, NextToken, SquaredError
from sinklab.studies.causes.request import Request
from sinklab.studies.causes.samples import Samples, token_samples, whole_samples
from sinklab.studies.causes.texts import Texts

NAMES = ("trigger", "induction", "two domains", "broadcast", "constant", "key bias", "sigmoid")


@pytest.fixture(autouse=True, scope="module")
def _few_resamples():
    """Intervals decide nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinklab.results.intervals.RESAMPLES", 100)
        yield


@functools.cache
def labelled(name, seed, *, budget="fast", noise=0.0):
    known = planted(name, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in known.model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    sink = sinks_of(known.model, known.samples, **({"place": None} if name == "sigmoid" else {}))
    readout = SquaredError() if name == "trigger" else NextToken()
    variants = make_variants(sink, known.samples, budget=budget, seed=seed)
    effects = measure_effects(known.model, known.samples, readout, variants, sink.heads, batch_size=64)
    return known, sink, label_heads(effects, sink)


@pytest.mark.parametrize("name", NAMES)
def test_every_head_gets_the_label_that_was_planted(name):
    known, sink, labels = labelled(name, 0)
    assert (sink.main and sink.main.place) == known.place
    assert [label.label for label in labels] == known.labels


def test_and_so_it_does_with_the_full_budget():
    known, _, labels = labelled("constant", 7, budget="full")
    assert [label.label for label in labels] == known.labels
    assert {"mean", "rotated", "redirect control - redirect"} <= set(labels[0].effects)


@pytest.mark.parametrize("name", ["trigger", "broadcast", "key bias"])
def test_noise_on_the_weights_makes_no_label_wrong(name):
    """Heads are less and less what they were: they may become undecided, and must not become something else."""
    known, _, labels = labelled(name, 0, noise=0.03)
    found = [label.label for label in labels]
    assert all(label in (true, "undecided") for label, true in zip(found, known.labels, strict=True)), found
    assert found[0] == known.labels[0]


def test_a_switch_is_told_by_its_domains():
    _, _, (label,) = labelled("trigger", 0)
    assert label.domains == {"other": "dormant", "trigger": "semantic"}
    _, _, labels = labelled("two domains", 0)
    assert labels[0].domains == {"repeated": "semantic", "fresh": "dormant"}
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


def test_a_switch_within_a_text_is_found():
    """The induction head speaks in the second half of a text and rests in the first; the no-op rests always."""
    known, sink, labels = labelled("induction", 0)
    variants, heads = make_variants(sink, known.samples), _candidates(labels, sink, known.samples, 0.05)
    assert heads == [labels[0].head]  # the others are silent everywhere
    (rests,) = _where_it_rests(known.model, known.samples, sink, heads, batch_size=64)
    # Words 1 to 11 come for the first time, 12 to 22 again; the last one has no target.
    assert bool(rests[:, 1:12].all())
    assert not rests[:, 12:].any()

    def measure(halves):
        return {
            head: measure_effects(known.model, parted, NextToken(), variants, [head], batch_size=64)
            for head, parted in halves.items()
        }

    found = switches_within(known.model, known.samples, sink, labels, measure, level=0.05, minimal_effect=0.01, batch_size=64)
    assert found[0].within == {"repeated": {"at rest": "dormant", "elsewhere": "semantic"}}
    assert [label.label for label in found] == ["switch", "dormant", "unneeded"]
    assert found[1:] == labels[1:]


def test_what_is_looked_at_within_texts_is_kept(tmp_path, monkeypatch):
    """It takes a head as long again as all its edits, so that a run that is killed behind it does not begin anew."""
    known, _, _ = labelled("induction", 0)
    texts, request, measured = Texts(known.samples, NextToken(), []), Request(minimal_effect=0.01, batch_size=64), []
    real = resumable.measure_effects

    def counted(model, samples, readout, variants, heads, **options):
        measured.append((len(samples.domain_names), [head.head for head in heads]))
        return real(model, samples, readout, variants, heads, **options)

    monkeypatch.setattr(resumable, "measure_effects", counted)
    asked = {"identity": {"operation": "softmax"}, "store": Store(tmp_path)}
    found = examine(known.model, texts, request, **asked)
    assert found.found.heads[0].within == {"repeated": {"at rest": "dormant", "elsewhere": "semantic"}}
    assert measured == [(1, [0, 1, 2]), (2, [0])]
    again = examine(known.model, texts, request, **asked)
    assert again.found == found.found
    assert len(measured) == 2, "all of it was kept"


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
    """Semantic heads, mirrored ones, and sizes of what redirecting does."""
    samples = token_samples([("random", random_texts(seed, structured))])
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


TEXTS_IN_HALVES = 12


def rests_of(model, samples):
    """Every head of self-attention, and where it rests."""
    sinks = find_sinks(model, samples.inputs, place=0)
    return dict(zip(sinks.heads, _where_it_rests(model, samples, sinks, sinks.heads, batch_size=5), strict=True))


def labels_with_halves(model, samples, readout):
    """The labels of all heads before and after each is looked at in halves."""
    sinks = find_sinks(model, samples.inputs, place=0)
    variants = make_variants(sinks, samples)
    labels = label_heads(measure_effects(model, samples, readout, variants, sinks.heads), sinks, minimal_effect=1e-9)
    asked = {"level": 0.05, "minimal_effect": 1e-9}

    def measure(halves):
        return {head: measure_effects(model, parted, readout, variants, [head]) for head, parted in halves.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinklab.studies.causes.labels._candidates", lambda *given: list(sinks.heads))
        return labels, switches_within(model, samples, sinks, labels, measure, **asked)


def classifier():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(image_size=8, patch_size=2, num_labels=3, **shape)
    pixels = torch.randn(TEXTS_IN_HALVES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    samples = whole_samples({"pixel_values": pixels}, torch.arange(TEXTS_IN_HALVES) % 3)
    return transformers.ViTForImageClassification(config).eval(), samples


def translator(target):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0
    )
    source, out = torch.randint(3, 60, (TEXTS_IN_HALVES, 10)), torch.randint(3, 60, (TEXTS_IN_HALVES, target))
    inputs = {"input_ids": source, "decoder_input_ids": out}
    samples = Samples(inputs, torch.zeros_like(out), out.roll(-1, dims=1), ("translated",))
    return transformers.T5ForConditionalGeneration(config).eval(), samples


def test_a_classifier_has_no_halves():
    """Its 17 queries have one loss together."""
    model, samples = classifier()
    assert set(rests_of(model, samples).values()) == {None}
    labels, found = labels_with_halves(model, samples, ClassLogits())
    assert found == labels


@pytest.mark.parametrize("target", [7, 10])
def test_heads_of_an_encoder_have_no_halves_whatever_the_lengths(target):
    """Losses are of the target, and the positions at which these heads rest are of the source."""
    model, samples = translator(target)
    rests = rests_of(model, samples)
    encoder = [own for head, own in rests.items() if head.module.startswith("encoder")]
    decoder = [own for head, own in rests.items() if head.module.startswith("decoder")]
    assert encoder == [None, None]
    assert [own.shape for own in decoder] == [(TEXTS_IN_HALVES, target)] * 2
    labels, found = labels_with_halves(model, samples, MaskedToken())
    assert [label.domains for label in found if label.head.module.startswith("encoder")] == [
        label.domains for label in labels if label.head.module.startswith("encoder")
    ]


class Shares(Watcher):
    """The share of every row on the first key."""

    name, needs = "shares", frozenset()

    def __init__(self):
        self.of = {}

    def update(self, call, statistics):
        self.of[call.site.module] = call.weights(0, call.q_len)[..., 0]


def test_learned_tokens_in_front_are_not_of_the_text():
    model = make_sinklm({"name": "sink_token", "count": 2})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(30)  # rows with most of their weight on one key
    samples = token_samples(
        [("words", torch.randint(2, 300, (TEXTS_IN_HALVES, 9), generator=torch.Generator().manual_seed(1)))]
    )
    shares = Shares()
    with torch.no_grad(), attend(model, [shares]):
        model(**samples.inputs)
    for head, rests in rests_of(model, samples).items():
        expected = shares.of[head.module][:, head.head] > 0.5
        assert expected.shape == (TEXTS_IN_HALVES, 11)
        assert torch.equal(rests, expected[:, 2:])
        assert split(samples, rests).domains.shape == (TEXTS_IN_HALVES, 9)
    labels, found = labels_with_halves(model, samples, NextToken())
    assert [label.head for label in found] == [label.head for label in labels]
