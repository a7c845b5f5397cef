"""Layer kinds: which layers of a model do not attend to tokens, by the names that its config has for them."""

from __future__ import annotations

from collections import Counter

from transformers import PreTrainedConfig

__all__ = ["EMPTY_KINDS", "HYBRID", "RECURRENT_KINDS", "layers_without_attention"]

RECURRENT_KINDS = frozenset({"linear_attention", "conv"})
"""Names of layers that sum a text up in a state of fixed size: linear attention of all kinds, and short convolutions."""

EMPTY_KINDS = frozenset({"mlp", "moe"})
"""Names of layers of a feed-forward block alone."""

HYBRID = "hybrid"
"""Name of layers that attend and do linear attention, side by side."""


def layers_without_attention(config: PreTrainedConfig) -> dict[str, int]:
    """How many layers have no attention weights, by their kind in ``config.layer_types``; empty where the config names none."""
    kinds = Counter(getattr(config.get_text_config(decoder=True), "layer_types", None) or [])
    return {kind: count for kind, count in sorted(kinds.items()) if kind in RECURRENT_KINDS | EMPTY_KINDS}
