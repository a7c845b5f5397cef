"""Static: a model is compiled once for single tokens in a cache, and never again.

A compiled step is a :class:`~sinklab.streaming.step.StaticStep`: what changes from token to token is worked out before the
forward, outside of the graph. The graph holds the rest: the layers, and the writing of keys and values. Prompts, padded
batches and quantised caches run as they did, not compiled.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from sinklab.attention import seam
from sinklab.attention.forward_arguments import given_cache
from sinklab.errors import ConfigurationError
from sinklab.streaming.step import StaticStep

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

__all__ = ["compile_steps", "is_compiled"]

_MARK = "_sinklab_compiled_steps"


def compile_steps(model: PreTrainedModel, **options: Any) -> None:
    """Compile the decoder of ``model`` for single tokens in a :class:`~sinklab.streaming.cache.PolicyCache`.

    The first token behind a prompt compiles, which takes tens of seconds; no later one does, however long the text gets. Other
    forwards are left as they are. On one core a step of a model of 11 million parameters, 1,024 tokens held, was 1.1 times as
    fast as one that is not compiled in float32, 1.2 times in bfloat16. A model compiled as a whole, by ``model.compile()``,
    works too: its graph is broken where the step is planned, and there is no new one for later tokens either.

    Args:
        options: of :func:`torch.compile`; by default ``fullgraph=True, dynamic=False``.

    Raises:
        ConfigurationError: its steps are compiled already.
    """
    decoder = model.base_model
    if is_compiled(decoder):
        raise ConfigurationError(f"the steps of this {type(model).__name__} are compiled already")
    eager = decoder.forward
    compiled = torch.compile(eager, **{"fullgraph": True, "dynamic": False, **options})

    @functools.wraps(eager)
    def forward(*args: object, **kwargs: object) -> ModelOutput:
        static = isinstance(getattr(given_cache(kwargs), "step", None), StaticStep)
        # What looks at a model breaks a graph, and these are of one piece.
        return (compiled if static and not seam.active_observers() else eager)(*args, **kwargs)

    decoder.forward = forward
    setattr(decoder, _MARK, True)


def is_compiled(decoder: torch.nn.Module) -> bool:
    """Whether :func:`compile_steps` has been here."""
    return bool(getattr(decoder, _MARK, False))
