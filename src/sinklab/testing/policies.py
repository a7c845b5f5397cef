"""The contract of cache policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from sinklab.attention.host_arguments import cache_argument
from sinklab.errors import ContractError, SinklabError, first_line
from sinklab.policies.base import Policy, SlotPolicy
from sinklab.policies.full import Full
from sinklab.registry import policies
from sinklab.streaming.base import Reader
from sinklab.streaming.reader import open_reader
from sinklab.streaming.traits import Rotation, read_rotations
from sinklab.testing._checks import Checks, is_frozen
from sinklab.testing.probes import tiny_models

_LONGEST = 16_384
"""Tokens among which a policy must once hold as many as it says; of small budgets 64 times as many as that."""

_EXACT = 1e-9
"""float64 throughout, and the angles of both sides are the same float32 numbers; sums of some tens of terms of size ten."""

_ROTATED = 2e-3
"""The model's angles are float32, up to ``position · 2**-24`` off, and a key that is moved exactly has the error of another
position: 6e-6 at position 100, times keys and queries of size ten. A key that is one step off moves these logits by more than
twenty times as much."""


def check_policy(policy: Policy) -> None:
    """Check that what a policy says is visible is what a cache of it holds, and what a model sees.

    The checks; those of a model run on the small Llama of :func:`tiny_models`, whose attention is far from even. They take time
    in proportion to the square of the tokens that are held: give settings with some ten of them.

    - *settings*: it is a registered frozen dataclass, and ``policies.settings`` and ``policies.make`` give it back, through
      JSON too;
    - *max_held*: never more than there are tokens, never less for a longer text, and finite if ``bounded``;

    for a policy with a rule, ``visible``:

    - *causality*, *itself*, *monotone*: no query sees a key ahead, every query sees itself, and what is gone stays gone;
    - *budget*: no query sees more than ``max_held`` says, and some query sees as many;

    for a :class:`SlotPolicy` moreover:

    - *slots*: those of a sequence written one after the other hold, at every token, just what is visible, or that at least if
      it ``holds_more``; pinned token ``j`` is in slot ``j``;
    - *in-cache positions*: ``evicted`` counts the tokens between pinned ones and the query that are not held, and between the
      others and the query there are none; for in-cache positions only;
    - *evicting is masking*: decoding equals a dense forward under the rule as a mask (original positions), or a cache that
      rotates every key to its rank among those held (in-cache positions);

    and for all:

    - *division*: a text read whole, in pieces and token by token gives the same logits; so does ``keep``;
    - *reset*: after it a reader is as new;
    - *memory*: as long as it is bounded, a longer text needs no more.

    Args:
        policy: an instance, with the settings to check.

    Raises:
        ContractError: a check failed.
    """
    checks = Checks(f"policy {getattr(policy, 'name', type(policy).__name__)!r}")
    try:
        again = policies.make(json.loads(json.dumps(policies.settings(policy))))
    except (SinklabError, AttributeError, TypeError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'settings': {error}") from error
    checks.require(is_frozen(policy) and again == policy, "settings", f"a frozen dataclass equal to {policy}", again)
    _check_max_held(checks, policy)
    steady = 2 * min(policy.max_held(1 << 40), 16)
    if callable(getattr(policy, "visible", None)):
        steady = _check_rule(checks, policy)
    elif policy.bounded:
        steady = policy.max_held(1 << 40)
    length = steady + min(steady, 48) + 8
    model = tiny_models()["llama"]
    assert isinstance(model, PreTrainedModel)
    tokens = torch.randint(1, 50, (2, length), generator=torch.Generator().manual_seed(0))
    try:
        if isinstance(policy, SlotPolicy | Full):
            _check_masking(checks, policy, model, tokens)
        _check_reader(checks, policy, model, tokens)
    except ContractError:
        raise
    except (SinklabError, RuntimeError, IndexError, TypeError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'reader': {first_line(error)}") from error


def _check_max_held(checks: Checks, policy: Policy) -> None:
    lengths = [*range(1, 70), 1000, 1 << 20, 1 << 40]
    held = [policy.max_held(length) for length in lengths]
    for length, most in zip(lengths, held, strict=True):
        checks.require(1 <= most <= length, "max_held", f"1 to {length} for {length} tokens", most)
    checks.require(held == sorted(held), "max_held", "no less for a longer text", held[:69])
    finite = policy.max_held(1 << 41) == held[-1]
    checks.require(
        finite == policy.bounded, "max_held", f"an end if bounded, which is {policy.bounded}", policy.max_held(1 << 41)
    )


# --- the rule ----------------------------------------------------------------------------------------------------------------


def _check_rule(checks: Checks, policy: Any) -> int:
    """Walk along a text; the number of tokens after which the policy holds as many as it ever will."""
    slots = policy.num_slots if isinstance(policy, SlotPolicy) else 0
    most = policy.max_held(1 << 40) if policy.bounded else 64
    table = torch.full((slots,), -1)
    before: Tensor | None = None
    block = 256
    longest = min(_LONGEST, (64 * most // block + 1) * block)
    full_at, length, held = 0, longest, 0
    for start in range(0, longest, block):
        queries, keys = torch.arange(start, start + block), torch.arange(start + block + 1)
        visible = policy.visible(queries[:, None], keys[None])
        whole = visible.dtype == torch.bool and visible.shape == (len(queries), len(keys))
        checks.require(whole, "causality", f"booleans {(len(queries), len(keys))}", f"{visible.dtype} {tuple(visible.shape)}")
        where = policy.slots(queries) if slots else None
        for index, row in enumerate(visible):
            query = start + index
            if query >= length:
                return full_at
            ahead = row[query + 1 :]
            checks.require(
                not bool(ahead.any()), "causality", f"no key ahead of query {query} visible", f"key {_first(ahead) + query + 1}"
            )
            checks.require(bool(row[query]), "itself", f"query {query} to see its own token", "it hidden")
            if before is not None:
                back = row[:query] & ~before[:query]
                checks.require(not bool(back.any()), "monotone", f"no key to come back at query {query}", f"key {_first(back)}")
            before = row
            held = int(row.sum())
            checks.require(
                held <= policy.max_held(query + 1),
                "budget",
                f"at most {policy.max_held(query + 1)} keys at query {query}",
                held,
            )
            if where is not None:
                _check_slots(checks, policy, table, query, int(where[index]), row)
            if held == most and not full_at:
                full_at = query + 1
                length = 2 * full_at + 64
    checks.require(
        full_at > 0, "budget", f"a query among {longest} that sees {most} keys, as max_held says", f"{held} at the last"
    )
    return full_at


def _first(flags: Tensor) -> int:
    """Index of the first true one, -1 if there is none."""
    return int(flags.long().argmax()) if bool(flags.any()) else -1


def _check_slots(checks: Checks, policy: SlotPolicy, table: Tensor, query: int, slot: int, row: Tensor) -> None:
    checks.require(0 <= slot < len(table), "slots", f"a slot from 0 to {len(table) - 1} for token {query}", slot)
    pinned = list(policy.pinned)
    own_slot = pinned.index(query) if query in pinned else None
    fits = slot == own_slot if own_slot is not None else slot >= len(pinned)
    checks.require(fits, "slots", f"slot {'behind the pinned' if own_slot is None else own_slot} for token {query}", slot)
    table[slot] = query
    held, visible = sorted(table[table >= 0].tolist()), row.nonzero().flatten().tolist()
    different = set(visible) - set(held) if policy.holds_more else set(held) ^ set(visible)
    checks.require(
        not different,
        "slots",
        f"what is visible at query {query} in the slots",
        f"token {min(different, default=0)} in one of the two only",
    )
    if policy.positions == "in_cache":
        evicted = policy.evicted(torch.tensor(query)).tolist()
        for index, token in enumerate(pinned):
            missing = query - token - sum(token < other <= query for other in visible)
            if token <= query:
                checks.require(
                    evicted[index] == missing,
                    "in-cache positions",
                    f"{missing} evicted between token {token} and query {query}",
                    evicted[index],
                )
        gaps = [
            token
            for token in visible
            if token not in pinned and query - token != sum(token < other <= query for other in visible)
        ]
        checks.require(
            not gaps,
            "in-cache positions",
            f"no token missing between an unpinned one and query {query}",
            f"some behind {gaps[:1]}",
        )


# --- in a model --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _read(policy: Policy, model: PreTrainedModel, tokens: Tensor, pieces: list[int], chunk: int = 128) -> Tensor:
    reader = open_reader(model, policy, chunk=chunk)
    return torch.cat([reader.read(piece) for piece in tokens.split(pieces, dim=1)], dim=1)


def _singly(tokens: Tensor) -> list[int]:
    return [1] * tokens.shape[1]


@torch.no_grad()
def _check_masking(checks: Checks, policy: SlotPolicy | Full, model: PreTrainedModel, tokens: Tensor) -> None:
    if policy.positions == "original":
        index = torch.arange(tokens.shape[1])
        visible = policy.visible(index[:, None], index[None])[None, None]
        expected, tolerance = model(input_ids=tokens, attention_mask=visible, use_cache=False).logits, _EXACT
    else:
        assert isinstance(policy, SlotPolicy)
        layers = [_SlowLayer(policy, rotation) for rotation in read_rotations(model).layers.values()]
        cache, logits = Cache(layers=list(layers)), []
        for token in tokens.split(1, dim=1):
            position = torch.tensor([[layers[0].get_seq_length()]])
            logits.append(model(input_ids=token, position_ids=position, **cache_argument(model, cache), use_cache=True).logits)
        expected, tolerance = torch.cat(logits, dim=1), _ROTATED
    decoded = _read(policy, model, tokens, _singly(tokens))
    checks.close(decoded, expected, tolerance, "evicting is masking", "logits of decoding")


class _SlowLayer(CacheLayerMixin):
    """Keeps keys unrotated and rotates each of those that are visible to its rank, at every token."""

    def __init__(self, policy: SlotPolicy, rotation: Rotation | None) -> None:
        super().__init__()
        self.policy, self.rotation = policy, rotation
        self.plain: list[Tensor] = []
        self.given: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def held(self, query: int) -> list[int]:
        return self.policy.visible(torch.tensor(query), torch.arange(query + 1)).nonzero().flatten().tolist()

    def rotated(self, keys: Tensor, steps: int) -> Tensor:
        return keys if self.rotation is None else keys @ self.rotation.matrices(torch.tensor(steps), keys.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        held = self.held(len(self.plain))
        self.plain.append(self.rotated(key_states, 1 - len(held)))
        self.given.append(value_states)
        keys = [self.rotated(self.plain[token], rank) for rank, token in enumerate(held)]
        return torch.cat(keys, dim=2), torch.cat([self.given[token] for token in held], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.held(len(self.plain))), 0

    def get_seq_length(self) -> int:
        return len(self.held(len(self.plain))) - 1

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


@torch.no_grad()
def _check_reader(checks: Checks, policy: Policy, model: PreTrainedModel, tokens: Tensor) -> None:
    length = tokens.shape[1]
    reader = open_reader(model, policy)
    whole = reader.read(tokens)
    held = max(reader.telemetry().held)
    # Original positions are exact; a key that is rotated to be moved is rotated by angles of another rounding.
    tolerance = _EXACT if policy.positions == "original" else _ROTATED
    pieces = [max(1, length // 3), 1, length - max(1, length // 3) - 1]
    checks.close(_read(policy, model, tokens, pieces, chunk=5), whole, tolerance, "division", "logits of a text read in pieces")
    checks.close(
        _read(policy, model, tokens, _singly(tokens)), whole, tolerance, "division", "logits of a text read token by token"
    )
    checks.require(held <= policy.max_held(length), "budget", f"at most {policy.max_held(length)} tokens held", held)
    reader = open_reader(model, policy)
    most = [max(_sizes(reader, tokens.flip(1))) for _ in range(2)]  # another text, of which nothing may remain
    if policy.bounded:
        checks.require(most[1] <= most[0], "memory", f"at most {most[0]} bytes, those of half the text", most[1])
    reader.reset()
    again = reader.read(tokens, keep=2)
    checks.close(again, whole[:, -2:], tolerance, "reset", "the last two logits of a text read after a reset")
    checks.require(reader.position == length, "reset", f"position {length}", reader.position)


def _sizes(reader: Reader, tokens: Tensor) -> Iterator[int]:
    """Bytes held behind every token."""
    for token in tokens.split(1, dim=1):
        reader.read(token)
        yield reader.bytes_held()
