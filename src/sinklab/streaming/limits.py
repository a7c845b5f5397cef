"""Limits: which models a bounded cache serves and why not others, how much a policy may hold there, and which one fits."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.anatomy import EMPTY_KINDS, HYBRID, RECURRENT_KINDS, transformers_model, unwrapped
from sinklab.attention.host_arguments import takes_cache
from sinklab.attention.looks_ahead import looks_ahead
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.positions import trained_length
from sinklab.policies.base import Policy, PolicySpec, SlotPolicy
from sinklab.policies.window import Window
from sinklab.registry import policies
from sinklab.results.progress import warn
from sinklab.streaming.traits import (
    KeyRotations,
    continues_in_chunks,
    has_states,
    keyless_layers,
    read_rotations,
    require_differences,
    tokens_in_front,
    tokens_of_prefix,
)

_REBASE, _REBASE_HALF = 2_048, 32_768
"""Position at which positions are counted anew. Models compute angles in float32, off by up to 6e-8 times the position: below
2,048 that moves the logits of the small models of the tests by 1e-4 at most, and by 3e-2 at a million. Keys of 16 bits
and integers are rounded by more than the angles are up to 32,768, and once more whenever they are moved."""

_changed: Any = dataclasses.replace  # of policies that have a window, which not all do

_TRAINED = "and the model was trained on"


# --- models that are served -----------------------------------------------------------------------------------------------


def inside(model: object) -> PreTrainedModel:
    """The model of transformers itself, whose forwards a cache plans.

    Refused are one with a learned prompt of PEFT in front, and one whose first tokens see each other both ways.
    """
    if hasattr(model, "active_peft_config") and unwrapped(model) is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} puts a learned prompt in front of every text, which caches and streams do not follow: use "
            "a cache of transformers"
        )
    decoder = transformers_model(model)
    if prefix := tokens_of_prefix(decoder):
        raise UnsupportedModelError(
            f"the first {prefix} tokens of a text see each other both ways in {type(decoder).__name__}, which a text that is "
            "read piece by piece does not let them"
        )
    return decoder


def require_decoder(model: PreTrainedModel, policy: SlotPolicy) -> None:
    """Refuse what is not a causal decoder whose every layer can see all that the policy holds."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    strange = sorted(kinds - {"full_attention", "sliding_attention", HYBRID, *RECURRENT_KINDS, *EMPTY_KINDS})
    front, why = tokens_in_front(model), None
    if model.config.is_encoder_decoder:
        why = (
            "is an encoder-decoder, which writes no longer than its source asks for; a bounded cache is for decoders that go on"
        )
    elif not hasattr(config, "num_hidden_layers"):
        why = "has several decoders in one, of bytes and of patches; a bounded cache is for one that reads token by token"
    elif looks_ahead(model):
        why = (
            "sees later tokens, as encoders do: keys that are held would have to change with every token that comes, so that "
            "no cache gives what the model computes on a whole text"
        )
    elif not takes_cache(model):
        why = "takes no cache of keys and values, so it does not read a text token by token; a bounded cache is for decoders"
    elif kinds and kinds <= RECURRENT_KINDS | EMPTY_KINDS:
        why = "has no layer of attention: its states have one size for any text, so there is nothing to bound"
    elif strange:
        why = f"has layers of the kind {', '.join(strange)}; a policy needs full attention"
    elif (most := most_slots(model)) is not None and most < policy.num_slots:
        why = (
            f"has layers that see {most + front:,} tokens; the policy holds {policy.num_slots + front:,}, and its sinks would "
            f"be hidden from them. Choose sizes that add up to {most + front} or less, the token at hand included"
        )
    if why is not None:
        raise UnsupportedModelError(f"{type(model).__name__} {why}")


def narrowest(model: PreTrainedModel) -> int | None:
    """How many tokens every layer can see, the token at hand included; ``None`` where no layer has a sliding window."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    sliding = getattr(config, "sliding_window", None) or getattr(config, "window", None)
    any_slides = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    return sliding - tokens_in_front(model) if sliding and any_slides else None


def most_slots(model: PreTrainedModel) -> int | None:
    """Most tokens that a policy can hold in ``model``, the token at hand included; ``None`` where there is no end.

    Layers with a narrower window keep it, as long as others see the whole text.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    both = kinds == {"full_attention", "sliding_attention"} and not tokens_in_front(model)
    return None if both else narrowest(model)


