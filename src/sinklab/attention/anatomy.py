"""Anatomy of a model: its attention modules, the layers round them, and the maps from heads back to the residual stream."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

__all__ = ["Anatomy", "off_seam_modules", "on_seam_modules"]

PROJECTION_NAMES = ("o_proj", "out_proj", "c_proj", "wo", "o", "dense", "proj", "out_lin", "o_lin", "projection", "out")


CROSS = re.compile(r"EncDecAttention|cross_?attn|cross_?attention|encoder_attn", re.IGNORECASE)


class Anatomy:
    """Names and modules found once per session.

    Attributes:
        attention: qualified name to attention module on the seam, in the order of the model.
        names: ``id`` of an attention module to its qualified name.
        layers: qualified name to layer: the members of every ``ModuleList`` that holds an attention module.
        layer_of: name of an attention module to the name of its layer.
        models: the model and every ``PreTrainedModel`` inside it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.attention = on_seam_modules(model)
        self.names = {id(module): name for name, module in self.attention.items()}
        self.layer_of = {name: layer for name in self.attention if (layer := self._layer(name)) is not None}
        lists = dict.fromkeys(layer.rpartition(".")[0] for layer in self.layer_of.values())
        self.layers = {f"{owner}.{child}": module for owner in lists for child, module in self.modules[owner].named_children()}
        self.models = [module for module in model.modules() if isinstance(module, PreTrainedModel) or module is model]

    def is_cross(self, name: str) -> bool:
        """Whether a module is cross-attention by its own account or by its name."""
        return bool(getattr(self.attention[name], "is_cross_attention", False)) or bool(CROSS.search(name))

    def projection_name(self, name: str) -> str | None:
        """Qualified name of the map from the concatenated heads to the hidden state, or ``None``."""
        for child in PROJECTION_NAMES:
            for candidate in (f"{name}.{child}", f"{name}.{child}.0"):
                if isinstance(self.modules.get(candidate), (nn.Linear, Conv1D)):
                    return candidate
        # BERT and its kin keep it beside the attention module, in the output block.
        parent = name.rpartition(".")[0]
        sibling = f"{parent}.output.dense"
        return sibling if isinstance(self.modules.get(sibling), nn.Linear) else None

    def projection_weight(self, name: str, width: int) -> Tensor | None:
        """Weight ``(hidden_size, width)`` of that map, or ``None`` if there is none of this width."""
        found = self.projection_name(name)
        if found is None:
            return None
        module = self.modules[found]
        weight = module.weight.detach()
        weight = weight.T if isinstance(module, Conv1D) else weight
        return weight if weight.shape[1] == width else None

    def _layer(self, name: str) -> str | None:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if isinstance(self.modules.get(".".join(parts[: end - 1])), nn.ModuleList):
                return ".".join(parts[:end])
        return None


def on_seam_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Qualified name to module, for every module whose forward looks its attention function up in the table."""
    return {name: module for name, module in model.named_modules() if _uses_table(type(module))}


def off_seam_modules(model: nn.Module) -> list[str]:
    """Qualified names of attention modules that compute attention in their own code, out of reach of the table."""
    on_seam = set(on_seam_modules(model))
    found = []
    for name, module in model.named_modules():
        related = any(name == other or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in on_seam)
        if not related and "attention" in type(module).__name__.lower() and _has_own_attention(type(module)):
            found.append(name)
    # An outer module that only delegates to an inner one of the same kind is not a second attention.
    return [name for name in found if not any(other.startswith(f"{name}.") for other in found)]


def _uses_table(cls: type) -> bool:
    return bool(re.search(r"ALL_ATTENTION_FUNCTIONS", _source(cls.forward))) if hasattr(cls, "forward") else False


def _has_own_attention(cls: type) -> bool:
    return bool(re.search(r"[sS]oftmax|scaled_dot_product_attention|baddbmm|torch\.bmm|einsum", _source(cls)))


@functools.cache
def _source(obj: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(obj) if not isinstance(obj, type) else obj)
    except (OSError, TypeError):
        return ""
