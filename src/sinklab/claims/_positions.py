"""Which positions a checkpoint has, for claims that are about one scheme."""

from __future__ import annotations

from sinklab.models.lengths import learned_positions
from sinklab_claims.contract.trained import Checkpoint

__all__ = ["not_learned", "not_rotary", "scheme_of"]


def scheme_of(checkpoint: Checkpoint) -> str:
    """``learned``, ``rotary``, or what else the model has, as far as it can be said: ``other`` where it cannot."""
    model = checkpoint.loaded.model
    named = getattr(model.config, "position", None)
    if isinstance(named, dict):  # SinkLM
        return str(named.get("name", "rotary"))
    if learned_positions(model) is not None:
        return "learned"
    return "rotary" if any("inv_freq" in name for name, _ in model.named_buffers()) else "other"


def not_rotary(checkpoint: Checkpoint) -> str:
    """Why a claim about rotary positions says nothing about it; empty where they are its own."""
    return _unless(checkpoint, "rotary")


def not_learned(checkpoint: Checkpoint) -> str:
    """Why a claim about learned positions says nothing about it; empty where they are its own."""
    return _unless(checkpoint, "learned")


def _unless(checkpoint: Checkpoint, wanted: str) -> str:
    scheme = scheme_of(checkpoint)
    has = "positions of another kind" if scheme == "other" else f"{scheme.replace('_', ' ')} positions"
    return "" if scheme == wanted else f"it has {has}, and what is measured is about {wanted} ones"
