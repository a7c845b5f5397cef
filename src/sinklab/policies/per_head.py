"""Per head: every key-value head of every layer has its own sinks and window."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import ClassVar

from sinklab.errors import ConfigurationError
from sinklab.policies.base import BoundedPolicy
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies
from sinklab.results.head_map import Budgets, HeadMap

__all__ = ["PerHead"]

SHOWN = 3
"""Budgets that :meth:`PerHead.describe` names one by one."""


@policies.register("per_head")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PerHead(BoundedPolicy):
    """Under each key-value head a query sees that head's first ``num_sinks`` tokens, ``window`` tokens before it, and itself.

    DuoAttention (Xiao et al. 2024, arXiv 2410.10819) keeps everything for some heads, and sinks and a window for the others.
    Here every head has a budget of its own, and the memory is bounded. Keys and values beyond it are not stored. Query heads
    that share a key-value head share its budget. In-cache positions are those of each head: its sinks stay right before its
    own window.

    Attributes:
        heads: a head map, written by ``sinklab cache MODEL --per-head``; what it says takes the place of ``budgets`` and
            ``fingerprint``, and nothing reads the file again.
        budgets: ``(num_sinks, window)`` of every key-value head of every layer.
        fingerprint: of the model that the budgets are for; it is refused by others. ``None`` fits any of its shape.
        positions: ``in_cache`` or ``original``.
    """

    of_model: ClassVar[bool] = True
    example: ClassVar[dict[str, object]] = {"budgets": (((1, 3), (1, 7)),)}
    heads: str | None = None
    budgets: Budgets = ()
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is not None:
            if self.budgets:
                raise ConfigurationError(
                    "policy 'per_head': heads names a file of budgets, and budgets gives them too; leave one out"
                )
            read = HeadMap.read(Path(self.heads))
            for name, value in (("heads", None), ("budgets", read.budgets), ("fingerprint", read.fingerprint)):
                object.__setattr__(self, name, value)
        if not self.budgets or not all(self.budgets):
            raise ConfigurationError(
                "policy 'per_head' needs a budget for every head: heads, a head map that 'sinklab cache MODEL --per-head' "
                "writes, or budgets, (num_sinks, window) of every key-value head of every layer"
            )
        assert self.rules  # made here, so that a budget that makes no sense is refused

    @property
    def rules(self) -> tuple[tuple[SinkWindow, ...], ...]:
        """What each key-value head of each layer holds, as a policy of its own."""
        return tuple(
            tuple(SinkWindow(num_sinks=sinks, window=window, positions=self.positions) for sinks, window in layer)
            for layer in self.budgets
        )

    @property
    def distinct(self) -> tuple[SinkWindow, ...]:
        """The rules that some head has, from the one that holds least to the one that holds most."""
        each = dict.fromkeys(rule for layer in self.rules for rule in layer)
        return tuple(sorted(each, key=lambda rule: (rule.num_slots, rule.num_sinks)))

    @property
    def num_slots(self) -> int:
        """The most tokens that any head holds, the one being processed included."""
        return self.distinct[-1].num_slots

    def describe(self) -> str:
        counts = Counter(budget for layer in self.budgets for budget in layer)
        ordered = sorted(counts.items(), key=lambda entry: sum(entry[0]))
        if len(ordered) > SHOWN:
            (least, _), (most, _) = ordered[0], ordered[-1]
            return f"per_head {least[0]}+{least[1]} to {most[0]}+{most[1]}{self._mode}"
        return f"per_head {', '.join(f'{count} × {sinks}+{window}' for (sinks, window), count in ordered)}{self._mode}"
