"""Strided: the most recent tokens, and every n-th of the older ones; a wider view for the same memory."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.policies.base import Positions, SlotPolicy
from sinklab.registry import policies

__all__ = ["Strided"]


@policies.register("strided")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Strided(SlotPolicy):
    """A query sees the first ``num_sinks`` tokens, the last ``dense``, and of the last ``span`` those divisible by ``stride``.

    The union of the two patterns of the sparse transformer (Child et al. 2019, arXiv 1904.10509), with the strided one aligned
    to the text, so that a token is either passed over by all queries that are ``dense`` or more behind it, or kept until it is
    ``span`` behind: key ``k`` is visible to query ``q`` if ``0 <= q - k < dense``, or ``0 <= q - k < span`` and
    ``k % stride == 0``, or ``k < num_sinks``. Unlike the sizes of other policies, ``dense`` and ``span`` count the query.

    Tokens divisible by the stride have a ring of their own, and the others another. Held keys have gaps between them, which
    in-cache positions would close differently at every query, so positions are original.

    Attributes:
        num_sinks: first tokens that stay, 0 or more.
        dense: last tokens that are all seen, a positive multiple of ``stride``.
        span: last tokens of which every ``stride``-th is seen, a multiple of ``stride``, ``dense`` or more.
        stride: 2 or more.
    """

    num_sinks: int = 4
    dense: int = 512
    span: int = 4096
    stride: int = 8
    positions: Positions = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions != "original":
            raise ConfigurationError(
                f"policy 'strided' keeps original positions; got positions={self.positions!r}. Its gaps would close and open "
                "again with every query"
            )
        self._require("num_sinks", 0)
        self._require("stride", 2, "; policy 'sink_window' has no gaps")
        for name, size in (("dense", self.dense), ("span", self.span)):
            if size < 1 or size % self.stride:
                raise ConfigurationError(f"{name} {size} must be a positive multiple of stride {self.stride}")
        if self.span < self.dense:
            raise ConfigurationError(f"span {self.span} must be at least dense {self.dense}, which it widens")

    @classmethod
    def of_size(cls, held: int, num_sinks: int) -> dict[str, object]:
        """Half of the size for the last tokens, and the rest for every fourth of those before."""
        stride, room = 4, held + 1 - num_sinks
        dense = max(stride, room // 2 // stride * stride)
        span = max(dense, (room - dense + dense // stride) * stride)
        return {"num_sinks": num_sinks, "dense": dense, "span": span, "stride": stride}

    @property
    def pinned(self) -> tuple[int, ...]:
        return tuple(range(self.num_sinks))

    @property
    def _sparse(self) -> int:
        """Slots of tokens divisible by the stride."""
        return self.span // self.stride

    @property
    def _others(self) -> int:
        """Slots of the other tokens: exactly so many are among any ``dense`` tokens in a row."""
        return self.dense - self.dense // self.stride

    @property
    def num_slots(self) -> int:
        return self.num_sinks + self._sparse + self._others

    @property
    def reach(self) -> int:
        return self.span

    def slots(self, tokens: Tensor) -> Tensor:
        multiples = tokens // self.stride  # how many multiples of the stride there are before a token that is none
        sparse = multiples.remainder(self._sparse)
        other = (tokens - multiples - 1).remainder(self._others) + self._sparse
        ring = sparse.where(tokens % self.stride == 0, other) + self.num_sinks
        return tokens.where(tokens < self.num_sinks, ring)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = query_positions - key_positions
        recent = (distance < self.dense) | ((distance < self.span) & (key_positions % self.stride == 0))
        return (distance >= 0) & (recent | (key_positions < self.num_sinks))

    def describe(self) -> str:
        return f"{self.num_sinks}+{self.dense}, 1 in {self.stride} of {self.span}"