def narrow_window(model: PreTrainedModel, policy: SlotPolicy) -> Window | None:
    """What layers with a sliding window hold where it is narrower than what the policy holds; ``None`` where none is."""
    seen = narrowest(model)
    return Window(window=seen - 1) if seen is not None and seen < policy.num_slots else None


def require_integers(policy: Policy) -> None:
    """Refuse a policy whose tokens leave their slots or write them in turn: groups of tokens are rounded when complete."""
    if not isinstance(policy, SlotPolicy):
        raise ConfigurationError(
            f"`quantized` is for policies whose tokens stay in their slots; {policy.name!r} is none, sink_window and pinned are"
        )
    if not policy.is_one_ring:
        raise ConfigurationError(
            f"`quantized` rounds tokens in groups of slots that are written one after the other, and {policy.name!r} writes "
            "several rings in turn: each token would be rounded again and again. sink_window and pinned have one"
        )


# --- how far positions count ------------------------------------------------------------------------------------------------


def fit_limits(
    model: PreTrainedModel, policy: SlotPolicy, *, chunk: int, rebase_at: int | None, integers: bool
) -> tuple[KeyRotations, int, int]:
    """Rotations of all layers, most tokens at once, and the position at which positions are counted anew.

    ``chunk`` and ``rebase_at`` are what is wished, as :class:`~sinklab.streaming.cache.PolicyCache` has them; positions
    too few for the policy and a chunk are refused, and so is a layer that writes no keys.
    """
    rotations, reach = read_rotations(model), policy.reach
    require_differences(model, rotations)
    extent = f"{policy.num_slots:,} tokens" + ("" if reach == policy.num_slots else f" over {reach:,} positions")
    if rotations.limit is not None and reach >= rotations.limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its frequencies up to position {rotations.limit}, and the policy holds {extent}; "
            "choose fewer"
        )
    room = reach + chunk
    coarse = integers or model.dtype in (torch.float16, torch.bfloat16)
    usual = max(2 * room, _REBASE_HALF if coarse else _REBASE)
    limit = min(rebase_at or usual, rotations.limit or sys.maxsize)
    if limit < room:
        chunk = max(1, limit - reach) if rebase_at is None else chunk
        limit = max(limit, reach + chunk)
        if limit > (rotations.limit or sys.maxsize) or rebase_at is not None:
            raise ConfigurationError(
                f"positions up to {limit} are too few: the policy holds {extent} and a chunk has {chunk}; choose a smaller "
                "window or chunk"
            )
    known = rotations.layers.keys() | keyless_layers(model)
    if missing := [index for index in range(model.config.get_text_config().num_hidden_layers) if index not in known]:
        raise UnsupportedModelError(
            f"layers {missing} of {type(model).__name__} write no keys to the cache, which its config does not say; a policy "
            "must hold for every layer"
        )
    return rotations, 1 if has_states(model) and not continues_in_chunks(model) else chunk, limit


def length_note(model: PreTrainedModel, policy: Policy) -> str:
    """A sentence where a policy holds more than the model was trained to see at once; empty otherwise, and for no bound."""
    trained = trained_length(model)
    if trained is None or not policy.bounded:
        return ""
    held = policy.max_held(1 << 62)
    span = policy.reach if isinstance(policy, SlotPolicy) else held
    if max(held, span) <= trained:
        return ""
    over = f" over {span:,} positions" if span > held else ""
    return f"the policy holds {held:,} tokens{over} {_TRAINED} {trained:,}"


def warn_of_length(model: PreTrainedModel, policy: Policy) -> None:
    """Warn with :func:`length_note`."""
    if note := length_note(model, policy):
        warn(f"{type(model).__name__}: {note}")


