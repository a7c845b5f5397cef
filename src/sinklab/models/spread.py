"""Spreading a model over devices, main memory and disk: the arguments of it, refused early where they cannot be."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from sinklab.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

__all__ = ["DeviceMap", "MaxMemory", "Spread", "device_named", "read_spread", "skeleton_of"]

DeviceMap: TypeAlias = str | Mapping[str, str | int | torch.device]
MaxMemory: TypeAlias = str | Mapping[str | int, str | int]

T = TypeVar("T")

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

    def options_for(self, name: str, skeleton: PreTrainedModel) -> dict[str, object]:
        """The options, after refusing what this model cannot be loaded with; no weight has been read then.

        Args:
            name: of the model, for the message.
            skeleton: the model without weights, as :func:`skeleton_of` makes it.

        Raises:
            ConfigurationError: a device map with a name that the model has not, or without one that it has.
        """
        if isinstance(given := self.options.get("device_map"), Mapping) and given.keys() != {""}:
            _require_names(name, skeleton, given)
            apart = _apart(skeleton, given)
            return {**self.options, "device_map": apart}
        return dict(self.options)


def read_spread(
    device: str, device_map: DeviceMap | None, max_memory: MaxMemory | None, offload_folder: Path | str | None
) -> Spread:
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
    chosen = _read_map(device_map)
    options: dict[str, object] = {"device_map": chosen}
    if max_memory is not None:
        if not isinstance(chosen, str):
            raise ConfigurationError(
                "`max_memory` is for a `device_map` that is worked out, such as auto; this one says it all"
            )
        options["max_memory"] = _read_memory(max_memory)
    if offload_folder is not None:
        options["offload_folder"] = str(offload_folder)
    places = ["auto"] if isinstance(chosen, str) else [place for place in chosen.values() if place not in ("cpu", "disk")]
    return Spread(device_named(str(places[0] if places else "cpu")), options)


def skeleton_of(cls: type[PreTrainedModel | _BaseAutoModelClass], config: PreTrainedConfig) -> PreTrainedModel:
    """The model without weights: names and shapes alone."""
    with torch.device("meta"):
        build = getattr(cls, "from_config", None) or cls._from_config
        model: PreTrainedModel = build(copy.deepcopy(config))
    model.tie_weights()
    return model


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


def _read_map(device_map: DeviceMap) -> str | dict[str, str | int]:
    if isinstance(device_map, str):
        if device_map in STRATEGIES:
            return device_map
        if not device_map.lstrip().startswith("{") and not device_map.endswith(".json"):
            return {"": str(_placed(device_map))}
        try:
            text = device_map if device_map.lstrip().startswith("{") else Path(device_map).read_text(encoding="utf-8")
            device_map = dict(json.loads(text))
        except OSError as error:
            raise ConfigurationError(f"`device_map` {device_map} cannot be read ({type(error).__name__})") from None
        except ValueError as error:
            raise ConfigurationError(f'`device_map` is no JSON ({error}); expected {{"module": "device", …}}') from None
    return {str(module): _placed(place) for module, place in device_map.items()}


def _placed(place: object) -> str | int:
    """A place of a device map, checked: the number or name of a device, or ``disk``."""
    if place == "disk":
        return "disk"
    try:
        device_named(str(place))
    except ConfigurationError as error:
        known = f"auto, {', '.join(STRATEGIES[1:])}, cpu, disk, cuda:0, …, or one for each module"
        raise ConfigurationError(f"`device_map` says {str(place)!r}: {str(error).partition(';')[0]}; it is {known}") from None
    return int(str(place)) if str(place).isdecimal() else str(place)


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


def _require_names(name: str, skeleton: PreTrainedModel, device_map: Mapping[str, object]) -> None:
    weights = [key for key, _ in (*skeleton.named_parameters(), *skeleton.named_buffers())]
    known = {"", *weights, *(key for key, _ in skeleton.named_modules())}
    if unknown := [key for key in device_map if key not in known]:
        modules = [key for key, module in skeleton.named_children()]
        modules += [f"{key}.{inner}" for key in modules for inner, _ in skeleton.get_submodule(key).named_children()]
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ConfigurationError(
            f"`device_map` names {unknown[0]!r}{more}, and {name} ({type(skeleton).__name__}) has no such module; it has "
            f"{', '.join(modules[:6])}, …"
        )
    homeless = [key for key in weights if not any(key == at or at == "" or key.startswith(f"{at}.") for at in device_map)]
    if homeless:
        raise ConfigurationError(
            f"`device_map` says nothing of {homeless[0]} (and {len(homeless) - 1} more weights) of {name}; name its module"
        )


def _apart(module: nn.Module, device_map: Mapping[str, T], name: str = "", around: T | None = None) -> dict[str, T]:
    """The same map without a module inside another, which accelerate does not take: the others inside are named instead."""
    place = device_map.get(name, around)
    inside = f"{name}." if name else ""
    if not any(key.startswith(inside) and key != name for key in device_map):
        return {} if place is None else {name: place}
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    apart = {f"{inside}{key}": there for key, _ in own if (there := device_map.get(f"{inside}{key}", place)) is not None}
    for key, child in module.named_children():
        apart |= _apart(child, device_map, f"{inside}{key}", place)
    return apart
