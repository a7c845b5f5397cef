"""Models that are only read: the embedded ones and larger checkpoints, and long texts that a seed draws for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sinklab.corpora import resolve_corpus
from sinklab.models.embedded import embedded_called, embedded_path
from sinklab.models.loading import LoadedModel, load_model
from sinklab.policies.base import Policy
from sinklab.registry import read_outs
from sinklab.streaming.perplexity import losses
from sinklab.training.rows import token_losses
from sinklab_claims.contract.claim import Cost, Measure, OfCheckpoint, OnCheckpoint, Scale
from sinklab_claims.contract.effect import Numbers
from sinklab_claims.contract.trained import Checkpoint

__all__ = [
    "DRAWS",
    "EMBEDDED",
    "LAST",
    "MARGIN",
    "MODELS",
    "NOT_OF_TRAININGS",
    "READ_IN_SECONDS",
    "LongTexts",
    "about_long_texts",
    "at_scale",
    "draw",
    "embedded_model",
    "keep",
    "model_of",
    "numbers_of",
    "on_checkpoint",
    "opened",
]

MODELS: Mapping[Scale, str] = {"tiny": "embedded:softmax", "60m": "EleutherAI/pythia-70m", "1b": "EleutherAI/pythia-1b"}
"""Scales at which one model is measured, and a seed draws texts for it; at ``small`` a seed is a training."""

NUMBER = 16
"""Texts of a draw."""

READ_IN_SECONDS: Mapping[Scale, Cost] = {"tiny": "seconds", "small": "seconds"}
"""Costs of a claim about an embedded model on short rows."""

READ_IN_MINUTES: Mapping[Scale, Cost] = {"tiny": "minutes", "small": "minutes", "60m": "hours", "1b": "gpu"}
"""Of a claim about long texts that a trained model reads."""

NOT_OF_TRAININGS: Mapping[Scale, Cost] = {"tiny": "minutes", "60m": "hours", "1b": "gpu"}
"""Of a claim that trainings of one recipe, all with BOS in front of every row, say nothing about."""

MARGIN = 0.05
"""Nats per token: a difference below it is none. Published failures are of 0.4 to 7 nats, agreements of 0 to 0.05."""

LAST = 128
"""Tokens at the end of every text at which re-computation, which reads a whole window for each, is compared."""

TOKENS_AT_ONCE = 32_768

EMBEDDED: Mapping[Scale, str] = {
    "tiny": "one trained model of 1.5 million parameters; a seed is a draw of 100 texts, so intervals are over texts, not "
    "trainings",
    "small": "trainings of 1.5 million parameters on Python source, 5,000 steps; each reads 100 texts of its own",
}
"""Said of every claim that rests on :func:`numbers_of`."""

DRAWS: Mapping[Scale, str] = {
    "tiny": "one trained model, embedded:softmax; seeds are draws of 16 texts, so intervals are over texts and not trainings",
    "small": "trainings of one recipe, embedded:softmax and what further seeds gave; each reads 16 texts of its own",
}
"""Said of every claim that rests on :func:`draw`, at the scales where it was run."""


@functools.lru_cache(maxsize=2)
def opened(name: str) -> LoadedModel:
    """A model that is only read, loaded once."""
    return load_model(name)


def model_of(scale: Scale, seed: int, operation: str = "softmax") -> str:
    """Name of the model that is measured at a scale: at ``small`` that of a training, at others the same for all seeds.

    Raises:
        UnknownNameError: a seed from which no model was trained; the message says how to train one.
    """
    if scale != "small":
        return MODELS[scale].replace("embedded:softmax", f"embedded:{operation}")
    name = embedded_called(operation, seed)
    embedded_path(name)  # refused here, before texts are drawn for it
    return name


def embedded_model(operation: str, seed: int, scale: Scale) -> Checkpoint:
    """An embedded model and rows of held-out Python source, each from a random line on.

    Args:
        operation: ``softmax`` or ``sigmoid``.
        seed: of the draw of the texts, and at ``small`` of the training too.
    """
    return Checkpoint(opened(model_of(scale, seed, operation)), resolve_corpus("python_source"), seed)


def numbers_of(operation: str, seed: int, scale: Scale, *wanted: str) -> Mapping[str, float]:
    """What read-outs say of an embedded model on the texts of a seed."""
    model = embedded_model(operation, seed, scale)
    numbers: dict[str, float] = {}
    for read_out in wanted:
        numbers |= read_outs[read_out](model)
    return numbers


@dataclasses.dataclass(frozen=True, eq=False)
class LongTexts:
    """Long texts and the model that reads them.

    Attributes:
        rows: int64 ``(texts, 4 · trained)``, from random lines on, with BOS in front where the tokenizer puts one.
        bos: id of that token; ``None`` where there is none.
        trained: tokens of the context that the model was trained on.
    """

    loaded: LoadedModel
    rows: Tensor
    bos: int | None
    trained: int

    @property
    def budget(self) -> int:
        """Tokens before the query that a bounded cache holds: a quarter of the context, as in Xiao et al.'s Table 1."""
        return self.trained // 4

    def losses(self, policy: Policy | dict[str, object] | str, rows: Tensor | None = None, first: int | None = None) -> Tensor:
        """Loss in nats of the tokens from ``first`` on, by default from twice the trained context on, ``(texts, tokens)``."""
        rows = self.rows if rows is None else rows
        start = 2 * self.trained if first is None else first
        at_once = max(1, TOKENS_AT_ONCE // rows.shape[1])
        return torch.cat([losses(self.loaded.model, part, policy, first=start) for part in rows.split(at_once)])

    def recomputed(self) -> Tensor:
        """Loss of the last ``LAST`` tokens if for each the budget and the query are encoded anew, ``(texts, LAST)``.

        Windows begin as texts do, with BOS, at the expense of the oldest token, where there is one: the model has hardly seen
        one that does not.
        """
        windows = self.rows[:, -LAST - self.budget - 1 :].unfold(1, self.budget + 2, 1).clone()
        if self.bos is not None:
            windows[..., 0] = self.bos
        device, at_once = self.loaded.device, max(1, TOKENS_AT_ONCE // (self.budget + 2))
        with torch.no_grad():
            losses = [
                token_losses(self.loaded.model, part.to(device), after=self.budget).cpu()
                for part in windows.flatten(0, 1).split(at_once)
            ]
        return torch.cat(losses).view(len(windows), LAST)


def keep(num_sinks: int, held: int, **settings: object) -> dict[str, object]:
    """The policy that holds ``held`` tokens before the query, ``num_sinks`` of them the first of the text."""
    return {"name": "sink_window", "num_sinks": num_sinks, "window": held - num_sinks, **settings}


def draw(seed: int, scale: Scale) -> LongTexts:
    """The texts of a seed, held-out Python source, and the model of the scale; the same ones for every claim."""
    checkpoint = embedded_model("softmax", seed, scale)
    return _texts_of(checkpoint, checkpoint.streams(NUMBER))


def _texts_of(checkpoint: Checkpoint, rows: Tensor) -> LongTexts:
    return LongTexts(checkpoint.loaded, rows, checkpoint.bos, checkpoint.trained_on)


def at_scale(numbers: Callable[[LongTexts], Numbers]) -> Measure:
    """The numbers of long texts as what a claim measures at a seed and a scale."""

    @functools.wraps(numbers)
    def measure(seed: int, scale: Scale) -> Numbers:
        return numbers(draw(seed, scale))

    return measure


def on_checkpoint(numbers: Callable[[LongTexts], Numbers]) -> OfCheckpoint:
    """The same of a checkpoint and its own texts."""

    @functools.wraps(numbers)
    def measure(checkpoint: Checkpoint) -> Numbers:
        return numbers(_texts_of(checkpoint, checkpoint.streams()))

    return measure


def about_long_texts(numbers: Callable[[LongTexts], Numbers], **checkpoint: Any) -> dict[str, Any]:
    """What claims about long texts have in common, by the fields of a claim.

    Args:
        numbers: what is measured, at every scale and on any checkpoint.
        checkpoint: further fields of :class:`OnCheckpoint`.
    """
    return {
        "measure": at_scale(numbers),
        "natural_text": True,
        "one_model": MODELS,
        "checkpoint": OnCheckpoint(measure=on_checkpoint(numbers), reads="long", **checkpoint),
        "costs": READ_IN_MINUTES,
        "evidence": DRAWS,
    }
