"""Limits: how far positions may count in a bounded cache of a model, and how many tokens a chunk of a prompt may have."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.lengths import trained_length
from sinklab.policies.base import BoundedPolicy, Policy
from sinklab.results.progress import warn
from sinklab.streaming.recurrent import continues_in_chunks, has_states, keyless_layers
from sinklab.streaming.refusals import extent, require_positions
from sinklab.streaming.rotation import KeyRotations, read_rotations

__all__ = ["Limits", "fit_limits", "length_known", "length_note", "warn_of_length"]

_REBASE, _REBASE_HALF = 2_048, 32_768
"""Position at which positions are counted anew. Models compute angles in float32, off by up to 6e-8 times the position: below
2,048 that moves the logits of the small models of the tests by 1e-4 at most, and by 3e-2 at a million. Keys of 16 bits
and integers are rounded by more than the angles are up to 32,768, and once more whenever they are moved."""


_TRAINED = "and the model was trained on"


def length_note(model: PreTrainedModel, policy: Policy) -> str:
    """A sentence where a policy holds more than the model was trained to see at once; empty otherwise, and for no bound."""
    trained = trained_length(model)
    if trained is None or not policy.bounded:
        return ""
    held = policy.max_held(1 << 62)
    span = policy.reach if isinstance(policy, BoundedPolicy) else held
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


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a model and a policy leave room for.

    Attributes:
        rotations: of the keys of all layers.
        chunk: most tokens that are processed at once.
        rebase_at: position that no token reaches: before, they are counted anew.
    """

    rotations: KeyRotations
    chunk: int
    rebase_at: int


def fit_limits(model: PreTrainedModel, policy: BoundedPolicy, *, chunk: int, rebase_at: int | None, integers: bool) -> Limits:
    """Limits below which the model can tell positions apart.

    Args:
        chunk: most tokens at once that are wished; fewer come out where positions are few.
        rebase_at: as :class:`~sinklab.streaming.cache.PolicyCache` has it.
        integers: keys are rounded to them.

    Raises:
        ConfigurationError: positions that are too few for the policy and a chunk.
        UnsupportedModelError: see :func:`read_rotations`; or a layer that writes no keys.
    """
    rotations = read_rotations(model)
    require_positions(policy, rotations.limit, type(model).__name__)
    reach = policy.reach
    room = reach + chunk
    coarse = integers or model.dtype in (torch.float16, torch.bfloat16)
    usual = max(2 * room, _REBASE_HALF if coarse else _REBASE)
    limit = min(rebase_at or usual, rotations.limit or sys.maxsize)
    if limit < room:
        chunk = max(1, limit - reach) if rebase_at is None else chunk
        limit = max(limit, reach + chunk)
        if limit > (rotations.limit or sys.maxsize) or rebase_at is not None:
            raise ConfigurationError(
                f"positions up to {limit} are too few: the policy holds {extent(policy)} and a chunk has {chunk}; choose a "
                "smaller window or chunk"
            )
    layers = range(model.config.get_text_config().num_hidden_layers)
    keyless = keyless_layers(model)
    if missing := [index for index in layers if index not in rotations.layers and index not in keyless]:
        raise UnsupportedModelError(
            f"layers {missing} of {type(model).__name__} write no keys to the cache, which its config does not say; a policy "
            "must hold for every layer"
        )
    if has_states(model) and not continues_in_chunks(model):
        chunk = 1
    return Limits(rotations, chunk, limit)
