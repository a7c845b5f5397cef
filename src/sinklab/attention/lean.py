"""Arguments of a forward that is run to be looked at: no cache is kept, and no more logits are made than somebody reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from sinklab.attention.cache_argument import given_cache

__all__ = ["lean_arguments"]


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
