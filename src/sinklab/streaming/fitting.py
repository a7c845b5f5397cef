"""Fitting: the policy that is meant for a model, where a window is not named or a text is to stay."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.policies.base import Policy, PolicySpec, SlotPolicy
from sinklab.policies.per_head import PerHead
from sinklab.registry import policies
from sinklab.streaming.ordered import has_ordered_bias
from sinklab.streaming.refusals import most_slots
from sinklab.streaming.rotation import read_rotations

__all__ = ["fitting_policy"]


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
    window = getattr(fitted, "window", 0)
    if window and "window" not in settings:
        most, held = min(_context(model), _same_frequencies(model, fitted)), fitted.max_held(1 << 62)
        if held > most:
            window -= held - most
            if window >= 1:
                changes: dict[str, Any] = {"window": window}
                fitted = dataclasses.replace(fitted, **changes)
            elif not pinned:
                raise ConfigurationError(
                    f"policy {fitted.describe()} leaves no room for a window in the {most:,} tokens that the model was trained "
                    "to see at once; choose fewer sinks, or name a window"
                )
    context, held = _context(model), fitted.max_held(1 << 62)
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
    if not isinstance(policy, SlotPolicy) or has_ordered_bias(model):
        return sys.maxsize
    try:
        limit = read_rotations(model).limit
    except UnsupportedModelError:
        return sys.maxsize  # the cache refuses such a model, and has looked at it from all sides when it says why
    return (limit or sys.maxsize) // 2


def _pinning(policy: Policy, count: int) -> Policy:
    """The policy with at least its first so many tokens pinned."""
    changes: dict[str, Any]
    if isinstance(policy, PerHead):
        changes = {"budgets": tuple(tuple((max(count, sinks), window) for sinks, window in layer) for layer in policy.budgets)}
    elif hasattr(policy, "num_sinks"):
        changes = {"num_sinks": max(count, policy.num_sinks)}
    elif "pinned" in {field.name for field in dataclasses.fields(policy)}:
        changes = {"pinned": tuple(sorted({*range(count), *getattr(policy, "pinned")}))}  # noqa: B009
    else:
        raise ConfigurationError(
            f"policy {policy.name!r} cannot keep a text: it pins no tokens. Use sink_window, or leave the text out"
        )
    return dataclasses.replace(policy, **changes)
