"""State: a cache on disk, so that a stream goes on later, elsewhere, with the same tokens; safetensors, and no pickle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import ConfigurationError, InputError
from sinklab.models.loading import GivenModel, model_alone
from sinklab.policies.base import SlotPolicy
from sinklab.registry import policies
from sinklab.results.file import check_file, parse_object, write_file
from sinklab.results.version import __version__
from sinklab.streaming.base import Reader
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.limits import inside
from sinklab.streaming.reader import CacheReader
from sinklab.streaming.table import below
from sinklab.streaming.traits import fingerprint

Json: TypeAlias = dict[str, Any]

_FORMAT = 5
"""Of the file; higher where an older reader would misread it."""


def require_slots(held: PolicyCache | Reader) -> PolicyCache:
    """The cache that can be saved, of a policy that keeps one of slots."""
    cache = held if isinstance(held, PolicyCache) else getattr(held, "cache", None)
    if not isinstance(cache, PolicyCache) or not isinstance(cache.policy, SlotPolicy):
        raise ConfigurationError(
            f"policy {held.policy.name!r} keeps no cache of slots, so there is no state to save; use sink_window, for example"
        )
    return cache


def save_state(
    held: PolicyCache | Reader,
    path: str | Path,
    *,
    notes: Json | None = None,
    tensors: dict[str, Tensor] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a cache, or a reader's, so that going on from the file equals going on now, bit for bit on the same device.

    The file is whole or not there. It has the keys and values, which token is in which slot, the policy, and a fingerprint of
    the model, whose weights it does not have. ``notes``, which are JSON, and ``tensors`` are kept beside, for the caller.

    Raises:
        ConfigurationError: nothing has been read yet, or a reader that keeps no cache of slots.
        InputError: no such directory, or a file that is not replaced (:func:`~sinklab.results.file.check_file`).
    """
    path = Path(path)
    check_file(path, overwrite, "path")
    cache = require_slots(held)
    model = cache.model
    if model is None or cache.batch_size < 0:
        raise ConfigurationError("the cache has read nothing yet, so there is no state to save")
    table = cache.table
    buffers: dict[str, Tensor] = {f"books.{name}": tensor for name, tensor in table.state().items()}
    for index, layer in enumerate(cache.layers):
        buffers |= {f"layers.{index}.{name}": tensor for name, tensor in layer.state().items()}
    if table.ids is not None:
        buffers["ids"] = table.ids
    buffers |= {f"more.{name}": tensor for name, tensor in (tensors or {}).items()}
    record = {
        "format": _FORMAT,
        "sinklab": __version__,
        "model": {"class": type(model).__name__, "dtype": str(model.dtype), "fingerprint": fingerprint(model)},
        "policy": policies.settings(cache.policy),
        "chunk": cache.chunk,
        "rebase_at": cache.rebase_at,
        "quantized": cache.quantized,
        "rollback": cache.rollback,
        "books": table.counts(),
        "notes": notes or {},
    }
    text = json.dumps(record)
    data = to_bytes(
        {name: tensor.contiguous() for name, tensor in buffers.items()},
        {"sinklab_state": text, "sha256": _digest(text, buffers)},
    )
    if not path.parent.is_dir():
        raise InputError(f"there is no directory {path.parent} to save {path.name} in")
    write_file(path, lambda temporary: temporary.write_bytes(data), overwrite=overwrite, name="path")


def load_state(path: str | Path, model: GivenModel, **loading: Any) -> CacheReader:
    """A reader that goes on where the saved cache was; its ``.cache`` may go to ``generate()`` too.

    Raises:
        InputError: a file that is missing, damaged, of another format, or written with another model.
    """
    return read_state(path, inside(model_alone(model, **loading)))[0]


def read_state(path: str | Path, model: PreTrainedModel) -> tuple[CacheReader, Json, dict[str, Tensor]]:
    """As :func:`load_state`, with the notes and tensors that were saved beside the cache."""
    path = Path(path)
    record, tensors, digest = _read(path)
    if record.get("format") != _FORMAT:
        raise InputError(
            f"{path} has format {record.get('format')} of sinklab {record.get('sinklab', '?')}; sinklab "
            f"{__version__} reads format {_FORMAT}. Read the text again with this version"
        )
    if digest != _digest(json.dumps(record), tensors):
        raise InputError(f"{path} is damaged: its SHA-256 is not that of what was written; read the text again")
    mine = {"class": type(model).__name__, "dtype": str(model.dtype), "fingerprint": fingerprint(model)}
    if record["model"] != mine:
        both = record["model"], mine
        was, now = (f"a {one['class']} in {one['dtype']} with weights and config {one['fingerprint']}" for one in both)
        raise InputError(f"{path} was written with {was}, and this is {now}; load the model that it was written with")
    names = ("chunk", "rebase_at", "quantized", "rollback")
    settings = {name: record[name] for name in names if record.get(name) is not None}
    cache = PolicyCache(policies.make(record["policy"]), model, **settings)
    table = cache.table
    table.restore(below("books.", tensors), record["books"])
    on_device = {name: tensor.to(table.device) for name, tensor in tensors.items()}
    for index, layer in enumerate(cache.layers):
        layer.restore(below(f"layers.{index}.", on_device))
    table.ids = tensors["ids"].to(table.device) if "ids" in tensors else None
    return CacheReader(model, cache.policy, cache), record["notes"], below("more.", tensors)


def _read(path: Path) -> tuple[Json, dict[str, Tensor], str | None]:
    if not path.is_file():
        raise InputError(f"there is no state at {path}; save one first")
    try:
        with safe_open(path, "pt") as file, torch.inference_mode(False):  # buffers are written outside of that mode too
            metadata = file.metadata() or {}
            # Copies: tensors of a file lie at any address, and kernels round differently where they are not aligned.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{path} is cut short or no safetensors file: {error}") from error
    if "sinklab_state" not in metadata:
        raise InputError(f"{path} is no saved state but another safetensors file")
    return parse_object(metadata["sinklab_state"], str(path)), tensors, metadata.get("sha256")


def _digest(record: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of what a file holds: a bit that flipped in a key would go on into every token, and nobody would see it."""
    digest = hashlib.sha256(record.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
