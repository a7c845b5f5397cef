"""Every registered policy keeps the contract, at sizes that fit, that nearly do not, and that hypothesis comes up with."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.architectures.zoo import VOCAB, enliven, grouped
from tests.streaming.decoders import Gapped
from torch import Tensor

from sinklab.policies.full import Full
from sinklab.policies.pinned import Pinned
from sinklab.policies.sink_window import SinkWindow
from sinklab.policies.window import Window
from sinklab.registry import policies
from sinklab.streaming.reader import open_reader
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
    "recompute": [{"window": 6}],
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


LENGTH = 44
POLICIES = (
    Window(window=6),
    Pinned(pinned=(0, 5, 20), window=6),
    Pinned(pinned=(3, 30), window=4, positions="original"),
    Gapped(),
)
TOLERANCE = 2e-4
"""float32 at positions below 50: angles are off by up to 3e-6, scores of size ten by up to 4e-5, logits by a few times that."""


@pytest.fixture(scope="module")
def model():
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped()))
    enliven(made, seed=13)
    return made.eval()


def text(rows: int = 1, seed: int = 3) -> Tensor:
    return torch.randint(4, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, tokens, cache, pieces) -> Tensor:
    parts = tokens.split(list(pieces), dim=1)
    return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], dim=1)


def test_a_padded_batch_in_full(model):
    """Also where positions enter the hidden states: rows are counted from their first token."""
    learned = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )
    enliven(learned, seed=1)
    tokens, mask = text(rows=2), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :9] = 0
    for some in (model, learned.eval()):
        reader = open_reader(some, Full())
        found = torch.cat([reader.read(tokens[:, :20], mask[:, :20]), reader.read(tokens[:, 20:])], dim=1)
        with torch.no_grad():
            for row, start in ((0, 0), (1, 9)):
                alone = some(input_ids=tokens[row : row + 1, start:], use_cache=False).logits[0]
                torch.testing.assert_close(found[row, start:], alone, atol=TOLERANCE, rtol=0)
        reader.reset()
        torch.testing.assert_close(reader.read(tokens, keep=1)[:1], found[:1, -1:], atol=TOLERANCE, rtol=0)
