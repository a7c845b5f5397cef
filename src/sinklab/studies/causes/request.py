"""What is asked of find_causes(): its settings, checked, and heads, groups and sinks as a line writes them."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from sinklab.errors import ConfigurationError

__all__ = ["ChosenHeads", "Pair", "Request", "parse_heads", "parse_sink"]

Pair: TypeAlias = tuple[int, int]
"""Layer and head, from 0."""

WORDS: tuple[Literal["auto", "null", "none"], ...] = ("auto", "null", "none")
"""What a sink may be, besides a position."""


@dataclasses.dataclass(frozen=True)
class ChosenHeads:
    """Which heads are to be examined, and which of them together too.

    Attributes:
        heads: by themselves, with those of the groups; ``None`` for all.
        groups: the heads of each.
        layers: whether every layer is a group besides.

    Raises:
        ConfigurationError: no head at all, a group without one, or one that a group has twice.
    """

    heads: tuple[Pair, ...] | None = None
    groups: tuple[tuple[Pair, ...], ...] = ()
    layers: bool = False

    def __post_init__(self) -> None:
        if self.heads is not None and not self.heads and not self.groups:
            raise ConfigurationError("`heads` names no head; leave it out for all of them")
        for group in self.groups:
            if not group:
                raise ConfigurationError(
                    "`heads` has an empty group; a group is one head or more, such as 0.0+0.1, from Python [(0, 0), (0, 1)]"
                )
            twice = [pair for pair in group if group.count(pair) > 1]
            if twice:
                raise ConfigurationError(
                    f"`heads` {_written(group)}: head {_written(twice[:1])} stands in the group more than once; name it once"
                )

    @property
    def alone(self) -> tuple[Pair, ...] | None:
        """Heads that are examined by themselves, each once: a group says something beside its members alone."""
        if self.heads is None or self.layers:
            return None
        return tuple(dict.fromkeys([*self.heads, *(pair for group in self.groups for pair in group)]))

    def words(self) -> str | list[str]:
        """As :func:`parse_heads` reads them."""
        named = ["all"] if self.heads is None else [_written([pair]) for pair in self.heads]
        if self.layers:
            named = ["layers"]
        named += [_written(group) for group in self.groups]
        return named[0] if named in (["all"], ["layers"]) else named


def _written(pairs: Sequence[Pair]) -> str:
    return "+".join(f"{layer}.{head}" for layer, head in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Settings of a run, as :func:`~sinklab.studies.causes.causes.find_causes` takes them."""

    heads: ChosenHeads = ChosenHeads()
    together: bool = False
    sink: int | Literal["auto", "null", "none"] = "auto"
    budget: Literal["fast", "full"] = "fast"
    level: float = 0.05
    minimal_effect: float | Literal["auto"] = "auto"
    threshold: float = 0.3
    seed: int = 0
    batch_size: int = 16
    experiments: bool = True

    def check(self) -> None:
        """Raise on what no model could be asked.

        Raises:
            ConfigurationError: says which setting.
        """
        if (
            isinstance(self.sink, bool)
            or (isinstance(self.sink, int) and self.sink < 0)
            or (isinstance(self.sink, str) and self.sink not in WORDS)
        ):
            raise ConfigurationError(f"`sink` {self.sink} must be auto, a position from 0, null or none")
        if self.budget not in ("fast", "full"):
            raise ConfigurationError(f"`budget` {self.budget!r} must be fast or full")
        if not 0 < self.level < 1:
            raise ConfigurationError(f"`level` {self.level:g} must lie between 0 and 1: the share of labels that may be false")
        if isinstance(self.minimal_effect, str):
            if self.minimal_effect != "auto":
                raise ConfigurationError(f"`minimal_effect` {self.minimal_effect!r} must be auto or a number above 0")
        elif self.minimal_effect <= 0:
            raise ConfigurationError(
                f"`minimal_effect` {self.minimal_effect:g} must be above 0: no effect can be shown to be none"
            )
        if not 0 < self.threshold < 1:
            raise ConfigurationError(f"`threshold` {self.threshold:g} must lie between 0 and 1")
        if self.batch_size < 2:
            raise ConfigurationError(
                f"`batch_size` must be at least 2, got {self.batch_size}: a head is given its output of another text of the "
                "batch"
            )

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**dataclasses.asdict(self), "heads": self.heads.words()}


