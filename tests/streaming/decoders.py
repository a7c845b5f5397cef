"""The decoders that the streaming tests run on, those that are refused, and how the tests read with them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.architectures.zoo import DECODERS, OFF_SEAM, VOCAB, ZOO, build
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.forward_arguments import cache_argument
from sinklab.streaming.cache import SinkCache

__all__ = [
    "FAMILIES",
    "REFUSED",
    "SINKS",
    "TOLERANCE",
    "WINDOW",
    "backends_of",
    "build_decoder",
    "decoder",
    "gap",
    "one_by_one",
    "read",
    "sliding",
    "text",
]

SINKS, WINDOW = 2, 9
"""Twelve slots with the query's own: small against the texts, so that tokens are evicted three times over."""

TOLERANCE = 2e-4
"""Largest difference of logits. The weights of the zoo give scores of standard deviation near 1 and logits of up to 10, so that
attention is far from uniform and a wrong key shows: every mistake of test_mistakes moves logits by 0.1 or more. float32 angles
at positions below 64 are off by up to 64 · 2⁻²⁴ = 4e-6; a score, a sum of products of size up to about 10 (keys of 8
coordinates; norms are learned), by up to about 4e-5; its weight by as much relatively; and logits of size 5 by 2e-4. Measured:
3e-5 at most."""

REFUSED = {
    "llama4": "layers of the kind chunked_attention",
    "deepseek_v32": "layers of the kind (indexed|deepseek_sparse)_attention",
    "gpt2": "learned or sinusoidal embeddings",
    "gpt_bigcode": "learned or sinusoidal embeddings",
    "gpt_neo": "learned or sinusoidal embeddings",
    "biogpt": "learned or sinusoidal embeddings",
    "opt": "learned or sinusoidal embeddings",
    "xglm": "learned or sinusoidal embeddings",
    "bloom": "takes no position_ids",
    "mpt": "takes no position_ids",
}
"""Decoders of the zoo that are refused, and words of the reason. Every other one must work."""

FAMILIES = tuple(entry.id for entry in (*DECODERS, *OFF_SEAM) if entry.kind == "decoder" and entry.id not in REFUSED)


def backends_of(family: str) -> tuple[str, ...]:
    return ZOO[family].backends


def build_decoder(family: str, backend: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A fresh model of the family; sliding windows are just as wide as the policy."""
    return build(ZOO[family], backend, **{**sliding(family, SINKS + WINDOW + 1), **changes})


def sliding(family: str, size: int) -> dict[str, int]:
    """The change that makes sliding layers, if the family has any, see ``size`` tokens."""
    return {"sliding_window": size} if "sliding_window" in ZOO[family].config else {}


@functools.cache
def decoder(family: str, backend: str = "sdpa") -> PreTrainedModel:
    """As :func:`build_decoder`, built once per process; tests must leave it as they found it."""
    return build_decoder(family, backend)


def text(length: int, rows: int = 2, seed: int = 0) -> Tensor:
    """Token ids ``(rows, length)``."""
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: PreTrainedModel, tokens: Tensor, cache: Any = None, *, pieces: Any = None, **arguments: Any) -> Tensor:
    """Logits of all tokens, given in calls of these lengths (all at once by default)."""
    if cache is None:
        cache = SinkCache(model, num_sinks=SINKS, window=WINDOW)
    pieces = [tokens.shape[1]] if pieces is None else pieces
    outputs = [
        model(input_ids=piece, **cache_argument(model, cache), use_cache=True, **arguments).logits
        for piece in tokens.split(list(pieces), dim=1)
    ]
    return torch.cat(outputs, dim=1)


def one_by_one(model: PreTrainedModel, tokens: Tensor, cache: Any = None, **arguments: Any) -> Tensor:
    """Logits of all tokens, given one at a time."""
    return read(model, tokens, cache, pieces=[1] * tokens.shape[1], **arguments)


def gap(one: Tensor, other: Tensor) -> float:
    """Largest difference; infinite if either is not finite."""
    difference = (one - other).abs()
    return float(difference.max()) if bool(difference.isfinite().all()) else float("inf")
