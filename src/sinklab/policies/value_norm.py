"""Value norm: the tokens with the largest values, since a weight moves the output by its value; sinks stay only if pinned."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sinklab.policies.base import PREDECESSORS, ScoredPolicy
from sinklab.registry import policies

__all__ = ["ValueNorm"]


@policies.register("value_norm")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueNorm(ScoredPolicy):
    """Each key-value head keeps the ``large`` tokens of the largest score, the ``recent`` ones before the query, and itself.

    The score is the L1 norm of the value, ``sum_d |v_d|``; with ``attended`` it is multiplied by the attention that the token
    has been given since, which is the importance of VATP (Guo et al. 2024, arXiv 2406.12335). Either way the first
    ``num_sinks`` tokens stay, as VATP has it: the values of a sink are close to zero, so its norm would evict it first, and
    ``num_sinks=0`` shows what that costs. Without ``attended`` no query is needed to tell who stays, as with the norms of
    keys of Devoto et al. 2024 (arXiv 2406.11430). The values of one token in several places are the same in the first layer, up
    to rounding, which depends on how many tokens are computed at once: norms that differ by less than one in some 4,000 are
    equal there, and of equal ones the oldest token goes.

    Attributes:
        num_sinks: first tokens that stay, 0 or more.
        large: tokens that stay for their score, 1 or more.
        recent: tokens before the query that are held besides, 0 or more.
        attended: multiply by accumulated attention.
        positions: ``in_cache`` or ``original``; the heads hold different tokens, and each has positions of its own.
    """

    num_sinks: int = 4
    large: int = 508
    recent: int = 512
    attended: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("num_sinks", 0)
        self._require("large", 1, "; policy 'sink_window' holds recent tokens alone")
        self._require("recent", 0, PREDECESSORS)

    @property
    def needs_weights(self) -> bool:
        return self.attended

    @property
    def pinned(self) -> tuple[int, ...]:
        return tuple(range(self.num_sinks))

    @property
    def num_slots(self) -> int:
        return self.num_sinks + self.large + self.recent + 1

    @property
    def protected(self) -> int:
        return self.recent + 1

    def score(self, previous: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None) -> Tensor:
        norms = self._norms(values)
        return _rounded(norms) if weights is None else previous + weights * norms

    def growth(self, keys: Tensor, values: Tensor) -> Tensor | float:
        return self._norms(values) if self.attended else 0.0

    def describe(self) -> str:
        factor = " attended" if self.attended else ""
        return f"{self.num_sinks}+{self.large}{factor} large+{self.recent}{self._mode}"

    def _norms(self, values: Tensor) -> Tensor:
        return values.abs().sum(dim=-1, dtype=torch.float32)


def _rounded(norms: Tensor) -> Tensor:
    """Norms to 12 binary digits: rounding of their sums reaches the last few of 24, and seldom crosses a step of this grid."""
    mantissa, exponent = torch.frexp(norms)
    return torch.ldexp((mantissa * 4096).round() / 4096, exponent)
