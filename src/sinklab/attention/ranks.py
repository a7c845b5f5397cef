"""Tensor-parallel models: each rank computes some heads of a module, and here a call gets the heads of all ranks.

A rank holds a run of consecutive heads, in the order of the ranks: rows of the maps to queries, keys and values, columns of
the output projection. What is quadratic in the length (column statistics) each rank computes for its own heads; what is linear
(queries, keys, values, head outputs, statistics) is gathered, so that every rank goes on with the same call of all heads, with
the numbers that heads have in the checkpoint, and every probe gives the same rows on every rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.visibility import And, Dense, Or, Visibility
from sinklab.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Ranks", "ranks_of"]

_CALL = {
    **dict.fromkeys(("queries", "keys", "values", "bias", "sink_scores", "gain", "log_sum_exp"), 1),
    **dict.fromkeys(("null_value", "output_bias"), 0),
    "head_outputs": 2,
}
"""Fields of a call that have a head axis, and which it is; of size 1 it stands for all heads."""

_STATISTICS = tuple(field.name for field in dataclasses.fields(Statistics) if field.name != "bucket_starts")
"""Fields of statistics with heads on axis 1."""

_Item = TypeVar("_Item")
_Gathered = TypeVar("_Gathered", AttentionCall, Statistics)


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that share the heads of a model.

    Attributes:
        group: their process group.
        rank: number of this one among them, 0-based.
        size: how many they are, 2 or more.
    """

    group: torch.distributed.ProcessGroup
    rank: int
    size: int

    def sharing(self, name: str, module: nn.Module, model: nn.Module, heads: int) -> Ranks | None:
        """These ranks if a module has computed its share of the heads, ``None`` if it has computed all of them.

        Args:
            name, module: the attention module.
            model: whose config says how many heads there are where the module's own does not.
            heads: that it has computed here.

        Raises:
            UnsupportedModelError: any other number.
        """
        config = getattr(module, "config", None) or getattr(model, "config", None)
        config = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
        total = getattr(config, "num_attention_heads", None)
        if total == heads:
            return None
        if total == heads * self.size:
            return self
        raise UnsupportedModelError(
            f"{name} computes {heads} heads in each of {self.size} processes and its configuration says {total}; which process "
            "has which is not known, so nothing is measured. Load the model in one process, with `device_map` if it is large"
        )

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, in their order, along one axis; on every rank, bit for bit the same."""
        tensor = tensor.detach().contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(parts, tensor, group=self.group)
        return torch.cat(parts, dim=dim)

    def gather_objects(self, item: _Item) -> list[_Item]:
        """What every rank gives, in their order."""
        items = [item] * self.size
        torch.distributed.all_gather_object(items, item, group=self.group)
        return items

    def all_heads(self, call: AttentionCall) -> AttentionCall:
        """The call with the heads of all ranks in place of those of this one."""
        visible = self._visible(call.visible, call.num_heads)
        return dataclasses.replace(self._gathered(call, call.num_heads, _CALL), visible=visible)

    def all_statistics(self, statistics: Statistics, num_heads: int) -> Statistics:
        """Statistics of this rank's ``num_heads`` heads, with those of the others."""
        return self._gathered(statistics, num_heads, dict.fromkeys(_STATISTICS, 1))

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor with the heads of all along one axis."""
        return tensor.chunk(self.size, dim=dim)[self.rank].contiguous()

    def _gathered(self, parts: _Gathered, num_heads: int, axes: dict[str, int]) -> _Gathered:
        found: dict[str, Any] = {}  # tensors, of fields that hold tensors
        for name, dim in axes.items():
            tensor = getattr(parts, name)
            # One head a rank and a size of 1: what stands for all heads is repeated, which is the same.
            if isinstance(tensor, Tensor) and (name in ("keys", "values") or tensor.shape[dim] == num_heads):
                found[name] = self.gather(tensor, dim)
        return dataclasses.replace(parts, **found)

    def _visible(self, rule: Visibility, num_heads: int) -> Visibility:
        if isinstance(rule, (And, Or)):
            return type(rule)(self._visible(rule.left, num_heads), self._visible(rule.right, num_heads))
        if isinstance(rule, Dense) and rule.mask.shape[1] == num_heads:
            return Dense(self.gather(rule.mask.to(torch.uint8), 1).bool())  # not every backend sends truth values
        return rule


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that share the heads of a model, or ``None`` where every process has all of them.

    A model is tensor-parallel if transformers made it so (``from_pretrained`` with a plan), or if it has parameters that are
    ``DTensor`` s over a mesh with an axis ``tp``, or over a mesh of one unnamed axis without FSDP.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    mesh = _mesh(model)
    if mesh is None or mesh.size() < 2:
        return None
    return Ranks(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def _mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh of one axis over which heads are spread."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if (getattr(model, "_tp_size", None) or 1) > 1:  # transformers says so; its older releases hold plain shards
        meshes.insert(0, cast("DeviceMesh", model._device_mesh))
    for mesh in meshes:
        names = mesh.mesh_dim_names or ()
        if "tp" in names:
            return mesh if mesh.ndim == 1 else mesh["tp"]
        if mesh.ndim == 1 and not names and not any(isinstance(module, FSDPModule) for module in model.modules()):
            return mesh
    return None
