"""Whether a configuration and the weights beside it belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.errors import InputError
from sinklab.models.checkpoint import TensorHeader

__all__ = ["require_fit", "require_numbers"]

NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of safetensors that are weights as they stand."""


def require_fit(name: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Refuse a model of which tensors were missing, or of another shape, so that they are random numbers now.

    Args:
        report: what ``from_pretrained(output_loading_info=True)`` gives.

    Raises:
        InputError: naming the first of them.
    """
    kind = type(model).__name__
    if wrong := sorted(report["mismatched_keys"], key=lambda entry: str(entry[0])):
        key, stored, built = wrong[0]
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        raise InputError(
            f"{name} cannot be loaded as {kind}: config.json makes {key} of shape {tuple(built)}, and on the disk it is "
            f"{tuple(stored)}{more}. Is config.json that of another model?"
        )
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"{name} lacks {len(missing)} of the tensors of {kind}, first {missing[0]}; they would be random numbers. "
            "Is config.json that of another model?"
        )


def require_numbers(name: str, model: PreTrainedModel, headers: Mapping[str, TensorHeader]) -> None:
    """Refuse weights whose dtype is not that of weights: transformers casts integers, truth values, and complex numbers too.

    Tensors that the model does not have, and those that are whole numbers in the model too (tables of positions, masks), may
    be of any dtype; and so may those of a quantised checkpoint, which transformers reads with their scales.

    Raises:
        InputError: naming tensor and dtype.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return
    odd = {key: header for key, header in headers.items() if header.dtype not in NUMBERS}
    if not odd:
        return
    weights = [key for key, tensor in _tensors(model) if tensor.is_floating_point() or tensor.is_complex()]
    others = {key for key, tensor in _tensors(model)} - set(weights)
    ends = {_end(key) for key in weights}
    for key, header in odd.items():
        if any(_same(key, other) for other in others):
            continue
        if any(_same(key, weight) for weight in weights if _end(weight) == _end(key)) or (
            key.endswith(".weight") and _end(key) in ends
        ):
            scales = "without a quantization_config that says how" if header.dtype.startswith("F8") else "which is no weight"
            raise InputError(
                f"{name} holds {key} in {header.dtype}, {scales}; a weight is one of {', '.join(sorted(NUMBERS))}. Get the "
                "file again, or save the model in one of them"
            )


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _end(key: str) -> str:
    return ".".join(key.split(".")[-2:])


def _same(one: str, other: str) -> bool:
    """Whether two names mean one tensor: a checkpoint of a model without its head lacks the prefix, or has one more."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")
