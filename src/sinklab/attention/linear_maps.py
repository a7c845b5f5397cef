"""Linear maps of a model and their weights as they act, with what adapters of PEFT add to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sinklab.attention.names import adapted, core_module, plain_module, submodule
from sinklab.attention.placement import held

__all__ = ["linear_map", "weight_of"]


def linear_map(module: nn.Module | None) -> nn.Linear | Conv1D | None:
    """The linear map that a module is, or that adapters of PEFT are put round; ``None`` of another."""
    if module is None:
        return None
    core = core_module(module)
    return core if isinstance(core, (nn.Linear, Conv1D)) else None


def weight_of(model: nn.Module, name: str = "") -> Tensor | None:
    """Weight ``(out_features, in_features)`` with which a linear map acts now, detached.

    Args:
        model: the map, or what it is a part of.
        name: its qualified name in there.

    Returns:
        ``None`` where it is no linear map, its numbers are packed integers, or adapters do other than add to them (DoRA, IA3,
        LoRA with a bias).

    Raises:
        InputError: a tensor on the meta device of which nothing says where its numbers are.
    """
    module: Any = submodule(model, name)
    if linear_map(module) is None:
        return None
    changes, path = list[Tensor](), [name] if name else []
    while adapted(module) is not None:
        added = _added(module)
        if added is None:
            return None
        changes += added
        path.append("base_layer")
        module = plain_module(module._modules["base_layer"])
    weight = held(model, ".".join((*path, "weight")))
    if not weight.is_floating_point() or any(change.is_meta or change.shape != weight.shape for change in changes):
        return None
    for change in changes:
        weight = weight + change.to(weight.device)
    return weight.T if isinstance(module, Conv1D) else weight


@torch.no_grad()
def _added(layer: Any) -> list[Tensor] | None:
    """What adapters in a layer add to the weight inside it, as its forward does; ``None`` where they do other than add."""
    if layer.disable_adapters:
        return None if layer.merged else []  # its next call takes them out of the weight
    if layer.merged:
        return []
    if not hasattr(layer, "lora_A"):
        return None
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    others = [
        getattr(layer, kind, {}) for kind in ("lora_variant", "use_dora", "lora_bias")
    ]  # which of them, by version of PEFT
    if any(other.get(adapter) for other in others for adapter in active):
        return None
    return [layer.get_delta_weight(adapter) for adapter in active]
