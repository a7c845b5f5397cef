"""Names of modules as the model itself has them, whatever ``torch.compile``, data parallelism or PEFT put round it or parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = [
    "adapted",
    "bare_parts",
    "core_module",
    "named_modules",
    "of_peft",
    "out_of_peft",
    "out_of_torch",
    "plain_module",
    "submodule",
]


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

    A module with adapters round a single map stands for that map; one with adapters round a module that has modules of its own
    (an attention of which a parameter is adapted) is taken out of them.

    Unlike :func:`out_of_torch` it goes by what is known to be put round parts of models. Those have modules of their own that
    hold nothing but a ``module``, whose names are to stay (LeViT's residual layers).
    """
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Qualified names and modules, as ``model.named_modules()`` of the model that nothing is put round gives them.

    Names of other wrappers than these, round the whole model, are left to :func:`out_of_torch`. A map with adapters has the
    name of the map, and its parts have none.
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
    """What a module of PEFT holds that runs in its place; ``None`` of an adapter and of what is none.

    It is the model in a PEFT model, in a mixed one and in a tuner (``LoraModel``), and of a module that is trained as a whole
    (``modules_to_save``) the copy that is active.
    """
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
