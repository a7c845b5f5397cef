"""Pinned: measured sink tokens at any position, and a window of the others."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.policies.base import PREDECESSORS, SlotPolicy
from sinklab.registry import policies
from sinklab.sinks import Sinks


@policies.register("pinned")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned(SlotPolicy):
    """A query sees the pinned tokens before it, the last ``window`` others before it, and itself. A pinned query takes no other
    token's place, so it sees ``window + 1`` others.

    A sink is a role, not position 0: in some models it is a delimiter or the second token (Sun et al. 2024, arXiv 2402.17762,
    find massive activations at first tokens, at the first full stop and at the first line break). An audit finds the
    positions, or a system prompt names them.

    With ``n(t)`` the tokens up to and including ``t`` that are not pinned, key ``k`` is visible to query ``q ≥ k`` if it is
    pinned or ``n(q) - n(k) <= window``. The window is counted in tokens that are not pinned, so a pinned token inside it
    takes no slot from the others.

    Attributes:
        pinned: token indices that stay, ascending, each 0 or more.
        window: tokens before the query that are held besides, pinned ones not counted; 1 or more.
        positions: ``in_cache`` or ``original``.
    """

    pinned: tuple[int, ...] = (0,)
    window: int = 1020

    def __post_init__(self) -> None:
        super().__post_init__()
        pinned = self.pinned
        fine = isinstance(pinned, tuple) and all(isinstance(token, int) and token >= 0 for token in pinned)
        if not fine or sorted(set(pinned)) != list(pinned):
            raise ConfigurationError(f"pinned {pinned!r} must be a tuple of token indices, ascending, each once and 0 or more")
        self._require("window", 1, PREDECESSORS)

    @classmethod
    def of(cls, sinks: Sinks, **settings: Any) -> Self:
        """The policy that pins the positions at which sinks were found.

        Raises:
            ConfigurationError: the main sink has no position: it is a token, which stands elsewhere in every text, or the null
                score, which is always seen; or it is a learned token in front, which stays anyway; or there is none.
        """
        if not isinstance(sinks, Sinks):
            raise ConfigurationError(f"sinks must be what find_sinks(model) found, got {type(sinks).__name__}")
        if sinks.main is None:
            raise ConfigurationError("sinks were found nowhere, so there is none to pin; the policy window holds no sinks")
        if sinks.main.kind != "position":
            why = "a window sees it always" if sinks.main.kind == "null" else "name those that it has in this text, pinned"
            raise ConfigurationError(
                f"the sink is {sinks.main.name}, which has no position of its own that could be pinned; {why}"
            )
        if not sinks.positions_in_text:
            raise ConfigurationError(
                f"the sink is {sinks.main.name}, which every policy keeps; no token of the text is to be pinned"
            )
        return cls(pinned=tuple(sinks.positions_in_text), **settings)

    @property
    def num_slots(self) -> int:
        return len(self.pinned) + self.window + 1

    def _is_pinned(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, torch.tensor(self.pinned, dtype=tokens.dtype, device=tokens.device))

    def slots(self, tokens: Tensor) -> Tensor:
        unpinned = self.unpinned(tokens)
        ring = (unpinned - 1).remainder(self.window + 1) + len(self.pinned)
        before = tokens - unpinned + 1  # how many pinned tokens there are up to this one
        return torch.where(self._is_pinned(tokens), before - 1, ring)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        recent = self.unpinned(query_positions) - self.unpinned(key_positions) <= self.window
        return (key_positions <= query_positions) & (recent | self._is_pinned(key_positions))

    def describe(self) -> str:
        shown = ", ".join(map(str, self.pinned)) if len(self.pinned) <= 4 else f"{len(self.pinned)} tokens"
        return f"{{{shown}}}+{self.window}{self._mode}"
