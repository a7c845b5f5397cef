"""The model of transformers inside what others put round it: ``torch.compile``, data parallelism, the adapters of PEFT."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["out_of_peft", "unwrapped"]


def unwrapped(model: Any) -> Any:
    """The model itself, out of what ``torch.compile``, DataParallel, DistributedDataParallel and PEFT put round it."""
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner
    return model if (adapted := out_of_peft(model)) is model else unwrapped(adapted)


def out_of_peft(model: Any) -> Any:
    """The model into which PEFT has put adapters such as LoRA's, with them; another model as it is.

    A PEFT model with a learned prompt comes back as it is, too: the prompt is no part of the model inside.
    """
    if type(model).__module__.partition(".")[0] != "peft" or model.active_peft_config.is_prompt_learning:
        return model
    return model.get_base_model()
