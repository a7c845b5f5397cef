"""Logits that are never held: what a cross-entropy needs of them, from the hidden states that enter the vocabulary projection.

With ``logits = W h + b``, targets ``t`` and ``p`` the unedited distribution, an edit that turns ``h`` into ``h'`` changes

    loss:                lse(h') - lse(h) - (h' - h) · W_t
    KL(clean ‖ edited):  lse(h') - lse(h) - (h' - h) · E_p[W]

(biases cancel), so of the logits of an edit only the log-sum-exp is needed, formed tile by tile in the processor's cache. Where
an edit changes nothing both are 0 to the bit. All of it is float32 or wider, also for a model in half precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["LogitMap", "TokenChanges"]

TILE = 2**19
"""Logits of a tile, 2 MiB of float32."""
COLUMNS = 2048
"""Tokens of a tile; a larger vocabulary is taken in several."""
FAR = 60.0
"""Distance of a log-sum-exp from the centre beyond which exponentials are no longer summed as they are; float32 ends at 88."""
SOME = 64
"""Positions whose mean log-sum-exp is the centre."""


@dataclasses.dataclass(frozen=True, eq=False)
class LogitMap:
    """The linear map from hidden states to logits: weight ``(vocab_size, hidden_size)``, bias ``(vocab_size,)`` or ``None``."""

    weight: Tensor
    bias: Tensor | None = None

    def tiles(self, hidden: Tensor, center: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, logits less the centre ``(rows, columns)``, and piece of the weight, tile by tile, of hidden ``(n, width)``."""
        rows = max(1, TILE // min(COLUMNS, len(self.weight)))
        for start in range(0, len(self.weight), COLUMNS):
            weight = self.weight[start : start + COLUMNS].to(hidden.dtype)
            bias = -center.expand(len(weight))  # part of the product, where it costs nothing
            if self.bias is not None:
                bias = bias + self.bias[start : start + COLUMNS].to(hidden.dtype)
            for first in range(0, len(hidden), rows):
                chosen = slice(first, first + rows)
                yield chosen, nn.functional.linear(hidden[chosen], weight, bias), weight

    def log_sum_exp(self, hidden: Tensor, center: Tensor) -> Tensor:
        """Log-sum-exp of the logits less the centre, ``(n,)`` for hidden states ``(n, width)``; fast where it is small."""
        total = hidden.new_zeros(len(hidden))
        for rows, logits, _ in self.tiles(hidden, center):
            total[rows] += logits.exp_().sum(-1)
        result = total.log()
        far = ~(result.abs() < FAR)  # NaN and infinity too
        if bool(far.any()):
            exact = hidden.new_full((int(far.sum()),), float("-inf"))
            for rows, logits, _ in self.tiles(hidden[far], center):
                exact[rows] = torch.logaddexp(exact[rows], torch.logsumexp(logits, dim=-1))
            result[far] = exact
        return result

    def mean_rows(self, hidden: Tensor, center: Tensor, log_sum_exp: Tensor) -> Tensor:
        """Mean row of the weight under the distribution of each hidden state, ``(n, width)``."""
        result = torch.zeros_like(hidden)
        for rows, logits, weight in self.tiles(hidden, center):
            result[rows] += nn.functional.linear(logits.sub_(log_sum_exp[rows, None]).exp_(), weight.T)
        return result


class TokenChanges:
    """Cross-entropies of given targets, and what edits change about them, from hidden states.

    Args:
        logits: the map.
        hidden: what entered it in the unedited model, ``(samples, seq_len, width)``.
        targets: int64 ``(samples, seq_len)``; anything where nothing is scored.
        scored: boolean ``(samples, seq_len)``; elsewhere results are 0.

    Attributes:
        clean_loss: ``(samples, seq_len)``, float32 or wider.
    """

    def __init__(self, logits: LogitMap, hidden: Tensor, targets: Tensor, scored: Tensor) -> None:
        self._logits = logits
        self._scored = scored.to(hidden.device)
        self._hidden = self._rows(hidden)[0]
        chosen = targets.to(hidden.device)[self._scored]
        some = self._hidden[:SOME]
        self._center = some.new_zeros(())
        if len(some):
            self._center = logits.log_sum_exp(some, self._center).mean()
        self._log_sum_exp = logits.log_sum_exp(self._hidden, self._center)
        self._target_rows = logits.weight[chosen].to(self._hidden.dtype)
        self._mean_rows = logits.mean_rows(self._hidden, self._center, self._log_sum_exp)
        own = torch.linalg.vecdot(self._hidden, self._target_rows) - self._center
        if logits.bias is not None:
            own = own + logits.bias[chosen].to(own.dtype)
        self.clean_loss = self._spread((self._log_sum_exp - own)[None])[0]

    def changes(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Change of the loss, and the divergence, both ``(edits, samples, seq_len)``.

        Args:
            hidden: ``(edits * samples, seq_len, width)``, one edit after the other.
        """
        edited = self._rows(hidden)
        change = torch.stack([self._logits.log_sum_exp(states, self._center) for states in edited]) - self._log_sum_exp
        moved = edited - self._hidden
        loss = change - torch.linalg.vecdot(moved, self._target_rows)
        divergence = change - torch.linalg.vecdot(moved, self._mean_rows)
        return self._spread(loss), self._spread(divergence)

    def _rows(self, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.reshape(-1, *self._scored.shape, hidden.shape[-1])[:, self._scored].to(dtype)

    def _spread(self, values: Tensor) -> Tensor:
        result = values.new_zeros(len(values), *self._scored.shape)
        result[:, self._scored] = values
        return result
