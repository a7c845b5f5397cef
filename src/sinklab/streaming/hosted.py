"""Hosted policy: a policy as one model follows it, with learned tokens in front, a prefix, and tokens held to go back to."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from sinklab.errors import ConfigurationError
from sinklab.policies.base import SlotPolicy

__all__ = ["HostedPolicy", "hosted"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostedPolicy(SlotPolicy):
    """What a cache does under ``rule`` in a model that has more tokens than the text, or sees some of them both ways.

    Tokens are counted with the learned ones in front of the text: those are the first, and stay. The first ``prefix`` tokens of
    the text see each other both ways, as in training. Beyond what the rule lets a query see, the last ``rollback`` tokens
    that have left its window are held, and seen by nobody: they are needed again when as many of the newest are taken back.

    Attributes:
        rule: the policy of the text, whose first token is its 0.
        room: the same with a window that is wider by ``rollback``: who has which slot.
        front: learned tokens in front of the text.
        prefix: tokens of the text that see each other both ways.
        rollback: how many tokens are held besides.
    """

    name: ClassVar[str] = "hosted"
    rule: SlotPolicy
    room: SlotPolicy
    front: int = 0
    prefix: int = 0
    rollback: int = 0

    @property
    def pinned(self) -> tuple[int, ...]:
        return (*range(self.front), *(token + self.front for token in self.rule.pinned))

    @property
    def num_slots(self) -> int:
        return self.front + self.room.num_slots

    @property
    def reach(self) -> int:
        return self.front + self.room.reach

    @property
    def holds_more(self) -> bool:
        return self.rollback > 0 or self.rule.holds_more

    def slots(self, tokens: Tensor) -> Tensor:
        behind = tokens - self.front
        return tokens.where(behind < 0, self.room.slots(behind.clamp(min=0)) + self.front)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        queries, keys = query_positions - self.front, key_positions - self.front
        of_text = self.rule.visible(queries, keys) & (keys >= 0)
        in_front = (keys < 0) & (keys <= queries)
        both_ways = (queries >= 0) & (keys >= 0) & (queries < self.prefix) & (keys < self.prefix)
        return of_text | in_front | both_ways

    def num_recent(self, query_positions: Tensor) -> Tensor:
        return self.rule.num_recent(query_positions - self.front)

    def describe(self) -> str:
        return self.rule.describe()


def hosted(policy: SlotPolicy, *, front: int = 0, prefix: int = 0, rollback: int = 0) -> SlotPolicy:
    """The policy as a model with these follows it; the policy itself where there are none.

    Raises:
        ConfigurationError: ``rollback`` for a policy without a window, or a prefix that the policy cannot hold as a whole.
    """
    if not (front or prefix or rollback):
        return policy
    room = policy
    if rollback:
        if "window" not in {field.name for field in dataclasses.fields(policy)}:
            raise ConfigurationError(
                f"`rollback` keeps tokens that have left the window, and policy {policy.name!r} has none; use sink_window, "
                "pinned or window"
            )
        changes: dict[str, Any] = {"window": getattr(policy, "window") + rollback}  # noqa: B009
        room = dataclasses.replace(policy, **changes)
    if prefix >= policy.num_slots:
        raise ConfigurationError(
            f"the first {prefix} tokens see each other both ways, and policy {policy.describe()} holds {policy.num_slots} with "
            f"the newest: they would not be there at once. Choose sizes that add up to {prefix} or more"
        )
    return HostedPolicy(rule=policy, room=room, front=front, prefix=prefix, rollback=rollback, positions=policy.positions)
