"""Names of modules as the model itself has them, whatever ``torch.compile``, data parallelism or PEFT put round it or parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["named_modules", "out_of_peft", "out_of_torch", "plain_module", "submodule"]


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
    if type(model).__module__.partition(".")[0] != "peft" or model.active_peft_config.is_prompt_learning:
        return model
    return model.get_base_model()


def plain_module(module: nn.Module) -> nn.Module:
    """The module that another stands for: out of ``torch.compile``, data parallelism and PEFT, a learned prompt left out.

    Unlike :func:`out_of_torch` it goes by what is known to be put round parts of models. Those have modules of their own that
    hold nothing but a ``module``, whose names are to stay (LeViT's residual layers).
    """
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Qualified names and modules, as ``model.named_modules()`` of the model that nothing is put round gives them.

    Names of other wrappers than these, round the whole model, are left to :func:`out_of_torch`.
    """
    seen, waiting = set[nn.Module](), [("", model)]
    while waiting:
        name, module = waiting.pop()
        module = plain_module(module)
        if module in seen:
            continue
        seen.add(module)
        yield name, module
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


def _inside(module: nn.Module) -> nn.Module | None:
    """What one wrapper holds; ``None`` of what is none."""
    of_peft: Any = module if type(module).__module__.partition(".")[0] == "peft" else None
    if hasattr(type(of_peft), "get_base_model"):  # neither a tuner nor a layer with an adapter
        base: nn.Module = of_peft.get_base_model()
        return base
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module
    return module._modules.get("_orig_mod")
