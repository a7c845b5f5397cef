"""Whether a configuration and the weights beside it belong together, found out before the model that it describes is made.

A config of a kilobyte can describe a model of any size. While transformers builds it, without memory, every parameter that
appears is counted, and building ends when there are far more than the weights on the disk could fill.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from sinklab.errors import InputError
from sinklab.models.checkpoint import TensorHeader

__all__ = ["bounded_building", "require_fit", "require_numbers"]

COPIES = 4
"""Times that a matrix may stand in a model before it is tied: embedding, those of encoder and decoder, and head."""

UNSAVED = 2**24
"""Numbers that a model may hold and not save, such as a table of sinusoids."""

SPLIT = 64
"""Parameters of a model for one tensor on the disk: experts that are saved together."""

FEW = 256
"""Parameters that may be built in any case."""

PACKED = 32
"""Weights in one number of a quantised checkpoint, at most: 32 bits of one."""

NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of safetensors that are weights as they stand."""

TOLD = (
    *("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depths", "hidden_size", "n_embd"),
    *("d_model", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "n_positions", "image_size", "num_experts", "num_local_experts"),
)
"""Fields of a config that say how large a model is, in the order in which a message names them."""


@contextlib.contextmanager
def bounded_building(name: str, config: PreTrainedConfig, headers: Mapping[str, TensorHeader]) -> Iterator[None]:
    """While the block lasts, this thread builds no more parameters and buffers than the weights on the disk could fill.

    The bounds are generous (tied matrices, experts saved together, packed weights), because a model that is a little too large
    is refused afterwards by the names and shapes of its tensors.

    Args:
        name: of the model, for the message.
        config: what is being built.
        headers: the tensors on the disk.

    Raises:
        InputError: in the block, as soon as there are too many.
    """
    stored = sum(math.prod(header.shape) for header in headers.values())
    packed = PACKED if getattr(config, "quantization_config", None) is not None else 1
    most_tensors, most_numbers = FEW + SPLIT * len(headers), UNSAVED + COPIES * packed * stored
    seen: dict[int, Tensor] = {}  # held, so that no second tensor gets the identity of one that was counted
    numbers, thread = 0, threading.get_ident()

    def count(module: nn.Module, key: str, tensor: Tensor | None) -> None:
        nonlocal numbers
        if tensor is None or not tensor.is_meta or id(tensor) in seen or threading.get_ident() != thread:
            return
        seen[id(tensor)] = tensor
        numbers += tensor.numel()
        if len(seen) > most_tensors or numbers > most_numbers:
            held = f"{len(headers):,} tensors of {stored:,} numbers together"
            raise InputError(
                f"{name}: config.json does not describe the weights beside it. It says {_sizes(config)}, which makes "
                f"{numbers:,} numbers in the first {len(seen):,} tensors, and there are {held}. Is it that of another model?"
            )

    parameters = torch_module.register_module_parameter_registration_hook(count)
    buffers = torch_module.register_module_buffer_registration_hook(count)
    try:
        yield
    finally:
        parameters.remove()
        buffers.remove()


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


def _sizes(config: PreTrainedConfig) -> str:
    """The fields that say how large a model is, in one phrase."""
    fields = config.to_dict()
    inner = [value for key, value in fields.items() if isinstance(value, dict) and key.endswith("_config")]
    found = [(field, part[field]) for part in (fields, *inner) for field in TOLD if part.get(field) is not None]
    return ", ".join(f"{field} {value}" for field, value in found[:8])[:240] or f"model_type {config.model_type}"
