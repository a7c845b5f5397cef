"""Arguments of a forward: what models call their cache, and a forward that keeps and computes nothing that nobody reads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from torch import nn
from transformers import Cache
from transformers.masking_utils import create_causal_mask

__all__ = ["CACHE", "cache_argument", "given_cache", "lean_arguments", "returned_cache", "takes_cache"]

OLD: Final = "past_key_values"

CACHE: Final = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else OLD
"""The name in the installed transformers: of the argument, and of the field of a model's output."""


def cache_argument(model: nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """The cache as a keyword argument of a model, by the name that its forward has for it."""
    return {_name(type(model).forward): cache}


def takes_cache(model: nn.Module) -> bool:
    """Whether the forward of a model has a cache among its arguments, by either name."""
    return not {CACHE, OLD}.isdisjoint(inspect.signature(model.forward).parameters)


def given_cache(arguments: Mapping[str, object]) -> Cache | None:
    """The cache among the keyword arguments of a forward, by either name; ``None`` without."""
    cache = arguments.get(CACHE)
    return cast("Cache | None", arguments.get(OLD) if cache is None else cache)


def returned_cache(output: object) -> Cache | None:
    """The cache in the output of a model; ``None`` without."""
    return getattr(output, CACHE, None)


@functools.cache
def _name(forward: Callable[..., object]) -> str:
    parameters = inspect.signature(forward).parameters
    return OLD if OLD in parameters and CACHE not in parameters else CACHE  # code that comes with a checkpoint has the old one


def lean_arguments(model: nn.Module, arguments: Mapping[str, Any], *, logits: bool = False) -> dict[str, Any]:
    """The arguments of a forward, with what a model would keep or compute for nobody switched off where its forward lets one.

    A cache holds the keys and values of every layer, and the logits of a large vocabulary are the largest tensor there is.

    Args:
        arguments: of the forward; what they say themselves stays as it is.
        logits: whether the logits of all tokens are read; if not, those of the last one are made. With ``labels`` all are.
    """
    known, lean = inspect.signature(model.forward).parameters, dict[str, Any]()
    if "use_cache" in known and given_cache(arguments) is None:
        lean["use_cache"] = False
    if "logits_to_keep" in known and not logits and "labels" not in arguments:
        lean["logits_to_keep"] = 1
    return lean | dict(arguments)
