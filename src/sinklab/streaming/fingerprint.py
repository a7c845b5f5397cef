"""Fingerprint: which model a saved cache or a head map belongs to, from its config and some of its weights."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

from sinklab.attention.placement import held

__all__ = ["fingerprint"]

_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Fields of a config that do not change what a model computes, or that the tensors tell better."""

_SAMPLED = 8
"""Tensors of a model that its fingerprint reads: enough to tell checkpoints of one training apart, in milliseconds."""


def fingerprint(model: PreTrainedModel, *, rounded: bool = False) -> str:
    """16 hexadecimal digits of a hash over the config and some of the weights.

    Eight tensors, spread over the model, are read at both ends: another checkpoint of the same architecture differs, and so
    does another dtype.

    Args:
        rounded: round weights to bfloat16 first, so that a model in float32 and the same in bfloat16 have one fingerprint.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    weights = sorted(model.named_parameters())
    for name, weight in weights[:: max(1, len(weights) // _SAMPLED)]:
        flat = held(model, name).flatten()
        ends = torch.cat((flat[:256], flat[-256:])).cpu().contiguous()
        if rounded and ends.is_floating_point():
            ends = ends.to(torch.bfloat16)
        digest.update(f"{name} {tuple(weight.shape)} {ends.dtype}".encode())
        digest.update(ends.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
