"""Where the weights of a model are: on one device, on several, on the disk, or a part of them in every process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sinklab.attention.names import submodule
from sinklab.errors import InputError

if TYPE_CHECKING:
    from accelerate.hooks import AlignDevicesHook

__all__ = ["has_all_heads", "held", "input_device", "placement_of", "weights_of"]


def input_device(model: nn.Module) -> torch.device:
    """The device to which inputs of a model go: that of its first parameter, or where this is computed with if it is offloaded.

    ``model.device`` of an offloaded model is ``meta``, and what is moved there is lost.

    Raises:
        InputError: a model whose weights are nowhere.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            return parameter.device
        for hook, _ in _offloading(model, name):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
        raise InputError(
            f"{type(model).__name__} has no weights: {name} is on the meta device, and nothing says where its numbers are; "
            "load it with from_pretrained"
        )
    return torch.device("cpu")


def has_all_heads(model: nn.Module) -> bool:
    """Whether this process has every head of a model; of a tensor-parallel one other processes have some."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if (getattr(model, "_tp_size", None) or 1) > 1:  # transformers says so; its older releases hold plain shards
        return False
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    unnamed = [mesh for mesh in meshes if not mesh.mesh_dim_names and mesh.ndim == 1 and mesh.size() > 1]
    named = any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)
    return not named and (not unnamed or any(isinstance(module, FSDPModule) for module in model.modules()))


def placement_of(model: nn.Module) -> dict[str, str] | str:
    """Where the weights are, for a record: modules to devices where accelerate spread them, one device otherwise."""
    spread = getattr(model, "hf_device_map", None)
    if spread and len(set(map(str, spread.values()))) > 1:
        return {module: str(place) for module, place in spread.items()}
    return str(input_device(model))


def held(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its qualified name, with its numbers, wherever accelerate keeps them; detached.

    An offloaded one is read from the disk, or copied from the CPU, to the device that it is computed with. Of one that is
    spread over ranks this is the part of this one. Of one that is kept as codes (torchao, quanto) it is what these stand for.

    Raises:
        InputError: a tensor on the meta device of which nothing says where its numbers are.
    """
    owner, _, key = name.rpartition(".")
    return _numbers(model, name, getattr(submodule(model, owner), key))


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``state_dict()`` by name, sorted, with its numbers, one at a time; see :func:`held`.

    What is there without being a parameter or a buffer belongs to it: scales of bitsandbytes, packed weights of torch.
    """
    for name, kept in sorted(model.state_dict().items()):
        owned = _tensor(model, name)
        for part in (kept if isinstance(kept, (tuple, list)) else (kept,)) if owned is None else (owned,):
            if isinstance(part, Tensor):
                yield name, _numbers(model, name, part)


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of that name, if there is one."""
    owner, _, key = name.rpartition(".")
    with contextlib.suppress(AttributeError):  # the owner may be no module: bitsandbytes writes "weight.absmax"
        found = getattr(submodule(model, owner), key)
        return found if isinstance(found, Tensor) else None
    return None


def _numbers(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    with torch.no_grad():
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
            tensor = tensor.dequantize()
    tensor = tensor.detach()
    if not tensor.is_meta:
        return tensor
    for hook, key in _offloading(model, name):
        with contextlib.suppress(KeyError):
            return hook.weights_map[key].to(device=hook.execution_device, dtype=tensor.dtype)
    raise InputError(
        f"{type(model).__name__} has no weights: {name} is on the meta device, and nothing says where its numbers are; load it "
        "with from_pretrained"
    )


def _offloading(model: nn.Module, name: str) -> Iterator[tuple[AlignDevicesHook, str]]:
    """Hooks of accelerate that may hold a parameter, with the name that it has there; the innermost first."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        hook, key = getattr(submodule(model, ".".join(parts[:end])), "_hf_hook", None), ".".join(parts[end:])
        for single in getattr(hook, "hooks", (hook,)):
            if single is not None and getattr(single, "offload", False) and single.weights_map is not None:
                yield single, key
