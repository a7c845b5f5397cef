"""check_policy notices policies that do not keep the contract, one for each thing that it checks."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.conftest import make_sinklm

import sinklab
from sinklab.errors import ConfigurationError, ContractError
from sinklab.policies.base import Policy
from sinklab.policies.sink_window import SinkWindow
from sinklab.registry import policies
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.reader import CacheReader, open_reader, reader_of
from sinklab.testing import check_policy


@dataclass(frozen=True, kw_only=True)
class Broken(SinkWindow):
    """Two sinks and a window of four, with something wrong; in-cache positions."""

    num_sinks: int = 2
    window: int = 4


class LeavesGaps(Broken):
    """Every other token is passed over, which in-cache positions would have to close."""

    def visible(self, query_positions, key_positions):
        distance = query_positions - key_positions
        even = (key_positions % 2 == 0) & (distance < 8)
        return (distance >= 0) & ((distance < 2) | even | (key_positions < 2))

    @property
    def num_slots(self):
        return 2 + 4 + 1

    def slots(self, tokens):
        ring = torch.where(tokens % 2 == 0, 2 + tokens // 2 % 4, 6)
        return tokens.where(tokens < 2, ring)

    def evicted(self, query_positions):
        keys = torch.arange(200)
        seen = self.visible(query_positions[..., None], keys) | (keys > query_positions[..., None])
        behind = torch.stack([(~seen & (keys > token)).sum(-1) for token in self.pinned], dim=-1)
        return behind


class ChangesASetting(Broken):
    def __post_init__(self):
        object.__setattr__(self, "window", self.window // 2)


VISIBLE, SLOTS = SinkWindow.visible, SinkWindow.slots


def ring_of_one_less(self, tokens):
    """The last token of the window is gone before its time."""
    behind = tokens - self.num_sinks
    return tokens.where(behind < 0, behind.remainder(self.window) + self.num_sinks)


POLICIES = {
    "looks ahead": (
        {"visible": lambda self, queries, keys: VISIBLE(self, queries, keys) | (keys == queries + 1)},
        "check 'causality': expected no key ahead of query 0 visible, got key 1",
    ),
    "no booleans": (
        {"visible": lambda self, queries, keys: VISIBLE(self, queries, keys).long()},
        "check 'causality': expected booleans (256, 257), got torch.int64 (256, 257)",
    ),
    "does not see itself": (
        {"visible": lambda self, queries, keys: VISIBLE(self, queries, keys) & (keys != queries)},
        "check 'itself': expected query 0 to see its own token, got it hidden",
    ),
    "lets keys come back": (
        {"visible": lambda self, queries, keys: VISIBLE(self, queries, keys) | ((keys == 2) & (queries % 20 == 19))},
        "check 'monotone': expected no key to come back at query 19, got key 2",
    ),
    "sees more than it says": (
        {"max_held": lambda self, seq_len: min(seq_len, self.num_slots - 1)},
        "check 'budget': expected at most 6 keys at query 6, got 7",
    ),
    "never fills": (
        {"max_held": lambda self, seq_len: min(seq_len, self.num_slots + 1)},
        "check 'budget': expected a query among 768 that sees 8 keys, as max_held says, got 7 at the last",
    ),
    "holds less of more": (
        {"max_held": lambda self, seq_len: min(seq_len, 7 if seq_len < 50 else 6)},
        "check 'max_held': expected no less for a longer text",
    ),
    "holds what is not there": (
        {"max_held": lambda self, seq_len: self.num_slots}, "check 'max_held': expected 1 to 1 for 1 tokens, got 7",
    ),
    "has no end": ({"bounded": False}, "check 'max_held': expected an end if bounded, which is False, got 7"),
    "takes the wrong slot": (
        {"slots": ring_of_one_less},
        "check 'slots': expected what is visible at query 6 in the slots, got token 2 in one of the two only",
    ),
    "takes a slot that is not there": (
        {"slots": lambda self, tokens: SLOTS(self, tokens) + 1}, "check 'slots': expected slot 0 for token 0, got 1",
    ),
    "takes a pinned slot": (
        {"slots": lambda self, tokens: tokens.remainder(self.num_slots)},
        "check 'slots': expected slot behind the pinned for token 7, got 0",
    ),
    "counts one too many": (
        {"evicted": lambda self, queries: SinkWindow.evicted(self, queries) + (queries[..., None] > 6)},
        "check 'in-cache positions': expected 1 evicted between token 0 and query 7, got 2",
    ),
    "leaves gaps": (
        {name: vars(LeavesGaps)[name] for name in ("visible", "num_slots", "slots", "evicted")},
        "check 'in-cache positions': expected no token missing between an unpinned one and query 5, got some behind [2]",
    ),
}  # fmt: skip


def breaks(policy: type, message: str, monkeypatch) -> None:
    monkeypatch.setitem(policies._objects, "broken", policy)
    monkeypatch.setattr(policy, "name", "broken", raising=False)
    with pytest.raises(ContractError, match=re.escape("policy 'broken' breaks its contract, " + message)):
        check_policy(policy())


@pytest.mark.parametrize("wrong", POLICIES)
def test_a_policy_that_breaks_its_contract(wrong, monkeypatch):
    members, message = POLICIES[wrong]
    breaks(type("Wrong", (Broken,), members), message, monkeypatch)


class Divided(CacheReader):
    """Forgets everything at the end of a call with more than one token."""

    def read(self, tokens, attention_mask=None, *, keep=0):
        logits = super().read(tokens, attention_mask, keep=keep)
        if tokens.shape[1] > 1:
            self.cache.reset()
        return logits


class Growing(CacheReader):
    total = 0

    def bytes_held(self):
        Growing.total += 1
        return Growing.total


class Forgetful(CacheReader):
    def reset(self):
        self._columns = 0


class OfAWiderWindow(CacheReader):
    def __init__(self, model, policy, cache):
        super().__init__(model, policy, PolicyCache(SinkWindow(num_sinks=2, window=5), model))


class Failing(CacheReader):
    def __init__(self, *given):
        raise RuntimeError("no such reader")


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (OfAWiderWindow, "check 'evicting is masking': expected logits of decoding within 2.0e-03"),
        (Forgetful, "check 'reset': expected the last two logits of a text read after a reset within"),
        (Divided, "check 'division': expected logits of a text read in pieces within"),
        (Growing, "check 'memory': expected at most 22 bytes, those of half the text, got 44"),
        (Failing, "check 'reader': no such reader"),
    ],
)
def test_a_reader_that_breaks_the_contract_of_its_policy(reader, message, monkeypatch):
    policy = type("Read", (Broken,), {})

    @reader_of.register(policy)
    def _(policy, model, *, chunk):
        return reader(model, policy, PolicyCache(policy, model, chunk=chunk))

    breaks(policy, message, monkeypatch)


def test_settings(monkeypatch):
    monkeypatch.setattr(Broken, "name", "broken", raising=False)
    with pytest.raises(ContractError, match="check 'settings': no policy is called 'broken'"):
        check_policy(Broken())
    monkeypatch.setitem(policies._objects, "broken", ChangesASetting)
    with pytest.raises(
        ContractError, match=r"check 'settings': expected a frozen dataclass equal to .*window=9.* got .*window=4"
    ):
        check_policy(ChangesASetting(window=18))


def test_a_correct_policy_of_an_outsider(monkeypatch):
    monkeypatch.setitem(policies._objects, "broken", Broken)
    monkeypatch.setattr(Broken, "name", "broken", raising=False)
    check_policy(Broken())


def test_a_policy_of_a_third_kind_needs_a_reader():
    @dataclass(frozen=True, kw_only=True)
    class Nothing(Policy):
        name: ClassVar[str] = "nothing"

        def max_held(self, seq_len):
            return 1

    with pytest.raises(ConfigurationError, match="policy 'nothing' is no SlotPolicy, and no reader"):
        open_reader(make_sinklm(), Nothing())


PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


def test_the_example_runs():
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(program, names)
    tokens = sinklab.load_model("embedded:softmax").tokenizer("import os\n", return_tensors="pt")["input_ids"]
    made = names["model"].generate(tokens, past_key_values=names["cache"], max_new_tokens=3, do_sample=False)
    assert made.shape[1] == tokens.shape[1] + 3
    assert names["reader"].read(tokens).shape[:2] == tokens.shape
    assert names["reader"].telemetry().policy == "4+4×30"


def test_every_policy_has_a_row():
    table = PAGE.split("## What goes with what")[1].split("## ")[0]
    assert set(re.findall(r"`([a-z_]+)`", table)) >= set(policies)
