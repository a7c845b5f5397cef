"""Guo et al. 2024: heads that are active at triggers and dormant elsewhere on bigram-backcopy, and what Adam has to do with it.

The language, as released: BOS comes first; the first character is drawn from the marginal law without triggers; then the next
character follows the law ``P(x, ·)`` of its predecessor ``x``, except behind a trigger, where it *is* the token before the
trigger. Two triggers never meet: the first character is none, and what follows a trigger stood before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.corpora import resolve_corpus
from sinklab.errors import InputError
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.models.losses import cross_entropies
from sinklab.positions.learned import Learned
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, VALUE_RATIO, Metric
from sinklab_claims.contract.claim import BASELINE, Part, Scale, Variant
from sinklab_claims.contract.effect import Difference, Numbers, Value
from sinklab_claims.contract.trained import TrainedModel
from sinklab_claims.variants import Fields, of_paper

SAMPLES, EVALUATION_SEED = 256, 1_000_003
"""Fresh samples that a model is evaluated on, and their seed; seeds of training are small numbers."""

_GUO = "Guo et al. 2024 (arXiv 2410.13835)"

NUMBERS = (
    Metric("bos_weight", "weight", "Mean weight on BOS of queries that are no triggers.", paper=_GUO),
    Metric("bos_weight_trigger", "weight", "Mean weight on BOS of queries that are triggers.", paper=_GUO),
    Metric("previous_weight", "weight", "Mean weight on the token before, of queries that are no triggers."),
    Metric("previous_weight_trigger", "weight", "Mean weight on the token before, of triggers.", paper=_GUO),
    VALUE_RATIO,
    Metric("trigger_excess", "nats", "Expected next-token loss above the entropy floor of the task, at triggers."),
    Metric("other_excess", "nats", "Expected next-token loss above the entropy floor of the task, off triggers."),
)
"""Numbers of a trained model; those of one head are of the head that copies: the one without which triggers cost most."""


# --- the language -------------------------------------------------------------------------------------------------------------


def only_letters(text: str) -> str:
    """A text as lower-case words with one blank between them: 27 characters, a to z and the blank.

    In text as it stands triggers follow some characters nearly always (a blank a comma, a blank a line break in code). Each of
    these then comes back behind the trigger, over and over, and fills a quarter of all sequences.
    """
    return re.sub("[^a-z]+", " ", text.lower())


def estimate_laws(texts: Iterable[str], characters: int, triggers: int, budget: int = 1_000_000) -> np.ndarray:
    """The laws of :class:`BackcopyProblem` from the bigrams of a text: counts of pairs divided by their sums, nothing smoothed.

    Args:
        texts: pairs are not counted across texts.
        characters: how many of the most frequent ones to keep. Others are taken out of the text, whose neighbours then meet;
            ties go to the lower code point.
        triggers: how many of the most frequent are triggers; 3 in the paper.
        budget: characters of text to read.

    Raises:
        InputError: fewer characters than asked for, or one that nothing follows.
    """
    read: list[np.ndarray] = []
    for text in texts:
        codes = np.frombuffer(text[:budget].encode("utf-32-le", errors="replace"), dtype="<u4")
        read.append(codes)
        budget -= len(codes)
        if budget <= 0:
            break
    present, counts = np.unique(np.concatenate(read), return_counts=True) if read else (np.zeros(0), np.zeros(0))
    if len(present) < characters:
        raise InputError(f"bigram chain: the text has {len(present)} different characters, and the task needs {characters}")
    chosen = present[np.lexsort((present, -counts))[:characters]]
    order = np.argsort(chosen)
    pairs, single = np.zeros((characters, characters)), np.zeros(characters)
    for codes in read:
        codes = codes[np.isin(codes, chosen)]
        tokens = order[np.searchsorted(chosen[order], codes)]
        single += np.bincount(tokens, minlength=characters)
        pairs += np.bincount(tokens[:-1] * characters + tokens[1:], minlength=characters**2).reshape(characters, characters)
    totals = pairs.sum(axis=1)
    if (totals == 0).any():
        raise InputError(f"bigram chain: nothing follows {chr(int(chosen[int(np.argmin(totals))]))!r} in the text")
    return laws_of(pairs / totals[:, None], single / single.sum(), triggers)


def laws_of(following: np.ndarray, marginal: np.ndarray, triggers: int) -> np.ndarray:
    """Laws of the next token: ``P`` off triggers, and behind BOS the marginal law without them; see the top of this file."""
    first = marginal.copy()
    first[:triggers] = 0
    laws: np.ndarray = np.vstack((following, first / first.sum()))
    laws[:triggers] = 0
    return laws


@dataclasses.dataclass(frozen=True, eq=False)
class BackcopyProblem:
    """Samples of one length, and how far a prediction is from the best possible one.

    Args:
        laws: law of the next token by token, float64 ``(size + 1, size)``; characters come first, the most frequent foremost,
            and BOS is the token behind them. Rows of triggers are 0.
        triggers: so many of the first characters are triggers; at least 1.
        length: tokens that a model reads, BOS included, and predictions that it makes; at least 4, 256 in the paper.
    """

    laws: np.ndarray
    triggers: int
    length: int

    @property
    def vocab_size(self) -> int:
        """Token ids: characters and BOS, which is the last."""
        return len(self.laws)

    @cached_property
    def _thresholds(self) -> Tensor:
        """Distribution functions of the next token, float64 ``(vocab_size, size)``; infinite from the last possible one on."""
        thresholds = self.laws.cumsum(axis=1)
        # Rounding may leave a sum below 1, and a number above it must not draw what cannot follow.
        last = self.laws.shape[1] - 1 - (self.laws[:, ::-1] > 0).argmax(axis=1)
        thresholds[np.arange(self.laws.shape[1]) >= last[:, None]] = np.inf
        return torch.from_numpy(thresholds)

    @cached_property
    def _entropies(self) -> Tensor:
        """Entropy of the next token by token, in nats; 0 for triggers, whose successor is known."""
        return torch.from_numpy(-(self.laws * np.log(np.where(self.laws > 0, self.laws, 1.0))).sum(axis=1))

    def draw(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples and the last target, int64 ``(batch, length + 1)``: read ``[:, :-1]``, predict ``[:, 1:]``."""
        return self.from_uniforms(torch.rand(batch, self.length, generator=generator, dtype=torch.float64))

    def from_uniforms(self, uniforms: Tensor) -> Tensor:
        """Samples from numbers in [0, 1), float64 ``(batch, length)``, by the inverse of the distribution function."""
        tokens = torch.empty(len(uniforms), self.length + 1, dtype=torch.int64)
        tokens[:, 0] = self.vocab_size - 1
        for at in range(self.length):
            now = tokens[:, at]
            drawn = (self._thresholds[now] <= uniforms[:, at, None]).sum(dim=1)
            tokens[:, at + 1] = torch.where(now < self.triggers, tokens[:, max(at - 1, 0)], drawn)
        return tokens

    def is_trigger(self, tokens: Tensor) -> Tensor:
        """Boolean, same shape."""
        return tokens < self.triggers

    def excess(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Expected loss above the least possible, in nats: Kullback-Leibler divergence of the prediction from the true law.

        Args:
            tokens: what was read, int64 ``(batch, length)``.
            logits: ``(batch, length, vocab_size)``.

        Returns:
            float64 ``(batch, length)``, 0 or more. At triggers the true law is all on the token before.
        """
        predicted = torch.log_softmax(logits.double(), dim=-1)
        laws = torch.from_numpy(self.laws)
        expected = -(laws[tokens] * predicted[..., : laws.shape[1]]).sum(-1) - self._entropies[tokens]
        # A trigger is never first, so the token that rolls in there is not read.
        copied = -predicted.gather(-1, tokens.roll(1, dims=1)[..., None])[..., 0]
        return torch.where(self.is_trigger(tokens), copied, expected)


# --- the model and its training -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained, besides the seed. The defaults are small, and train in minutes on one core.

    Attributes:
        layers: of one head each; 1 to 3 in the paper.
        optimizer: ``adamw`` (betas 0.9 and 0.99) or ``sgd`` (momentum 0.9); both with weight decay 1e-4.
        length, batch: tokens of a sample, and samples a step.
    """

    layers: int = 1
    optimizer: str = "adamw"
    adamw_rate: float = 1e-3
    sgd_rate: float = 0.03
    characters: int = 27
    triggers: int = 3
    length: int = 64
    width: int = 64
    batch: int = 32
    steps: int = 4000


def make_model(vocab_size: int, length: int, *, width: int, layers: int = 1, heads: int = 1, seed: int = 0) -> SinkLM:
    """The decoder of Guo et al. 2024, as released, for so many token ids and sequences of so many tokens.

    Learned positions, LayerNorm before each sublayer and at the end, a ReLU feed-forward layer of four times the width, no
    biases but those of the norms, an output map of its own. The start is that of torch: embeddings and positions normal with
    standard deviation 1, linear maps uniform within ``1 / sqrt(fan_in)``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SinkLM(
            SinkLMConfig(
                vocab_size=vocab_size,
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                max_position_embeddings=length,
                position={"name": "learned"},
                norm="layer_norm",
                feed_forward="relu",
                tie_word_embeddings=False,
            )
        )
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()
            elif isinstance(module, Learned):
                nn.init.normal_(module.table)
    return model


def train(settings: Settings, problem: BackcopyProblem, seed: int) -> SinkLM:
    """Train one model on fresh samples at every step; it stops early where the loss is no number.

    The same seed gives the same model on the same machine.
    """
    model = make_model(problem.vocab_size, problem.length, width=settings.width, layers=settings.layers, seed=seed).train()
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.sgd_rate, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.adamw_rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=True
        )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.steps):
        tokens = problem.draw(settings.batch, generator)
        loss = cross_entropies(model(tokens[:, :-1], use_cache=False).logits, tokens[:, 1:]).mean()
        if not bool(torch.isfinite(loss)):
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return model.eval()


# --- what the heads do --------------------------------------------------------------------------------------------------------


class HeadNumbers(Watcher):
    """The numbers of one batch, sample by sample; made for one forward with :func:`~sinklab.attention.session.attend`.

    Queries count from the second character on: before it, the token before is BOS.

    Args:
        is_trigger: boolean ``(batch, length)``.
        front: learned tokens that the model puts in front of BOS.

    Attributes:
        heads: layer to the name of a number to float32 ``(batch, heads)``; nan where a sample has no such query.
    """

    name: ClassVar[str] = "backcopy"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, is_trigger: Tensor, front: int = 0) -> None:
        self.is_trigger, self.front = is_trigger, front
        self.heads: dict[int, dict[str, Tensor]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        front = self.front
        weights = call.weights(front, call.q_len)[..., front:]  # (batch, heads, queries, keys)
        on_bos, on_previous = weights[..., 0], torch.zeros_like(weights[..., 0])
        on_previous[..., 1:] = weights.diagonal(-1, dim1=-2, dim2=-1)
        counted = torch.ones_like(self.is_trigger)
        counted[:, :2] = False
        triggers, others = (
            chosen[:, None].to(weights.dtype) for chosen in (self.is_trigger & counted, ~self.is_trigger & counted)
        )

        def mean(numbers: Tensor, chosen: Tensor) -> Tensor:
            return (numbers * chosen).sum(-1) / chosen.sum(-1)

        norms = call.values[:, :, front:].float().norm(dim=-1).repeat_interleave(call.groups, dim=1)
        self.heads[call.site.layer] = {
            "bos_weight": mean(on_bos, others),
            "bos_weight_trigger": mean(on_bos, triggers),
            "previous_weight": mean(on_previous, others),
            "previous_weight_trigger": mean(on_previous, triggers),
            "value_ratio": norms[..., 0] / norms[..., 1:].mean(-1),
        }


@contextlib.contextmanager
def knocked_out(model: SinkLM, layer: int, head: int) -> Iterator[None]:
    """The model without one head: its output is 0 on the way into the output map, until the block ends."""
    o_proj, heads = model.get_submodule(f"layers.{layer}.self_attn.o_proj"), int(model.config.num_attention_heads)

    def zero(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        merged = inputs[0].clone()
        merged.unflatten(-1, (heads, -1))[..., head, :] = 0
        return (merged, *inputs[1:])

    handle = o_proj.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        handle.remove()


def risks(model: SinkLM, problem: BackcopyProblem, tokens: Tensor) -> tuple[float, float]:
    """Excess loss at triggers and at other places in nats: means of samples, of those that have such places."""
    excess, triggers = problem.excess(tokens, model(tokens, use_cache=False).logits), problem.is_trigger(tokens)
    return _mean((excess * triggers).sum(1) / triggers.sum(1)), _mean((excess * ~triggers).sum(1) / (~triggers).sum(1))


@torch.no_grad()
def evaluate(model: SinkLM, problem: BackcopyProblem, samples: int = SAMPLES) -> dict[str, float]:
    """:data:`NUMBERS` of a model in evaluation mode on fresh samples; what is not finite is absent."""
    tokens = problem.draw(samples, torch.Generator().manual_seed(EVALUATION_SEED))[:, :-1]
    probe = HeadNumbers(problem.is_trigger(tokens), model.tokens_in_front)
    # Of a model that diverged there is nothing to verify; its numbers are no numbers, and are left out.
    sound = bool(model(tokens, use_cache=False).logits.isfinite().all())
    with attend(model, [probe], verify=sound):
        at_triggers, elsewhere = risks(model, problem, tokens)
    without: dict[tuple[int, int], float] = {}
    for layer, of_layer in probe.heads.items():
        for head in range(of_layer["bos_weight"].shape[1]):
            with knocked_out(model, layer, head):
                without[layer, head] = risks(model, problem, tokens)[0]
    layer, head = max(without, key=lambda at: without[at] if math.isfinite(without[at]) else -math.inf)
    numbers = {
        "trigger_excess": at_triggers,
        "other_excess": elsewhere,
        **{name: _mean(values[:, head]) for name, values in probe.heads[layer].items()},
    }
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def numbers_of(settings: Settings, seed: int) -> dict[str, float]:
    """:data:`NUMBERS` of one model, trained on a chain counted from the installed Python source."""
    texts = resolve_corpus("python_source").documents("train")
    laws = estimate_laws(map(only_letters, texts), settings.characters, settings.triggers)
    problem = BackcopyProblem(laws, settings.triggers, settings.length)
    return evaluate(train(settings, problem, seed), problem)


def _mean(values: Tensor) -> float:
    """Mean over the samples that have a number."""
    return float(values.double().nanmean())


guo = of_paper("guo2024", _GUO)

HALF = 0.5
"""A majority of the weight: it decides whether a head is active or dormant."""

LEARNED = 0.1
"""Nats above the entropy of the language, at triggers, below which copying is learned."""

SETTINGS: Mapping[Scale, Settings] = {"tiny": Settings(width=32, length=32, steps=2000), "small": Settings()}
"""One layer with one head."""


def measure(seed: int, scale: Scale) -> Numbers:
    """The one head of the model, trained on a chain counted from the installed Python source."""
    return {"softmax": numbers_of(SETTINGS[scale], seed)}


@claims.register("backcopy_dormant")
@guo
def backcopy_dormant() -> Fields:
    """On bigram-backcopy sequences the head copies behind triggers and is dormant elsewhere: its weight is on BOS, whose value
    is small."""
    return dict(
        where="section 2",
        published="One layer with one head: at triggers the weight is on the token before, elsewhere on BOS; the value of BOS "
        "is near 0.",
        presupposes=(Part("copying is learned", Value("trigger_excess", "softmax"), less_than=LEARNED),),
        parts=(
            Part("active at triggers", Value("previous_weight_trigger", "softmax"), more_than=HALF),
            Part("dormant elsewhere", Value("bos_weight", "softmax"), more_than=HALF),
            Part("off BOS at triggers", Difference("bos_weight", "softmax", "softmax", "bos_weight_trigger"), more_than=HALF),
            Part("the value of BOS is drained", Value("value_ratio", "softmax"), less_than=HALF),
        ),
        measure=measure,
        costs={"tiny": "minutes", "small": "minutes"},
    )


# --- several heads and layers -------------------------------------------------------------------------------------------------

WHERE = {"at_trigger": "_trigger", "elsewhere": ""}

METRICS = (
    *(
        Metric(f"{key}_{where}", "weight", f"Mean weight of the copying head on {what}, of {queries}.", range=FRACTION)
        for key, what in (("previous", "the token before"), ("bos", "BOS"))
        for where, queries in zip(WHERE, ("queries that are triggers", "other queries"), strict=True)
    ),
    VALUE_RATIO,
)

TRIGGERS = "!?#"
"""Those of the corpus ``bigram_backcopy``."""


def copy_head(trained: TrainedModel) -> dict[str, float]:
    """Weights of the head that looks at the token before most at triggers, on held-out rows. :data:`METRICS`."""
    loaded, rows = trained.loaded, trained.rows(100)
    assert loaded.tokenizer is not None  # trained on characters
    triggers = torch.tensor([loaded.tokenizer.convert_tokens_to_ids(trigger) for trigger in TRIGGERS], device=rows.device)
    probe = HeadNumbers(torch.isin(rows, triggers), trained.config.model.tokens_in_front)
    with torch.no_grad(), attend(loaded.model, [probe]):
        loaded.model(rows, use_cache=False)
    means = [
        {name: float(values[:, head].nanmean()) for name, values in numbers.items()}
        for numbers in probe.heads.values()
        for head in range(numbers["bos_weight"].shape[1])
    ]
    copies = max(means, key=lambda numbers: numbers["previous_weight_trigger"])
    names = {f"{key}_{where}": f"{key}_weight{of}" for key in ("previous", "bos") for where, of in WHERE.items()}
    return {**{name: copies[of] for name, of in names.items()}, "value_ratio": copies["value_ratio"]}


@claims.register("backcopy_dormant_among_heads")
@guo
def backcopy_dormant_among_heads() -> Fields:
    """Among several heads too, one copies behind triggers and is dormant elsewhere: its weight is on BOS, whose value is small.

    The baseline of the smallest scale, whose text is of this kind; ``backcopy_dormant`` has the paper's model.
    """
    leaves = Difference("bos_elsewhere", BASELINE, BASELINE, "bos_at_trigger")
    return dict(
        where="sections 2 and 3",
        published="Shown for one layer with one head on such sequences, and for single heads of Llama 2 7B on text.",
        presupposes=(Part("a head copies", Value("previous_at_trigger", BASELINE), more_than=HALF),),
        parts=(
            Part("it is dormant elsewhere", Value("bos_elsewhere", BASELINE), more_than=HALF),
            Part("it leaves BOS at triggers", leaves, more_than=HALF),
            Part("the value of BOS is drained", Value("value_ratio", BASELINE), less_than=HALF),
        ),
        variants=(Variant(BASELINE),),
        read_outs=(copy_head,),
        costs={"tiny": "minutes"},
    )


# --- SGD in the place of Adam -------------------------------------------------------------------------------------------------

ADAM, SGD = "adamw", "sgd"

LAYERS = 3
"""Those of the models in which the paper swaps the optimiser."""

SINK = 0.3
"""Mean weight on BOS from which a head has its sink there: the threshold of Gu et al. 2024; even weights have 0.1."""


def adam_and_sgd(seed: int, scale: Scale) -> Numbers:
    """The head that copies of a model trained by each from the same initial weights."""
    settings = dataclasses.replace(SETTINGS[scale], layers=LAYERS)
    return {by: numbers_of(dataclasses.replace(settings, optimizer=by), seed) for by in (ADAM, SGD)}


@claims.register("sgd_keeps_the_sink")
@guo
def sgd_keeps_the_sink() -> Fields:
    """Trained by SGD instead of Adam, a model that has learned the task has its sink too.

    The paper's own task and depth, on which SGD learns what Adam learns; of the head that copies, off triggers.
    """
    with_adam, with_sgd = (
        Part(f"there is a sink with {by}", Value("bos_weight", by, FRACTION), more_than=SINK) for by in (ADAM, SGD)
    )
    learn = (Part(f"copying is learned by {by}", Value("trigger_excess", by), less_than=LEARNED) for by in (ADAM, SGD))
    return dict(
        published="From Adam to SGD residual peaks vanish and sinks stay, in models of three layers on bigram-backcopy.",
        presupposes=(*learn, with_adam),
        parts=(with_sgd,),
        measure=adam_and_sgd,
        costs={"tiny": "minutes", "small": "hours"},
    )
