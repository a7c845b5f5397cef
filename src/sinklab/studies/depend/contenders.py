"""Contenders: the policies that are compared at one budget, and what a user may write for one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from sinklab.errors import ConfigurationError
from sinklab.policies.base import Policy
from sinklab.registry import policies
from sinklab.studies.cache.plan import plain, require_one_name, sized_policy

KNOWN = "full, 4+1020 (sinks+window), or a name from 'sinklab list policies' with settings, sink_window:num_sinks=8"


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


def make_contenders(budget: int, sinks: Sequence[int] = (4,), more: Sequence[str | Policy] | None = None) -> Contenders:
    """The policies to compare.

    Args:
        budget: tokens before the query, sinks included.
        sinks: numbers of sinks; verdicts are about the largest.
        more: what to run beside the two that are judged and the floor; by default the full cache and other numbers of sinks.

    Raises:
        ConfigurationError: numbers that do not fit into the budget, a policy that cannot be read, or two policies that have one
            description.
        UnknownNameError: no such policy.
    """
    if budget < 3:
        raise ConfigurationError(f"`window` must be at least 3 tokens, a sink included, got {budget}")
    if not sinks or min(sinks) < 1 or max(sinks) >= budget - 1:
        raise ConfigurationError(
            f"`sinks` {','.join(map(str, sinks))} must each be 1 or more and leave two tokens of the window of "
            f"{budget}; the window alone, without sinks, is always compared"
        )
    window = policies["window"](window=budget)
    with_sinks = {number: policies["sink_window"](num_sinks=number, window=budget - number) for number in sorted(set(sinks))}
    floor = policies["window"](window=1)
    judged = with_sinks[max(sinks)]
    if more is None:
        others: list[Policy] = [policies["full"](), window, *with_sinks.values(), floor]
    else:
        named_policies = [parse_policy(policy, budget, sinks) if isinstance(policy, str) else policy for policy in more]
        others = [window, judged, *map(plain, named_policies), floor]
    named: dict[str, Policy] = {}
    for policy in others:
        require_one_name(policy, named.setdefault(policy.describe(), policy))
    return Contenders(named, window.describe(), judged.describe(), floor.describe(), budget, max(sinks))


def parse_policy(text: str, budget: int, sinks: Sequence[int] = ()) -> Policy:
    """The policy that a user writes as ``full``, ``4+1020`` or ``name:setting=value,…``.

    Settings that are given hold, and sizes that are not make it hold ``budget`` tokens before the query, as the two that are
    judged do: with sizes of its own, of a thousand tokens, it would evict nothing of most texts.

    Raises:
        ConfigurationError: it reads like none of these, has a setting that the policy refuses, or cannot hold so many.
        UnknownNameError: no such policy.
    """
    text = text.strip()
    pair = re.fullmatch(r"(\d+)\+(\d+)", text)
    if pair:
        first, window = int(pair[1]), int(pair[2])
        policy: Policy = policies["sink_window"](num_sinks=first, window=window) if first else policies["window"](window=window)
        return policy
    if not text[:1].isalpha():
        raise ConfigurationError(f"{text!r} cannot be read; write a policy: {KNOWN}")
    return sized_policy(text, budget, sinks)
