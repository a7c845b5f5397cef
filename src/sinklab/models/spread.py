"""Spreading a model over devices, main memory and disk: the arguments of it, refused early where they cannot be."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from sinklab.errors import ConfigurationError

__all__ = ["MaxMemory", "Spread", "device_named", "read_spread"]

MaxMemory: TypeAlias = str | Mapping[str | int, str | int]

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers works out itself."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where the weights of a model that is being loaded go.

    Attributes:
        device: the device, or the kind of it, that most is computed on; decides what ``dtype`` auto is.
        options: for ``from_pretrained``; empty where the model is loaded as a whole and then moved to ``device``.
    """

    device: torch.device
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)


def read_spread(device: str, device_map: str | None, max_memory: MaxMemory | None, offload_folder: Path | str | None) -> Spread:
    """What the arguments of :func:`~sinklab.models.loading.load_model` ask for.

    Raises:
        ConfigurationError: arguments that exclude each other, or that cannot take effect on this machine.
    """
    if device != "auto" and device_map is not None:
        raise ConfigurationError("`device` and `device_map` each say where the model goes; give one of them")
    extra = {"max_memory": max_memory is not None, "offload_folder": offload_folder is not None}
    if device_map is None and (lone := [key for key, value in extra.items() if value]):
        raise ConfigurationError(f"`{lone[0]}` is about a model that is spread; give `device_map` too, such as auto")
    if device_map is None:
        return Spread(device_named(device))
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigurationError("`device_map` needs accelerate, which is not installed: pip install accelerate")
    if device_map not in STRATEGIES:
        raise ConfigurationError(
            f"there is no `device_map` {device_map!r}; it is {', '.join(STRATEGIES)}. One device is `device`; for a place of "
            "each module, load the model with transformers and give it to wrap_model"
        )
    options: dict[str, object] = {"device_map": device_map}
    if max_memory is not None:
        options["max_memory"] = _read_memory(max_memory)
    if offload_folder is not None:
        options["offload_folder"] = str(offload_folder)
    return Spread(device_named("auto"), options)


def device_named(name: str) -> torch.device:
    """The device; ``auto`` is CUDA if there is any, else the CPU.

    Raises:
        ConfigurationError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(int(name) if name.isdecimal() else name)
    except RuntimeError:
        raise ConfigurationError(f"there is no device {name!r}; `device` is auto, cpu, cuda, cuda:1, mps, …") from None
    accelerators = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    if device.type != "cpu" and not (device.type in accelerators and accelerators[device.type].is_available()):
        raise ConfigurationError(f"this machine's torch {torch.__version__} has no {device.type} device; use `device` cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigurationError(f"there is no device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _read_memory(max_memory: MaxMemory) -> dict[str | int, str | int]:
    if isinstance(max_memory, str):
        parts = [part.partition("=") for part in max_memory.split(",")]
        max_memory = {place.strip(): size.strip() for place, _, size in parts}
    found: dict[str | int, str | int] = {}
    for place, size in max_memory.items():
        key = int(place) if str(place).isdecimal() else place
        if not (isinstance(size, int) or re.fullmatch(r"(?i)\d+(\.\d+)?\s*([KMGT]I?B)", str(size))):
            raise ConfigurationError(
                f"`max_memory` of {place!r} is {size!r}; expected places and sizes such as 0=20GiB,cpu=64GiB"
            )
        if not isinstance(key, int) and key not in ("cpu", "disk", "mps"):
            raise ConfigurationError(f"`max_memory` names {place!r}; a place is the number of a GPU, cpu, or mps")
        found[key] = size if isinstance(size, int) else re.sub(r"\s", "", size)
    return found
