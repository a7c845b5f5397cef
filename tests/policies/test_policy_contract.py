"""Every registered policy keeps the contract, at sizes that fit, that nearly do not, and that hypothesis comes up with."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.streaming.decoders import Gapped

from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.registry import policies
from sinklab.testing import check_policy

SETTINGS = {
    "full": [{}],
    "window": [{"window": 1}, {"window": 6}, {"window": 6, "positions": "original"}],
    "sink_window": [
        {"num_sinks": 4, "window": 7},
        {"num_sinks": 1, "window": 1},
        {"num_sinks": 0, "window": 5},
        {"num_sinks": 2, "window": 5, "positions": "original"},
    ],
    "pinned": [
        {"pinned": (0,), "window": 6},
        {"pinned": (1, 4, 13), "window": 5},
        {"pinned": (9,), "window": 1},
        {"pinned": (), "window": 4},
        {"pinned": (1, 4, 13), "window": 5, "positions": "original"},
    ],
    "blocks": [
        {"num_sinks": 2, "block": 4, "blocks": 2},
        {"num_sinks": 0, "block": 3, "blocks": 3},
        {"num_sinks": 1, "block": 5, "blocks": 1},
        {"num_sinks": 3, "block": 1, "blocks": 6},
        {"num_sinks": 2, "block": 4, "blocks": 2, "positions": "original"},
    ],
    "recompute": [{"window": 6}, {"window": 7, "every": 3}, {"window": 4, "every": 5}],
}
"""Small settings of the policies that have large defaults; a new policy is checked as it comes."""


@pytest.mark.parametrize(
    ("name", "fields"), [(name, fields) for name in policies for fields in SETTINGS.get(name, [{}])], ids=str
)
def test_policy(name, fields):
    check_policy(policies[name](**fields))


sizes = st.integers(1, 12)
slot_policies = st.one_of(
    st.builds(Window, window=sizes),
    st.builds(SinkWindow, num_sinks=st.integers(0, 6), window=sizes),
    st.builds(Pinned, pinned=st.sets(st.integers(0, 40), max_size=5).map(lambda found: tuple(sorted(found))), window=sizes),
    st.builds(Gapped, span=sizes.map(lambda half: 2 * half)),
)


@settings(max_examples=60, deadline=None)
@given(policy=slot_policies)
def test_slots_hold_what_is_visible(policy):
    """Written once more, without the contract's helpers: a plain dictionary of slots."""
    held: dict[int, int] = {}
    for query in range(80):
        held[int(policy.slots(torch.tensor(query)))] = query
        seen = set(policy.visible(torch.tensor(query), torch.arange(query + 1)).nonzero().flatten().tolist())
        assert seen == set(held.values())
        if policy.positions == "in_cache":
            for token, count in zip(policy.pinned, policy.evicted(torch.tensor(query)).tolist(), strict=True):
                assert token > query or count == sum(key not in seen for key in range(token, query + 1))
    assert len(held) == policy.num_slots == policy.max_held(80)
