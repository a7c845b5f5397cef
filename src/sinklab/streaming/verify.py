"""Verify: a model proves on a few tokens that it follows the masks of a cache, before anything is read with it."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.forward_arguments import cache_argument
from sinklab.attention.placement import input_device
from sinklab.errors import UnsupportedModelError
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.rotation import without_autocast
from sinklab.streaming.traits import tokens_in_front, tokens_of_prefix

__all__ = ["TOKENS", "require_close", "some_tokens", "verify_model"]

TOKENS = 12
"""That a model reads to prove itself."""

_WINDOW, _REBASE_AT = 2, 8
_MARGIN = {torch.float64: 1e-3, torch.float32: 1e-2}
"""Largest distance of two logits, relative to their standard deviation. Rounding is below 1e-3 in float32 and below 0.2 in
bfloat16 for trained models; a mask that is not followed moves logits by a good part of the deviation."""

_verified: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@torch.no_grad()
def verify_model(model: PreTrainedModel) -> None:
    """Read a few tokens at once and one by one under a narrow policy: the logits must agree. Once for a model.

    A chunk needs the mask and the copies of the sinks that the cache makes, single tokens need neither; one reading counts its
    positions anew on the way. A model that ignores the mask or the positions gives other logits, without an error.

    Raises:
        UnsupportedModelError: the logits do not agree, or what :class:`PolicyCache` refuses.
    """
    if model in _verified:
        return
    training = model.training
    model.eval()
    try:
        with without_autocast(model):
            chunk, single = _read(model, TOKENS), _read(model, 1)
    finally:
        model.train(training)
    require_close(model, chunk, single, "read at once and one by one")
    _verified.add(model)


def require_close(model: PreTrainedModel, some: Tensor, others: Tensor, how: str) -> None:
    """Refuse a model whose logits, ``(tokens, vocab_size)``, depend on ``how`` its tokens were read.

    Raises:
        UnsupportedModelError: they do.
    """
    distance = float((some - others).abs().max() / others.std().clamp(min=1e-12))
    margin = _MARGIN.get(model.dtype, 0.5)
    if not distance <= margin:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not follow the masks of a bounded cache: {TOKENS} tokens {how} give logits that "
            f"differ by {distance:.2g} standard deviations; at most {margin:g} is rounding"
        )


def some_tokens(model: PreTrainedModel) -> Tensor:
    """:data:`TOKENS` token ids, and those of a prefix, int64 ``(1, tokens)``, where the model takes them."""
    vocabulary = model.config.get_text_config().vocab_size
    return (torch.arange(TOKENS + tokens_of_prefix(model), device=input_device(model)) * 7 + 5).remainder(vocabulary)[None]


def _read(model: PreTrainedModel, chunk: int) -> Tensor:
    """Logits ``(tokens, vocab_size)`` of a few tokens, ``chunk`` at a time."""
    prefix = tokens_of_prefix(model)
    policy, more = SinkWindow(num_sinks=1, window=_WINDOW + prefix), tokens_in_front(model) + prefix
    cache = PolicyCache(policy, model, chunk=chunk, rebase_at=_REBASE_AT + more if chunk == 1 else None)
    logits: Tensor = model(input_ids=some_tokens(model), **cache_argument(model, cache), use_cache=True).logits
    return logits[0].to(torch.promote_types(logits.dtype, torch.float32))
