"""What is asked of find_causes(): its options, checked, and heads and groups as a line writes them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from sinklab.errors import ConfigurationError
from sinklab.studies.arguments import Options, Seed, Threshold

Pair: TypeAlias = tuple[int, int]
"""Layer and head, from 0."""


@dataclasses.dataclass(frozen=True)
class ChosenHeads:
    """Which heads are to be examined by themselves, with those of the ``groups`` (``None`` for all), which of them together,
    and whether every layer is a group besides."""

    heads: tuple[Pair, ...] | None = None
    groups: tuple[tuple[Pair, ...], ...] = ()
    layers: bool = False

    @property
    def alone(self) -> tuple[Pair, ...] | None:
        """Heads that are examined by themselves, each once: a group says something beside its members alone."""
        if self.heads is None:
            return None
        return tuple(dict.fromkeys([*self.heads, *(pair for group in self.groups for pair in group)]))


def spelled(heads: str | Sequence[Pair | str] | None) -> str:
    """As a command line writes them."""
    if heads is None or isinstance(heads, str):
        return heads or "all"
    return ",".join(one if isinstance(one, str) else ".".join(map(str, one)) for one in heads)


def parse_heads(heads: str | Sequence[Pair | str] | None) -> ChosenHeads:
    """Heads and groups from ``0.1,3.0+3.1``, ``all`` or ``layers``; from Python also a list of such, and of pairs. Anything
    else, no head at all, and one that a group has twice are refused."""
    try:
        entries = [entry.strip() for entry in spelled(heads).split(",") if entry.strip()]
        named = [[member.split(".") for member in entry.split("+")] for entry in entries if entry not in ("all", "layers")]
        groups = [tuple((int(layer), int(head)) for layer, head in members) for members in named]
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"`heads` {heads!r} must be all, or heads written layer.head with commas between, such as 0.1,3.0; + joins "
            "those that are edited at once, 0.1+3.0, and layers is each layer's; from Python a list of pairs (layer, head) too"
        ) from None
    if not entries:
        raise ConfigurationError("`heads` names no head; leave it out for all of them")
    for group in groups:
        if len(set(group)) < len(group):
            written = "+".join(f"{layer}.{head}" for layer, head in group)
            raise ConfigurationError(f"`heads` {written}: a head stands in the group more than once; name it once")
    alone = tuple(group[0] for group in groups if len(group) == 1)
    together = tuple(group for group in groups if len(group) > 1)
    return ChosenHeads(alone if len(named) == len(entries) else None, together, "layers" in entries)


UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(budget: str | float) -> float:
    """Seconds from ``90``, ``90s``, ``10m`` or ``1.5h``; anything else, or no time at all, is refused."""
    text = str(budget).strip().lower()
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"`budget` {budget} must be a time above 0, such as 90s, 10m or 1.5h")
    return seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Options):
    """What is asked of find_causes(), as it documents it; what no model could be asked is refused."""

    heads: str | Sequence[tuple[int, int] | str] | None = "all"
    sink: int | str = "auto"
    budget: str | float | None = None
    level: float = 0.05
    minimal_effect: float | Literal["auto"] = "auto"
    threshold: Threshold = 0.3
    seed: Seed = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "sink", int(self.sink) if str(self.sink).isdecimal() else self.sink)
        if not (isinstance(self.sink, int) and self.sink >= 0) and self.sink not in ("auto", "null", "none"):
            raise ConfigurationError(f"`sink` {self.sink} must be auto, a position from 0, null or none")
        object.__setattr__(self, "budget", None if self.budget is None else parse_duration(self.budget))
        if not 0 < self.level < 1:
            raise ConfigurationError(f"`level` {self.level:g} must lie between 0 and 1: the share of labels that may be false")
        if self.minimal_effect != "auto" and not (isinstance(self.minimal_effect, (int, float)) and self.minimal_effect > 0):
            raise ConfigurationError(
                f"`minimal_effect` {self.minimal_effect} must be auto or above 0: no effect can be shown to be none"
            )
        if not 0 < self.threshold < 1:
            raise ConfigurationError(f"`threshold` {self.threshold:g} must lie between 0 and 1")
        if self.batch_size < 2:
            raise ConfigurationError(
                f"`batch_size` must be at least 2, got {self.batch_size}: a head is given its output of another text of the "
                "batch"
            )
        _ = self.chosen

    @functools.cached_property
    def chosen(self) -> ChosenHeads:
        """The heads that are asked for."""
        return parse_heads(self.heads)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**dataclasses.asdict(self), "heads": spelled(self.heads)}