@contextlib.contextmanager
def length_known() -> Iterator[None]:
    """No warning of :func:`warn_of_length` within the block: what it says is said otherwise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{_TRAINED}")
        yield


# --- a policy in a model --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostedPolicy(SlotPolicy):
    """What a cache does under ``rule`` in a model that has more tokens than the text.

    Tokens are counted with the learned ones in front of the text: those are the first, and stay. Beyond what the rule lets a
    query see, the last ``rollback`` tokens that have left its window are held, and seen by nobody: they are needed again when
    as many of the newest are taken back.
    """

    name: ClassVar[str] = "hosted"
    rule: SlotPolicy  # of the text, whose first token is its 0
    room: SlotPolicy  # the same with a window that is wider by ``rollback``: who has which slot
    front: int = 0
    rollback: int = 0

    @property
    def pinned(self) -> tuple[int, ...]:
        return (*range(self.front), *(token + self.front for token in self.rule.pinned))

    @property
    def num_slots(self) -> int:
        return self.front + self.room.num_slots

    @property
    def reach(self) -> int:
        return self.front + self.room.reach

    @property
    def holds_more(self) -> bool:
        return self.rollback > 0 or self.rule.holds_more

    def slots(self, tokens: Tensor) -> Tensor:
        behind = tokens - self.front
        return tokens.where(behind < 0, self.room.slots(behind.clamp(min=0)) + self.front)

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        queries, keys = query_positions - self.front, key_positions - self.front
        of_text = self.rule.visible(queries, keys) & (keys >= 0)
        return of_text | ((keys < 0) & (keys <= queries))

    def num_recent(self, query_positions: Tensor) -> Tensor:
        return self.rule.num_recent(query_positions - self.front)

    def describe(self) -> str:
        return self.rule.describe()


def hosted(policy: SlotPolicy, *, front: int = 0, rollback: int = 0) -> SlotPolicy:
    """The policy as a model with these follows it, itself without any; rollback needs a window."""
    if not (front or rollback):
        return policy
    room = policy
    if rollback:
        if not hasattr(policy, "window"):
            raise ConfigurationError(
                f"`rollback` keeps tokens that have left the window, and policy {policy.name!r} has none; use sink_window, "
                "pinned or window"
            )
        room = _changed(policy, window=policy.window + rollback)
    return HostedPolicy(rule=policy, room=room, front=front, rollback=rollback, positions=policy.positions)


def fitting_policy(model: PreTrainedModel, policy: PolicySpec | None = None, *, pinned: int = 0) -> Policy:
    """The policy that is meant, with at least the first ``pinned`` tokens pinned.

    Where it is given by its settings and they name no window, the window is the policy's own, 1,020 tokens for sinks and
    window, or less: what is held then fits into what the model was trained to see at once.

    Raises:
        UnknownNameError, ConfigurationError: no such policy, a setting it refuses, or tokens to pin that do not fit.
    """
    settings = {"window": None} if isinstance(policy, Policy) else policies.read(policy or "sink_window")
    fitted: Policy = policy if isinstance(policy, Policy) else policies.make(settings)
    if pinned:
        fitted = _pinning(fitted, pinned)
    window, context = getattr(fitted, "window", 0), _context(model)
    if window and "window" not in settings:
        most, held = min(context, _same_frequencies(model, fitted)), fitted.max_held(1 << 62)
        if held > most:
            window -= held - most
            if window >= 1:
                fitted = _changed(fitted, window=window)
            elif not pinned:
                raise ConfigurationError(
                    f"policy {fitted.describe()} leaves no room for a window in the {most:,} tokens that the model was trained "
                    "to see at once; choose fewer sinks, or name a window"
                )
    held = fitted.max_held(1 << 62)
    if pinned and fitted.bounded and held > context:
        room = window - (held - context)
        advice = f"choose a window of {room} or less, or a shorter text" if room >= 1 else "choose a shorter text"
        raise ConfigurationError(
            f"the text to keep has {pinned:,} tokens and the policy holds {held:,} with it; the model was trained to see "
            f"{context:,} at once: {advice}"
        )
    return fitted


def _context(model: PreTrainedModel) -> int:
    """Tokens that every layer of the model was trained to see at once, as far as its config says."""
    sizes = (getattr(model.config.get_text_config(), "max_position_embeddings", None), most_slots(model))
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=sys.maxsize)


def _same_frequencies(model: PreTrainedModel, policy: Policy) -> int:
    """Half of the positions below which a model keeps its frequencies: with fewer to spare they are counted anew too often."""
    if not isinstance(policy, SlotPolicy):
        return sys.maxsize
    try:
        limit = read_rotations(model).limit
    except UnsupportedModelError:
        return sys.maxsize  # the cache refuses such a model, and has looked at it from all sides when it says why
    return (limit or sys.maxsize) // 2


def _pinning(policy: Policy, count: int) -> Policy:
    """The policy with at least its first so many tokens pinned."""
    fitted: Policy
    if hasattr(policy, "num_sinks"):
        fitted = _changed(policy, num_sinks=max(count, policy.num_sinks))
    elif "pinned" in {field.name for field in dataclasses.fields(policy)}:
        fitted = _changed(policy, pinned=tuple(sorted({*range(count), *getattr(policy, "pinned")})))  # noqa: B009
    else:
        raise ConfigurationError(
            f"policy {policy.name!r} cannot keep a text: it pins no tokens. Use sink_window, or leave the text out"
        )
    return fitted
