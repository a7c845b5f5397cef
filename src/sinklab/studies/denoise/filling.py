"""Filling in: masked tokens of a text become tokens, some at every step, as masked diffusion language models write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Fill", "Filling", "Order"]

Order: TypeAlias = Literal["confidence", "random", "left"]
"""Which masked tokens are filled in first: those that the model is surest of, random ones, or those further left."""

Fill: TypeAlias = Literal["text", "model"]
"""What is filled in: the text's own tokens, so that the loss at masked ones is defined; or what the model thinks likeliest."""


class Filling:
    """Texts on the way from masked to whole.

    Behind step ``s`` of ``steps`` there are ``s / steps`` of the tokens of a text, to the nearest whole number, that were
    masked at the start. The order by confidence is the "low-confidence remasking" of Nie et al. 2025 (arXiv 2502.09992),
    without a draw.

    Args:
        tokens: int64 ``(texts, length)``, the whole texts.
        free: boolean of the same shape: which tokens are masked at the start.
        mask_token: what stands in their place.
        steps: how many there are, at least 1.
        draws: float ``(texts, length)``, one for every token: the random order.

    Attributes:
        ids: the texts as they are now.
        masked: boolean, which tokens are masked now.
        step: how many steps have been taken.
    """

    def __init__(
        self, tokens: Tensor, free: Tensor, mask_token: int, *, steps: int, order: Order, fill: Fill, draws: Tensor
    ) -> None:
        self.tokens, self.mask_token, self.steps, self.order, self.fill = tokens, mask_token, steps, order, fill
        self.ids, self.masked, self.step = tokens.masked_fill(free, mask_token), free.clone(), 0
        self._free, self._draws = free.sum(1), draws

    def take_step(self, logits: Tensor) -> Tensor:
        """Fill in the tokens of one step.

        Args:
            logits: ``(texts, length, vocabulary)`` of the texts as they are.

        Returns:
            Boolean ``(texts, length)``: which tokens were filled in.
        """
        rank = {
            "confidence": lambda: -self._sureness(logits),
            "random": lambda: self._draws,
            "left": lambda: torch.arange(self.ids.shape[1]).expand_as(self.ids),
        }[self.order]()
        first = rank.double().masked_fill(~self.masked, float("inf")).argsort(dim=1, stable=True).argsort(dim=1)
        self.step += 1
        needed = (self._free * self.step / self.steps).round().long() - (self._free - self.masked.sum(1))
        filled = self.masked & (first < needed[:, None])
        self.ids = torch.where(filled, self.tokens if self.fill == "text" else self._guess(logits, filled), self.ids)
        self.masked = self.masked & ~filled
        return filled

    def _sureness(self, logits: Tensor) -> Tensor:
        """Logarithm of the probability of the likeliest token at the masked positions, on the CPU; 0 elsewhere."""
        sureness = torch.zeros(self.ids.shape)
        for number, scores in self._scores(logits, self.masked):
            sureness[number, self.masked[number]] = scores.log_softmax(-1).amax(-1).cpu()
        return sureness

    def _guess(self, logits: Tensor, where: Tensor) -> Tensor:
        """The likeliest token at some positions, on the CPU; 0 elsewhere."""
        guess = torch.zeros_like(self.ids)
        for number, scores in self._scores(logits, where):
            guess[number, where[number]] = scores.argmax(-1).cpu()
        return guess

    def _scores(self, logits: Tensor, where: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Number of each text, and float32 logits at some of its positions; the mask token is none that is filled in.

        One text at a time: a copy of all logits of a large vocabulary would be the largest tensor there is.
        """
        mask = torch.tensor([self.mask_token], device=logits.device)
        for number, row in enumerate(logits):
            yield number, row[where[number].to(row.device)].float().index_fill(-1, mask, float("-inf"))
