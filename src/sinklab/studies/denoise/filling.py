"""Filling in: masked tokens of a text become tokens, some at every step, as masked diffusion language models write."""

from __future__ import annotations

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
        # In a row of its own each: a copy of all logits of a large vocabulary would be the largest tensor there is.
        guessed = [_best(row, self.mask_token) for row in logits]
        guess, sureness = (torch.stack(part) for part in zip(*guessed, strict=True))
        rank = {"confidence": -sureness, "random": self._draws, "left": torch.arange(self.ids.shape[1]).expand_as(self.ids)}
        first = rank[self.order].double().masked_fill(~self.masked, float("inf")).argsort(dim=1, stable=True).argsort(dim=1)
        self.step += 1
        wanted = (self._free * self.step / self.steps).round().long() - (self._free - self.masked.sum(1))
        filled = self.masked & (first < wanted[:, None])
        self.ids = torch.where(filled, self.tokens if self.fill == "text" else guess, self.ids)
        self.masked = self.masked & ~filled
        return filled


def _best(logits: Tensor, mask_token: int) -> tuple[Tensor, Tensor]:
    """The likeliest token of each position besides the mask token, and the logarithm of its probability, on the CPU."""
    scores = logits.float().index_fill(-1, torch.tensor([mask_token], device=logits.device), float("-inf"))
    best = scores.log_softmax(-1).max(-1)
    return best.indices.cpu(), best.values.cpu()
