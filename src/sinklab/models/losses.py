"""The loss of language models: cross-entropy of each token."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["IGNORED", "cross_entropies"]

IGNORED = -100
"""As a target: no loss is taken there."""


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of each token under the logits at its index; for the next token, targets are shifted by the caller.

    Args:
        logits: ``(batch, length, vocab_size)``, of any dtype.
        targets: int64 ``(batch, length)`` on any device; :data:`IGNORED` where no loss is taken.

    Returns:
        ``(batch, length)``, float32 (float64 for float64 logits); 0 where no loss is taken.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    wanted = targets.to(logits.device)
    return torch.nn.functional.cross_entropy(logits, wanted.flatten(), reduction="none", ignore_index=IGNORED).view_as(wanted)
