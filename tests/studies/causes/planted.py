"""Models with planted truth: hand-set weights on the attention interface, so that what every head is for is known exactly."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.operation import HeadShape, Operation, bind
from sinklab.attention.probe import Watcher
from sinklab.attention.seam import register_operation
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.operations.key_bias import KeyBias
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax
from sinklab.sinks import Head, Sinks, find_sinks
from sinklab.studies.causes import engine
from sinklab.studies.causes.readout import Readout
from sinklab.studies.causes.samples import Samples, token_samples
from sinklab.studies.theory.trigger_bounds import softmax_solution, trigger_batch


def sinks_of(model: nn.Module, samples: Samples, **settings: Any) -> Sinks:
    """The sinks on some samples, by domain."""
    return find_sinks(model, samples.inputs, groups=samples.groups(), **settings)


def words(count: int = 4, length: int = 14) -> Samples:
    """Random texts of tokens 1 to 49."""
    return token_samples([("words", torch.randint(1, 50, (count, length), generator=torch.Generator().manual_seed(2)))])


class SquaredError(Readout):
    """Mean squared error of what a model gives back, ``(samples, seq_len, width)``."""

    unit = "squared units"

    def outputs(self, outputs: Any, samples: Samples) -> Tensor:
        return getattr(outputs, "last_hidden_state", outputs)

    def loss(self, outputs: Tensor, samples: Samples) -> Tensor:
        return (outputs - samples.targets.to(outputs)).square().mean(-1)


def small_lm(**fields: Any) -> SinkLM:
    """A model of random weights in float64, with three layers of two heads."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, **fields}
    return SinkLM(SinkLMConfig(vocab_size=50, initializer_range=0.3, **shape)).double().eval()


class Spy(Watcher):
    """Keeps every call of attention that it is shown."""

    name, needs = "spy", frozenset()

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        self.calls.append(call)


def killed_behind(monkeypatch: Any, pieces: int) -> list[Any]:
    """Calls of the engine, the last of which is interrupted once."""
    real, calls = engine.Engine.measure, []

    def measure(self: engine.Engine, edited: Any, chosen: Any = None, **options: Any) -> Any:
        calls.append(([str(one) for one in edited], chosen))
        if len(calls) == pieces + 1:
            raise KeyboardInterrupt
        return real(self, edited, chosen, **options)

    monkeypatch.setattr(engine.Engine, "measure", measure)
    return calls


def by_name(sinks: Sinks) -> dict[str, Head]:
    """Heads as the rows of an experiment look them up."""
    return {str(one): one for one in sinks.heads}


BOS, WORDS, HALF = 0, 24, 11
"""Token 0; tokens with it; words of one half of a text."""
FAR = 20.0
"""Score that leaves all keys without it a share of e^-20."""
MANY = 288
"""Texts: that something costs nothing takes some 250 where effects do not scatter."""


