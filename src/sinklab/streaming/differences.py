"""Differences: proof that a model's scores see differences of positions alone, without which no key could keep its place.

Rotary scores do, as long as queries and keys meet as they were rotated. An operation that maps them first has such scores only
if its map goes with every rotation: a norm does, a function of each coordinate does not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.operation import ATTRIBUTE, HeadShape, Operation, state_of
from sinklab.streaming.rotation import FixedPositions, KeyRotations, Rotation

__all__ = ["require_differences"]

STEPS = 31
"""By so many positions queries and keys are moved, which turns all but the slowest pairs by a good part of a circle."""

SAMPLES = 8
"""Queries and keys that are looked at."""

MARGIN = 1e-3
"""Largest change of a score, over the lengths of what is multiplied. Rounding of float32 is below 1e-5 for heads of up to 1,024
coordinates; by a map that does not go with the rotation scores change by a good part of their size."""


def require_differences(model: PreTrainedModel, rotations: KeyRotations) -> None:
    """Refuse a model whose operation maps rotated queries and keys to scores of the positions themselves.

    Raises:
        FixedPositions: it does.
    """
    distinct = [rotation for rotation in dict.fromkeys(rotations.layers.values()) if rotation is not None]
    function = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)
    for module in Anatomy(model).attention.values() if distinct else ():
        operation = seam.operation_of(module, function)
        if type(operation).features is Operation.features:
            continue
        if not all(_sees_differences(module, operation, rotation) for rotation in distinct):
            raise FixedPositions(
                f"{type(model).__name__} has scores of positions themselves and not of their differences: operation "
                f"{operation.name!r} maps queries and keys after they are rotated. Keys that keep their places would give "
                "other scores with every token from which positions are counted"
            )


@torch.no_grad()
def _sees_differences(module: nn.Module, operation: Operation, rotation: Rotation) -> bool:
    """Whether scores stay what they are when queries and keys are moved by equally many positions."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    shape = getattr(getattr(module, ATTRIBUTE, None), "shape", None)
    heads, kv_heads = (shape.num_heads, shape.num_kv_heads) if isinstance(shape, HeadShape) else (1, 1)
    made = torch.randn(heads + kv_heads, SAMPLES, rotation.head_dim, generator=torch.Generator().manual_seed(0)).to(device)
    state = state_of(module, operation, made.new_zeros(1, SAMPLES, shape.hidden_size if isinstance(shape, HeadShape) else 1))

    def scores(states: Tensor) -> Tensor:
        queries, keys = operation.features(states[None, :heads], states[None, heads:], state)
        unit = [torch.nn.functional.normalize(mapped.flatten(0, 2), dim=-1) for mapped in (queries, keys)]
        return unit[0] @ unit[1].T

    moved = rotation.rotated(made, torch.full(made.shape[:2], STEPS, device=device))
    return bool((scores(moved) - scores(made)).abs().max() <= MARGIN)
