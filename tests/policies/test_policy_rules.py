"""What each policy shows and where it puts things, by hand; and what it says to settings that make no sense."""

import pytest
import torch

from sinklab.errors import ConfigurationError, UnknownNameError
from sinklab.policies.blocks import Blocks
from sinklab.policies.full import Full
from sinklab.policies.pinned import Pinned
from sinklab.policies.recompute import Recompute
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.registry import policies


def seen_by(policy, query):
    return policy.visible(torch.tensor(query), torch.arange(40)).nonzero().flatten().tolist()


def slots_of(policy, count):
    return policy.slots(torch.arange(count)).tolist()


def test_full():
    assert seen_by(Full(), 3) == [0, 1, 2, 3]
    assert (Full().max_held(7), Full.bounded, Full().positions) == (7, False, "original")


def test_window():
    policy = Window(window=3)
    assert seen_by(policy, 1) == [0, 1]
    assert seen_by(policy, 9) == [6, 7, 8, 9]
    assert slots_of(policy, 6) == [0, 1, 2, 3, 0, 1]


def test_sink_window():
    policy = SinkWindow(num_sinks=2, window=3)
    assert seen_by(policy, 9) == [0, 1, 6, 7, 8, 9]
    assert slots_of(policy, 8) == [0, 1, 2, 3, 4, 5, 2, 3]
    # As the published example has it: tokens 0, 1, 2, 3, 6, 7, 8 in the cache of 4+3 while 9 is decoded; nothing else is gone.
    assert seen_by(SinkWindow(num_sinks=4, window=3), 9) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert SinkWindow(num_sinks=4, window=3).evicted(torch.tensor([7, 8, 9])).tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_pinned():
    policy = Pinned(pinned=(1, 5), window=2)
    assert seen_by(policy, 0) == [0]
    assert seen_by(policy, 4) == [1, 2, 3, 4]
    assert seen_by(policy, 5) == [1, 2, 3, 4, 5]  # token 5 is pinned and takes nobody's place
    assert seen_by(policy, 6) == [1, 3, 4, 5, 6]
    assert seen_by(policy, 20) == [1, 5, 18, 19, 20]
    assert slots_of(policy, 10) == [2, 0, 3, 4, 2, 1, 3, 4, 2, 3]
    # Behind token 1 tokens 2 to 17 are gone without 5, behind token 5 tokens 6 to 17.
    assert policy.evicted(torch.tensor(20)).tolist() == [15, 12]
    for query in range(40):  # as its description has it
        others = [token for token in range(query) if token not in policy.pinned]
        last = others[-(policy.window + (query in policy.pinned)) :]
        assert seen_by(policy, query) == sorted({*last, query, *(token for token in policy.pinned if token < query)})
    first = Pinned(pinned=(0, 1), window=3)
    index = torch.arange(30)
    expected = SinkWindow(num_sinks=2, window=3).visible(index[:, None], index)
    assert torch.equal(first.visible(index[:, None], index), expected)
    assert torch.equal(first.slots(index), SinkWindow(num_sinks=2, window=3).slots(index))


def test_blocks():
    policy = Blocks(num_sinks=1, block=3, blocks=2)
    assert seen_by(policy, 6) == [0, 1, 2, 3, 4, 5, 6]  # 1 to 3 and 4 to 6
    assert seen_by(policy, 7) == [0, 4, 5, 6, 7]
    assert seen_by(policy, 9) == [0, 4, 5, 6, 7, 8, 9]
    assert seen_by(policy, 10) == [0, 7, 8, 9, 10]
    assert slots_of(policy, 10) == [0, 1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert (policy.num_slots, policy.reach, policy.holds_more, policy.is_one_ring) == (7, 7, True, True)
    assert policy.evicted(torch.arange(5, 12))[:, 0].tolist() == [0, 0, 3, 3, 3, 6, 6]
    index = torch.arange(40)
    single, plain = Blocks(num_sinks=2, block=1, blocks=5), SinkWindow(num_sinks=2, window=4)
    assert torch.equal(single.visible(index[:, None], index), plain.visible(index[:, None], index))
    assert torch.equal(single.slots(index), plain.slots(index))
    assert torch.equal(single.evicted(index), plain.evicted(index))
    assert not single.holds_more


def test_blocks_are_the_context_shift_of_llama_cpp():
    """Written as its server has it: before a token would fill the context, the older half of what is not kept goes."""
    keep, block = 3, 8
    policy, context, held = Blocks(num_sinks=keep, block=block, blocks=2), keep + 2 * block + 1, list[int]()
    for token in range(40):
        if len(held) + 1 >= context:
            discard = (len(held) - keep) // 2
            del held[keep : keep + discard]
        held.append(token)
        assert seen_by(policy, token) == held


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Full(), "full"),
        (Window(window=7), "0+7"),
        (SinkWindow(), "4+1020"),
        (SinkWindow(positions="original"), "4+1020, original positions"),
        (Pinned(pinned=(0, 7), window=9), "{0, 7}+9"),
        (Pinned(pinned=(0, 7), window=9, positions="original"), "{0, 7}+9, original positions"),
        (Pinned(pinned=tuple(range(30)), window=9), "{30 tokens}+9"),
        (Blocks(num_sinks=1, block=16, blocks=4), "1+4×16"),
        (Blocks(positions="original"), "4+2×512, original positions"),
        (Recompute(window=9), "recompute 9"),
    ],
)
def test_describe(policy, words):
    assert policy.describe() == words
    assert policies.make(policies.settings(policy)) == policy


@pytest.mark.parametrize(
    ("policy", "fields", "message"),
    [
        (Full, {"positions": "in_cache"}, r"policy 'full' evicts nothing, so positions are original; got 'in_cache'"),
        (Window, {"window": 0}, r"window 0 must be 1 or more: a query sees so many tokens before it"),
        (Window, {"positions": "absolute"}, r"positions 'absolute' is neither 'in_cache' nor 'original'"),
        (SinkWindow, {"num_sinks": -1}, r"num_sinks -1 must be 0 or more"),
        (Pinned, {"pinned": (3, 1)}, r"pinned \(3, 1\) must be a tuple of token indices, ascending, each once and 0 or more"),
        (Pinned, {"pinned": (-1,)}, r"pinned \(-1,\) must be a tuple"),
        (Blocks, {"block": 0}, r"block 0 must be 1 or more"),
        (Blocks, {"blocks": 0}, r"blocks 0 must be 1 or more"),
    ],
)
def test_settings_that_make_no_sense(policy, fields, message):
    with pytest.raises(ConfigurationError, match=message):
        policy(**fields)


def test_by_name():
    assert policies.make({"name": "pinned", "pinned": [0, 5], "window": 9}) == Pinned(pinned=(0, 5), window=9)
    with pytest.raises(UnknownNameError, match=r"no policy is called 'sink_windows'. Did you mean 'sink_window'\?"):
        policies.make({"name": "sink_windows"})
    with pytest.raises(ConfigurationError, match="policy 'window' has no setting 'sinks'; it has positions, window"):
        policies.make({"name": "window", "sinks": 4})
