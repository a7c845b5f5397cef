"""Modules and weights of a model by their names, whatever is put round them and wherever the numbers are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.pytorch_utils import Conv1D

from sinklab.errors import InputError


def out_of_torch(model: Any) -> Any:
    """The module in ``torch.compile``, DataParallel, DistributedDataParallel or what Fabric sets up; another as it is.

    These hold it as their ``module`` and have no parameter beside those of it, as a module that is more than a wrapper may.
    """
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        own = {id(parameter) for parameter in inner.parameters()}
        if not isinstance(model, nn.Module) or any(id(parameter) not in own for parameter in model.parameters()):
            break
        model = inner
    return model


def out_of_peft(model: Any) -> Any:
    """The model into which PEFT has put adapters such as LoRA's, with them; another model as it is.

    A PEFT model with a learned prompt comes back as it is, too: the prompt is no part of the model inside.
    """
    # Only a PeftModel can have a prompt: a mixed model and a tuner have no one active configuration.
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return model
    while (inner := _inside_peft(model)) is not None:
        model = inner
    return model


def of_peft(module: object) -> bool:
    """Whether a module is one of PEFT's own: what holds a model, or an adapter in it."""
    return type(module).__module__.partition(".")[0] == "peft"


def adapted(module: nn.Module) -> nn.Module | None:
    """The module that adapters of PEFT are put round, such as the linear map in a layer of LoRA; ``None`` of another."""
    core = module
    while of_peft(core) and (inner := core._modules.get("base_layer")) is not None:
        core = plain_module(inner)
    return None if core is module else core


def core_module(module: nn.Module) -> nn.Module:
    """:func:`plain_module`, out of adapters too: what says of which kind it is and of which sizes, but not what it gives."""
    module = plain_module(module)
    return adapted(module) or module


def plain_module(module: nn.Module) -> nn.Module:
    """The module that another stands for: out of ``torch.compile``, data parallelism and PEFT, a learned prompt left out.

    A module with adapters round a single map stands for that map. Unlike :func:`out_of_torch` it goes by what is known to be
    put round parts of models: those have modules that hold nothing but a ``module``, whose names are to stay (LeViT).
    """
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Qualified names and modules, as ``model.named_modules()`` of the model that nothing is put round gives them.

    A map with adapters has the name of the map, and its parts have none.
    """
    seen, waiting = set[nn.Module](), [("", model)]
    while waiting:
        name, module = waiting.pop()
        module = plain_module(module)
        if module in seen:
            continue
        seen.add(module)
        yield name, module
        if adapted(module) is not None:
            continue
        children = [(f"{name}.{child}" if name else child, part) for child, part in module._modules.items() if part is not None]
        waiting.extend(reversed(children))


def submodule(model: nn.Module, name: str) -> nn.Module:
    """The module of a name, as :func:`named_modules` or ``model.named_modules()`` gives it.

    Raises:
        AttributeError: there is none.
    """
    module = model
    for part in name.split(".") if name else ():
        if part not in module._modules:
            module = plain_module(module)
        inner = module._modules.get(part)
        if inner is None:
            raise AttributeError(f"{type(module).__name__} has no module {part!r} ({name})")
        module = inner
    return plain_module(module)


@contextlib.contextmanager
def bare_parts(model: nn.Module) -> Iterator[None]:
    """Take off what torch has put round parts of a model, for the length of a block, in which its state has its own names."""
    wrapped = [
        (owner, child, part)
        for owner in list(model.modules())
        for child, part in owner._modules.items()
        if part is not None and _inside_torch(part) is not None
    ]
    try:
        for owner, child, part in wrapped:
            inner: nn.Module | None = part
            while inner is not None:
                owner._modules[child], inner = inner, _inside_torch(inner)
        yield
    finally:
        for owner, child, part in wrapped:
            owner._modules[child] = part


def _inside(module: nn.Module) -> nn.Module | None:
    """What one wrapper holds; ``None`` of what is none."""
    if not of_peft(module):
        return _inside_torch(module)
    if (inner := _inside_peft(module)) is not None:
        return inner
    core = adapted(module)
    return core if core is not None and core._modules else _inside_torch(module)


def _inside_torch(module: nn.Module) -> nn.Module | None:
    """What ``torch.compile`` or data parallelism has put round it; ``None`` of another."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module
    return module._modules.get("_orig_mod")


def _inside_peft(module: Any) -> nn.Module | None:
    """What a module of PEFT holds that runs in its place; ``None`` of an adapter and of what is none."""
    if not of_peft(module):
        return None
    if hasattr(type(module), "get_base_model"):
        base: nn.Module = module.get_base_model()
        return base
    if hasattr(type(module), "inject_adapter"):
        return module._modules.get("model")
    copies = module._modules.get("modules_to_save")
    if copies is not None and not module.disable_adapters:
        active = next((adapter for adapter in module.active_adapters if adapter in copies), None)
        return module.original_module if active is None else copies[active]
    held = (module._modules.get(name) for name in ("base_model", "token_adapter", "original_module"))
    return next((inner for inner in held if inner is not None), None)


def linear_map(module: nn.Module | None) -> nn.Linear | Conv1D | None:
    """The linear map that a module is, or that adapters of PEFT are put round; ``None`` of another."""
    if module is None:
        return None
    core = core_module(module)
    return core if isinstance(core, (nn.Linear, Conv1D)) else None


def weight_of(model: nn.Module, name: str = "") -> Tensor | None:
    """Weight ``(out_features, in_features)`` with which a linear map of that name acts now, detached.

    ``None`` where it is no linear map, its numbers are packed integers, or adapters do other than add to them (DoRA, IA3, LoRA
    with a bias). Raises :class:`InputError` for a tensor of which nothing says where its numbers are.
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


if TYPE_CHECKING:
    from accelerate.hooks import AlignDevicesHook


def input_device(model: nn.Module) -> torch.device:
    """The device to which inputs of a model go: that of its first parameter, or where this is computed with if it is offloaded:
    ``model.device`` is ``meta`` then, and what is moved there is lost."""
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

    An offloaded one is read to the device that it is computed with. Of one that is spread over ranks this is the part of this
    one. Of one that is kept as codes (torchao, quanto) it is what these stand for.
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
