"""Bigram-backcopy samples drawn from a chain, the best possible prediction at every place, and how far a model is from it."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.studies.backcopy.chain import BigramChain

__all__ = ["BackcopyProblem"]


@dataclasses.dataclass(frozen=True, eq=False)
class BackcopyProblem:
    """Samples of one length.

    Args:
        chain: where they come from.
        length: tokens that a model reads, BOS included, and predictions that it makes; at least 4, 256 in the paper.

    Raises:
        ConfigurationError: a length below 4: BOS, a character, a trigger and its copy.
    """

    chain: BigramChain
    length: int

    def __post_init__(self) -> None:
        if self.length < 4:
            raise ConfigurationError(
                f"bigram-backcopy: length {self.length} must be at least 4: BOS, a character, a trigger and its copy"
            )

    @cached_property
    def _thresholds(self) -> Tensor:
        """Distribution functions of the next token, float64 ``(vocab_size, size)``; infinite from the last possible one on."""
        laws = self.chain.laws()
        thresholds = laws.cumsum(axis=1)
        # Rounding may leave a sum below 1, and a number above it must not draw what cannot follow.
        last = laws.shape[1] - 1 - (laws[:, ::-1] > 0).argmax(axis=1)
        thresholds[np.arange(laws.shape[1]) >= last[:, None]] = np.inf
        return torch.from_numpy(thresholds)

    @cached_property
    def _laws(self) -> Tensor:
        return torch.from_numpy(self.chain.laws())

    @cached_property
    def _entropies(self) -> Tensor:
        return torch.from_numpy(self.chain.entropies())

    def draw(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples and the last target, int64 ``(batch, length + 1)``: read ``[:, :-1]``, predict ``[:, 1:]``."""
        return self.from_uniforms(torch.rand(batch, self.length, generator=generator, dtype=torch.float64))

    def from_uniforms(self, uniforms: Tensor) -> Tensor:
        """Samples from numbers in [0, 1), float64 ``(batch, length)``, by the inverse of the distribution function."""
        chain, thresholds = self.chain, self._thresholds
        tokens = torch.empty(len(uniforms), self.length + 1, dtype=torch.int64)
        tokens[:, 0] = chain.bos
        for at in range(self.length):
            now = tokens[:, at]
            drawn = (thresholds[now] <= uniforms[:, at, None]).sum(dim=1)
            tokens[:, at + 1] = torch.where(now < chain.num_triggers, tokens[:, max(at - 1, 0)], drawn)
        return tokens

    def is_trigger(self, tokens: Tensor) -> Tensor:
        """Boolean, same shape."""
        return tokens < self.chain.num_triggers

    def excess(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Expected loss above the least possible, in nats: Kullback-Leibler divergence of the prediction from the true law.

        Args:
            tokens: what was read, int64 ``(batch, length)``.
            logits: ``(batch, length, vocab_size)``.

        Returns:
            float64 ``(batch, length)``, 0 or more. At triggers the true law is all on the token before.
        """
        predicted = torch.log_softmax(logits.double(), dim=-1)
        expected = -(self._laws[tokens] * predicted[..., : self.chain.size]).sum(-1) - self._entropies[tokens]
        # A trigger is never first, so the token that rolls in there is not read.
        copied = -predicted.gather(-1, tokens.roll(1, dims=1)[..., None])[..., 0]
        return torch.where(self.is_trigger(tokens), copied, expected)