@dataclasses.dataclass
class PlantedHead:
    """Maps that act as ``W x``: query, key ``(k, D)``, value ``(v, D)``, output ``(D, v)``; and a key bias ``(k,)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    bias: Tensor | None = None


class PlantedAttention(nn.Module):
    """Causal heads with scores that are not scaled, through the attention interface."""

    is_causal = True

    def __init__(self, heads: list[PlantedHead], operation: Operation) -> None:
        super().__init__()
        assert len({(one.query.shape, one.value.shape) for one in heads}) == 1, "heads of one size"
        self.heads, self.implementation = len(heads), register_operation(operation)
        for name in ("query", "key", "value"):
            maps = torch.cat([getattr(head, name) for head in heads])
            linear = nn.Linear(maps.shape[1], maps.shape[0], bias=False, dtype=torch.float64)
            linear.weight.data = maps
            self.add_module(f"{name[0]}_proj", linear)
        merged = torch.cat([head.output for head in heads], dim=1)
        self.o_proj = nn.Linear(merged.shape[1], merged.shape[0], bias=False, dtype=torch.float64)
        self.o_proj.weight.data = merged
        shape = HeadShape(len(heads), len(heads), len(heads[0].query), len(heads[0].value), merged.shape[0])
        bind(self, operation, shape)
        if isinstance(operation, KeyBias):
            self.operation_state.key = nn.Parameter(torch.stack([head.bias for head in heads]))

    def forward(self, states: Tensor) -> Tensor:
        queries, keys, values = (
            linear(states).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, None)
        return self.o_proj(attend(self, queries, keys, values, None, scaling=1.0)[0].flatten(2))


class PlantedLayer(nn.Module):
    """Attention, with or without a residual connection round it."""

    def __init__(self, attention: PlantedAttention, residual: bool) -> None:
        super().__init__()
        self.self_attn, self.residual = attention, residual

    def forward(self, states: Tensor) -> Tensor:
        update = self.self_attn(states)
        return states + update if self.residual else update


class PlantedTrigger(nn.Module):
    """The trigger model with the weights that solve its task; its one head reads at triggers and rests on BOS elsewhere."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        solved = softmax_solution(width, length, error=1e-3)
        head = PlantedHead(solved.query[0], solved.key[0], solved.value[0], solved.output[0])
        self.layers = nn.ModuleList([PlantedLayer(PlantedAttention([head], Softmax()), residual=False)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers[0](inputs)


class PlantedLM(nn.Module):
    """A language model of one layer whose hidden state has named parts: token, token before, is it BOS, one, logits."""

    def __init__(self, heads: list[PlantedHead], operation: Operation | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PlantedLayer(PlantedAttention(heads, operation or Softmax()), residual=True)])

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        words = torch.eye(WORDS, dtype=torch.float64)[input_ids]
        before = words.roll(1, dims=1)
        before[:, 0] = 0.0
        first = torch.zeros_like(words[..., :1])
        first[:, 0] = 1.0  # where BOS stands in most texts here
        states = torch.cat((words, before, first, torch.ones_like(first), torch.zeros_like(words)), dim=-1)
        return CausalLMOutput(logits=self.layers[0](states)[..., LOGITS])


TOKEN, BEFORE = slice(0, WORDS), slice(WORDS, 2 * WORDS)
IS_BOS, ONE = 2 * WORDS, 2 * WORDS + 1
LOGITS = slice(2 * WORDS + 2, 3 * WORDS + 2)
WIDTH = 3 * WORDS + 2


def head(
    *, word: float = 0.0, before: float = 0.0, sink: float, bos_value: Tensor | None = None, write: Tensor | float = 4.0
) -> PlantedHead:
    """A head whose scores are a sum of three, and which copies the tokens that it attends to into the logits.

    Args:
        word: score of keys with the query's own token.
        before: score of keys behind the query's token: induction.
        sink: score of the sink, which is BOS, and the key bias where there is one.
        bos_value: value of BOS, ``(v,)``; 0 by default.
        write: from values to logits, ``(WORDS, v)``, or a factor on the token itself.
    """
    write = write * torch.eye(WORDS, dtype=torch.float64) if isinstance(write, float) else write
    size = write.shape[1]
    query, key = torch.zeros(2, 2 * WORDS + 1, WIDTH, dtype=torch.float64)
    query[:WORDS, TOKEN] = key[:WORDS, TOKEN] = torch.eye(WORDS)
    query[WORDS:-1, TOKEN] = key[WORDS:-1, BEFORE] = torch.eye(WORDS)
    key[:WORDS], key[WORDS:-1] = key[:WORDS] * word, key[WORDS:-1] * before
    query[-1, ONE], key[-1, IS_BOS] = 1.0, sink
    bias = torch.zeros(len(key), dtype=torch.float64)
    bias[-1] = sink
    value = torch.zeros(size, WIDTH, dtype=torch.float64)
    value[-WORDS:, TOKEN] = torch.eye(WORDS)
    value[:, BOS] = 0.0 if bos_value is None else bos_value
    output = torch.zeros(WIDTH, size, dtype=torch.float64)
    output[LOGITS] = write
    return PlantedHead(query, key, value, output, bias)


def induction(sink: float = FAR) -> PlantedHead:
    """Attends to what came after the last occurrence of this token, and rests on the sink where there was none."""
    return head(before=2 * FAR, sink=sink)


def no_op(sink: float = FAR) -> PlantedHead:
    """Always on the sink, which says nothing; without it the head would repeat the current token, which never comes next."""
    return head(word=FAR / 2, sink=sink)


def inert() -> PlantedHead:
    """Always on the sink, and nothing that it could say is read."""
    return head(sink=FAR, write=torch.zeros(WORDS, WORDS, dtype=torch.float64))


def broadcast(frequencies: Tensor) -> PlantedHead:
    """Always on BOS, whose value brings the logarithms of the frequencies of the tokens; nothing else does."""
    constant = torch.zeros(WORDS, dtype=torch.float64)
    constant[0] = 1.0
    write = torch.zeros(WORDS, WORDS, dtype=torch.float64)
    write[:, 0] = frequencies.clamp_min(1e-3).log()
    return head(sink=FAR, bos_value=constant, write=write)


def by_first_token(of_first: list[Tensor]) -> PlantedHead:
    """Always on position 0, whose token, 1 or 2, brings the logarithms of one of two tables of frequencies."""
    write = torch.zeros(WORDS, WORDS, dtype=torch.float64)
    for token, frequencies in enumerate(of_first, start=1):
        write[:, token] = frequencies.clamp_min(1e-3).log()
    return head(sink=FAR, write=write)


def always_the_same(frequencies: Tensor) -> PlantedHead:
    """Attends to all tokens but BOS, each of which has one and the same value: the logarithms of the frequencies of tokens."""
    said = broadcast(frequencies)
    said.key[-1, IS_BOS] = -FAR
    said.value.zero_()
    said.value[0, ONE], said.value[0, IS_BOS] = 1.0, -1.0
    return said


# --- texts ------------------------------------------------------------------------------------------------------------------


def repeated(texts: int, seed: int) -> Tensor:
    """BOS, eleven different words, and the same again, ``(texts, 23)``."""
    return halves(texts, seed, same=True)


def fresh(texts: int, seed: int) -> Tensor:
    """BOS and 22 different words."""
    return halves(texts, seed, same=False)


def halves(texts: int, seed: int, same: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.stack([torch.randperm(WORDS - 1, generator=generator) + 1 for _ in range(texts)])
    second = words[:, :HALF] if same else words[:, HALF : 2 * HALF]
    return torch.cat((torch.zeros(texts, 1, dtype=torch.int64), words[:, :HALF], second), dim=1)


def drawn(frequencies: Tensor, texts: int, seed: int) -> Tensor:
    """BOS and independent words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.multinomial(frequencies.expand(texts, -1), 2 * HALF, replacement=True, generator=generator)
    return torch.cat((torch.zeros(texts, 1, dtype=torch.int64), words), dim=1)


def topics() -> list[Tensor]:
    """Frequencies of ten words each, none of which both have."""
    return [torch.zeros(WORDS, dtype=torch.float64).index_fill(0, words, 0.1) for words in torch.arange(3, 23).split(10)]


def of_topics(frequencies: list[Tensor], texts: int, seed: int) -> Tensor:
    """Token 1 or 2, and independent words from the table of that token."""
    first = torch.arange(texts) % 2 + 1
    words = torch.cat([drawn(frequencies[token - 1], 1, 1000 * seed + number) for number, token in enumerate(first.tolist())])
    words[:, 0] = first
    return words


def zipf() -> Tensor:
    """Frequencies of words as 1 / rank, none of BOS."""
    frequencies = torch.zeros(WORDS, dtype=torch.float64)
    frequencies[1:] = 1.0 / torch.arange(1, WORDS)
    return frequencies / frequencies.sum()


@dataclasses.dataclass
class Planted:
    """A model, texts, and the labels that its heads must get, by domain where these differ."""

    model: nn.Module
    samples: Samples
    labels: list[str]
    place: int | str | None


def planted(name: str, seed: int, texts: int = MANY) -> Planted:
    """One of the models with planted truth, on texts of a seed."""
    if name == "trigger":
        batch = trigger_batch(texts, 16, 16, torch.Generator().manual_seed(seed), dtype=torch.float64)
        domains = batch.is_trigger.long()
        samples = Samples({"inputs": batch.inputs}, domains, batch.targets, ("other", "trigger"))
        return Planted(PlantedTrigger(16, 16).eval(), samples, ["switch"], 0)
    if name == "broadcast":
        model, tokens = PlantedLM([broadcast(zipf()), inert()]), drawn(zipf(), texts, seed)
        return Planted(model.eval(), token_samples([("drawn", tokens)]), ["bias", "unneeded"], 0)
    if name in ("bias", "message"):
        tables = topics() if name == "message" else [zipf(), zipf()]
        model, tokens = PlantedLM([by_first_token(tables), inert()]), of_topics(tables, texts, seed)
        label = "broadcast" if name == "message" else "bias"
        return Planted(model.eval(), token_samples([("drawn", tokens)]), [label, "unneeded"], 0)
    if name == "constant":
        model, tokens = PlantedLM([always_the_same(zipf()), inert()]), drawn(zipf(), texts, seed)
        return Planted(model.eval(), token_samples([("drawn", tokens)]), ["constant", "unneeded"], 0)
    if name == "two domains":
        groups = [("repeated", repeated(texts, seed)), ("fresh", fresh(texts, seed + 1000))]
        model = PlantedLM([induction(), no_op(), inert()])
        return Planted(model.eval(), token_samples(groups), ["switch", "dormant", "unneeded"], 0)
    samples = token_samples([("repeated", repeated(texts, seed))])
    if name == "induction":
        return Planted(PlantedLM([induction(), no_op(), inert()]).eval(), samples, ["text-dependent", "dormant", "unneeded"], 0)
    if name == "key bias":
        heads = [induction(), no_op()]
        for one in heads:
            one.key[-1, IS_BOS] = 0.0
        return Planted(PlantedLM(heads, KeyBias()).eval(), samples, ["text-dependent", "dormant"], "null")
    assert name == "sigmoid", name
    heads = [head(before=2 * FAR, sink=0.0), head(sink=0.0, write=0.0)]
    return Planted(PlantedLM(heads, Sigmoid(bias=-FAR)).eval(), samples, ["text-dependent", "unneeded"], None)