_HEAD = re.compile(r"\s*\d{1,9}\.\d{1,9}\s*")
"""A head in text, ``layer.head``."""


def parse_heads(heads: str | Sequence[Pair | Sequence[Pair]] | None) -> ChosenHeads:
    """Heads and groups from ``0.1,3.0+3.1``, ``all`` or ``layers``; from Python also pairs, and lists of pairs for groups.

    Raises:
        ConfigurationError: anything else, and what :class:`ChosenHeads` refuses.
    """
    if heads is None:
        return ChosenHeads()
    return _heads_of_text(heads) if isinstance(heads, str) else _heads_of_pairs(heads)


def _heads_of_pairs(heads: Sequence[Pair | Sequence[Pair]]) -> ChosenHeads:
    alone: list[Pair] = []
    groups: list[tuple[Pair, ...]] = []
    for entry in _listed(heads, heads):
        members = _listed(entry, entry)
        if members and not any(isinstance(member, Iterable) for member in members):
            alone.append(_pair(members, entry))
        else:
            groups.append(tuple(_pair(_listed(member, entry), entry) for member in members))
    return ChosenHeads(tuple(alone), tuple(groups))


def _heads_of_text(heads: str) -> ChosenHeads:
    parts = [part.strip() for part in heads.split(",") if part.strip()]
    groups = [part.split("+") for part in parts if part not in ("all", "layers")]
    for members in groups:
        if len(members) > 1 and not all(member.strip() for member in members):
            raise ConfigurationError(
                f"`heads` {'+'.join(members)!r}: no head stands on one side of a +; a group is written 0.0+0.1"
            )
    if not parts or not all(_HEAD.fullmatch(member) for members in groups for member in members):
        raise ConfigurationError(
            f"`heads` {heads!r} must be all, or heads written layer.head with commas between, such as 0.1,3.0; + joins those "
            "that are edited at once, 0.1+3.0, and layers is each layer's"
        )
    pairs = [tuple(map(_pair_of_text, members)) for members in groups]
    every_head = "all" in parts or "layers" in parts
    return ChosenHeads(
        None if every_head else tuple(members[0] for members in pairs if len(members) == 1),
        tuple(members for members in pairs if len(members) > 1),
        "layers" in parts,
    )


def _pair_of_text(head: str) -> Pair:
    layer, _, number = head.partition(".")
    return int(layer), int(number)


def _listed(given: object, entry: object) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise _no_pair(entry)
    return list(given)


def _pair(numbers: Sequence[Any], entry: object) -> Pair:
    """Layer and head as whole numbers, of numpy too."""
    try:
        layer, head = (operator.index(number) for number in numbers)
    except (TypeError, ValueError):
        raise _no_pair(entry) from None
    return layer, head


def _no_pair(entry: object) -> ConfigurationError:
    return ConfigurationError(
        f"`heads` {entry!r} must be a pair (layer, head), or a list of pairs for a group; `heads` is a list of these, "
        "[(0, 1)], with whole numbers"
    )


def parse_sink(sink: int | str) -> int | Literal["auto", "null", "none"]:
    """``auto``, ``null``, ``none`` or a position, which may be written as text.

    Raises:
        ConfigurationError: anything else.
    """
    if not isinstance(sink, str):
        try:
            return sink if isinstance(sink, bool) else operator.index(sink)  # a truth value is refused with the other settings
        except TypeError:
            raise ConfigurationError(f"`sink` {sink!r} must be auto, a position from 0, null or none") from None
    for word in WORDS:
        if sink == word:
            return word
    if not sink.isdecimal() or len(sink) > 18:
        raise ConfigurationError(f"`sink` {sink} must be auto, a position from 0, null or none")
    return int(sink)
