"""The seam: the only file that knows how transformers dispatches attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention.operation import Operation

__all__ = ["implementation_name", "register_operation"]


def implementation_name(operation: str) -> str:
    """Name under which an operation is known to transformers, as in ``attn_implementation="sinklab_sigmoid"``."""
    return f"sinklab_{operation}"


def register_operation(operation: Operation) -> str:
    """Make an operation available to every transformers model, under one name for the function and its mask.

    The mask function is registered together with the attention function because transformers hands a function without one no
    mask at all, and causality is silently gone.

    Args:
        operation: instance whose parameters serve modules that do not carry their own in ``module.operation``.

    Returns:
        The name, ``sinklab_<operation>``.
    """
    default = operation

    def attention_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        chosen = getattr(module, "operation", default)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        outputs, weights = chosen.head_outputs(query, key, value, attention_mask, scale)
        return outputs.transpose(1, 2).contiguous(), weights

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Boolean and always present: operations are told what is visible, never an additive mask, and never guess causality.
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    name = implementation_name(operation.name)
    ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    return name
