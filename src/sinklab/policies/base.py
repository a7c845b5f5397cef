"""Policy: which past tokens a query may still attend to, as a mask and as an eviction; the contract of one plug-in file.

    sink_window, 2 sinks, window 3          eviction: what is in the cache when query 6 has been written
    query 0   ■                             slot      0  1 │ 2  3  4  5
          1   ■ ■                           token     0  1 │ 6  3  4  5
          2   ■ ■ ■                                  sinks │ ring: the slot of token 2 was taken
          3   ■ ■ ■ ■
          4   ■ ■ ■ ■ ■
          5   ■ ■ ■ ■ ■ ■
          6   ■ ■ ⬚ ■ ■ ■ ■

Both views are one rule. A policy whose rule depends on positions alone is a :class:`SlotPolicy`: it says in which slot a token
is written, and a token is visible until its slot is taken.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.results.environment import require_whole

Positions = Literal["in_cache", "original"]
"""Position of a key: its rank among the tokens that are held, as StreamingLLM has it, or its index in the text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(abc.ABC):
    """Which keys a query may see; a frozen dataclass whose fields are its settings.

    Token indices count the tokens of a sequence from 0, padding left out. What is visible to a query is what the cache holds
    when the query's own token has been written, so a rule is causal, every query sees itself, and a key that one query does not
    see is seen by no later one.

    Attributes:
        name: set by the registry.
        positions: in-cache or original positions; a policy that supports one of them only refuses the other.
        bounded: whether :meth:`max_held` stays finite however long the sequence gets.
    """

    name: ClassVar[str]
    bounded: ClassVar[bool] = True
    positions: Positions = "in_cache"

    def __post_init__(self) -> None:
        if self.positions not in ("in_cache", "original"):
            raise ConfigurationError(f"positions {self.positions!r} is neither 'in_cache' nor 'original'")

    @abc.abstractmethod
    def max_held(self, seq_len: int) -> int:
        """The most tokens held, the one being processed included, in a sequence of ``seq_len`` tokens."""

    def computed(self, wanted: Sequence[range]) -> int:
        """Tokens of a row that the model computes to give the logits of some of them; with a cache, each at most once.

        Args:
            wanted: indices of the tokens whose logits are wanted, ascending and apart.
        """
        return wanted[-1].stop if wanted else 0

    @classmethod
    def of_size(cls, held: int, num_sinks: int) -> dict[str, object]:
        """Settings with which ``held`` tokens before the query stay; none, as here, where its ``window`` is made to fit.

        Args:
            num_sinks: first tokens that are to be among them, if the policy has any; one more where sizes need it to add up.
        """
        return {}

    def describe(self) -> str:
        """The policy in a few characters, for tables and plots; by default its name and settings."""
        settings = ", ".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{self.name}({settings})" if settings else self.name

    def _require(self, name: str, least: int, why: str = "") -> None:
        """Refuse a setting below ``least``, or that is no whole number."""
        require_whole(name, getattr(self, name), least, why)

    @property
    def _mode(self) -> str:
        """What :meth:`describe` says of the positions."""
        return "" if self.positions == "in_cache" else ", original positions"


PolicySpec: TypeAlias = Policy | str | Mapping[str, object]
"""A policy, or what ``policies.make`` makes one of: ``"name:setting=value"`` or ``{"name": …, setting: …}``."""

PREDECESSORS = ": a query sees so many tokens before it"
"""Why a window is 1 or more, for :meth:`Policy._require`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotPolicy(Policy):
    """A rule of positions alone: every token has its slot, and is visible until another token takes it.

    Slots come in two kinds. Pinned ones, first in the cache, are those of :attr:`pinned` tokens and never taken: token
    ``pinned[j]`` is in slot ``j``. The others are taken again and again. Under in-cache positions a pinned key is rotated so
    that it stays right before the tokens that are held; see :meth:`evicted`.
    """

    @property
    def pinned(self) -> tuple[int, ...]:
        """Token indices that are never evicted, ascending."""
        return ()

    @property
    @abc.abstractmethod
    def num_slots(self) -> int:
        """The most tokens that are held, pinned ones and the one being processed included."""

    @property
    def reach(self) -> int:
        """From the oldest token that is held without being pinned to the newest: positions that a model must tell apart."""
        return self.num_slots

    def max_held(self, seq_len: int) -> int:
        return min(seq_len, self.num_slots)

    @property
    def holds_more(self) -> bool:
        """Whether tokens stay in their slots when no query sees them any more, such as those of a block that has left."""
        return False

    @property
    def is_one_ring(self) -> bool:
        """Whether the tokens behind the pinned ones are written to one slot after the other, again and again."""
        first, pinned = max(self.pinned, default=-1) + 1, len(self.pinned)
        ring = self.num_slots - pinned
        slots = self.slots(torch.arange(first, first + 2 * ring)) - pinned
        return bool((slots.diff() % ring == 1 % ring).all())

    @abc.abstractmethod
    def slots(self, tokens: Tensor) -> Tensor:
        """Slot of each token index, int64 of the same shape."""

    @abc.abstractmethod
    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Whether each query sees each key; token indices that broadcast against each other, boolean of the common shape."""

    def evicted(self, query_positions: Tensor) -> Tensor:
        """Evicted tokens between each pinned token and the query, int64 ``(*query_positions.shape, len(pinned))``.

        It is the distance by which the in-cache position of the pinned token differs from the original one. This form suits
        policies that hold their pinned tokens and the most recent others (:meth:`num_recent`); a policy that does not supports
        original positions only.
        """
        pinned = torch.tensor(self.pinned, dtype=torch.long, device=query_positions.device)
        gone = self.unpinned(query_positions) - self.num_recent(query_positions)
        return (gone[..., None] - self.unpinned(pinned)).clamp(min=0)

    def num_recent(self, query_positions: Tensor) -> Tensor:
        """How many tokens that are not pinned each query sees as soon as there are so many, itself included; int64."""
        return torch.full_like(query_positions, self.num_slots - len(self.pinned))

    def unpinned(self, tokens: Tensor) -> Tensor:
        """How many tokens up to and including each are not pinned; int64 of the same shape."""
        pinned = torch.tensor(self.pinned, dtype=torch.long, device=tokens.device)
        return tokens + 1 - (pinned <= tokens[..., None]).sum(dim=-1)
