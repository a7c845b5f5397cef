"""Contenders: the policies that are compared at one budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sinklab.errors import ConfigurationError
from sinklab.policies.base import Policy
from sinklab.policies.full import Full
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window


@dataclasses.dataclass(frozen=True)
class Contenders:
    """Policies by the name under which they are reported.

    Attributes:
        policies: all of them, in the order in which they are shown.
        without, with_sinks: the two whose difference is judged; both hold the same number of tokens.
        floor: the one that keeps only the token before the query.
        budget: tokens before the query that the first two hold.
        num_sinks: how many of them are sinks.
    """

    policies: dict[str, Policy]
    without: str
    with_sinks: str
    floor: str
    budget: int
    num_sinks: int


def make_contenders(budget: int, sinks: Sequence[int] = (4,)) -> Contenders:
    """The full cache, a window without sinks and with each number of them, and the floor; verdicts are about the most sinks."""
    if budget < 3:
        raise ConfigurationError(f"`window` must be at least 3 tokens, a sink included, got {budget}")
    if not sinks or min(sinks) < 1 or max(sinks) >= budget - 1:
        raise ConfigurationError(
            f"`sinks` {','.join(map(str, sinks))} must each be 1 or more and leave two tokens of the window of "
            f"{budget}; the window alone, without sinks, is always compared"
        )
    window, floor = Window(window=budget), Window(window=1)
    with_sinks = [SinkWindow(num_sinks=number, window=budget - number) for number in sorted(set(sinks))]
    named: dict[str, Policy] = {policy.describe(): policy for policy in (Full(), window, *with_sinks, floor)}
    return Contenders(named, window.describe(), with_sinks[-1].describe(), floor.describe(), budget, max(sinks))
