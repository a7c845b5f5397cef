"""Heads that are edited at once: a group, and its heads by module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sinklab.errors import ConfigurationError
from sinklab.sinks import Head

__all__ = ["HeadGroup", "heads_by_module", "joined"]

NAMED = 6
"""Heads that a name lists; of more it says how many there are."""


@dataclasses.dataclass(frozen=True)
class HeadGroup:
    """Heads that are edited at once, so that none of them can stand in for another.

    Args:
        members: one or more, each once.
        called: ``layer 3``, or the label that all of them have; empty for heads that somebody named.

    Raises:
        ConfigurationError: no member, or one twice.
    """

    members: tuple[Head, ...]
    called: str = ""

    def __post_init__(self) -> None:
        if not self.members:
            raise ConfigurationError("a group of heads is empty; it needs one or more")
        if len(set(self.members)) < len(self.members):
            raise ConfigurationError(f"the group {self} has a head twice; name each once")

    def __str__(self) -> str:
        named = joined(self.members)
        return f"{self.called}: {named}" if self.called else named


def joined(heads: Sequence[object]) -> str:
    """``0.0+3.1``; of many the first ones, and how many there are."""
    if len(heads) <= NAMED:
        return "+".join(map(str, heads))
    return f"{'+'.join(map(str, heads[:NAMED]))}+… ({len(heads)} heads)"


def heads_by_module(edited: Head | HeadGroup) -> dict[int | str, tuple[int, ...]]:
    """Numbers of the heads by qualified name of the module, or by its running number where the name is not known."""
    found: dict[int | str, tuple[int, ...]] = {}
    for head in edited.members if isinstance(edited, HeadGroup) else (edited,):
        key = head.module or head.layer
        found[key] = (*found.get(key, ()), head.head)
    return found
