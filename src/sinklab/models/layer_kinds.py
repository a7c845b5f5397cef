"""Layer kinds: which layers of a model do not attend to tokens, by the names that its config has for them."""

from __future__ import annotations

from collections import Counter

from transformers import PreTrainedConfig

__all__ = ["EMPTY_KINDS", "HYBRID", "RECURRENT_KINDS", "attending_layers", "layers_without_attention"]

RECURRENT_KINDS = frozenset({"linear_attention", "conv"})
"""Names of layers that sum a text up in a state of fixed size: linear attention of all kinds, and short convolutions."""

EMPTY_KINDS = frozenset({"mlp", "moe"})
"""Names of layers of a feed-forward block alone."""

WITHOUT_ATTENTION = RECURRENT_KINDS | EMPTY_KINDS

HYBRID = "hybrid"
"""Name of layers that attend and do linear attention, side by side."""


def layers_without_attention(config: PreTrainedConfig) -> dict[str, int]:
    """How many layers have no attention weights, by their kind in ``config.layer_types``; empty where the config names none."""
    return dict(sorted(Counter(kind for kind in _kinds(config) if kind in WITHOUT_ATTENTION).items()))


def attending_layers(config: PreTrainedConfig) -> tuple[list[int], int]:
    """Numbers of the layers that have attention weights, and how many layers the config names the kind of, 0 where of none."""
    kinds = _kinds(config)
    return [number for number, kind in enumerate(kinds) if kind not in WITHOUT_ATTENTION], len(kinds)


def _kinds(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config.get_text_config(decoder=True), "layer_types", None) or [])
