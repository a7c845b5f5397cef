"""Host: how a cache learns of its model's forwards; what transformers does not tell a cache is worked out here."""

from __future__ import annotations

import abc
import contextlib
import copy
import inspect
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import EncoderDecoderCache, PreTrainedModel

from sinklab.attention.forward_arguments import given_cache
from sinklab.errors import ConfigurationError
from sinklab.streaming.static import is_compiled

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

__all__ = [
    "BOUNDARIES",
    "Arguments",
    "Planner",
    "copied_together",
    "decoder_of",
    "generating_model",
    "join",
    "kept_logits",
    "kept_tensors",
    "mask_of",
    "media_of",
    "require_one_text",
    "split",
    "tokens_of",
]


Arguments: TypeAlias = dict[str, object]
"""Keyword arguments of a forward."""

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""Keyword arguments by which a collator says where the documents of a packed row begin."""

ENCODED = "mm_encoder_outputs"
"""Keyword argument with which generate() gives a model the images, videos and sounds that it has let it encode before."""


class Planner(abc.ABC):
    """A cache that plans the forwards it is given to.

    Attributes:
        static: whether the forward at hand is compiled.
    """

    static: bool

    @abc.abstractmethod
    def open(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """A forward of ``module`` begins; the keyword arguments with which it is to go on."""

    @abc.abstractmethod
    def close(self, output: ModelOutput | None) -> ModelOutput | None:
        """The forward is over, with ``None`` if it failed; the output that its caller gets."""


def kept_tensors() -> contextlib.AbstractContextManager[object]:
    """For making tensors that are kept: those made in inference mode could not be written outside of it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def generating_model() -> PreTrainedModel:
    """The model whose generate() is asking; transformers hands a cache everything but its model."""
    frame: FrameType | None = sys._getframe(1)
    model: PreTrainedModel | None = None
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "generate" else None
        model = owner if isinstance(owner, PreTrainedModel) else model
        frame = frame.f_back
    if model is None:
        raise ConfigurationError(
            "this cache does not know its model, which only generate() can tell it; outside of generate() name it: "
            "SinkCache(model, …) or cache.bind(model)"
        )
    return model


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module whose forward is given the cache: the model without its head, or the decoder of an encoder-decoder."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    return cast(PreTrainedModel, decoder)


def tokens_of(arguments: Arguments) -> Tensor:
    """Token ids ``(batch, length)`` or embeddings ``(batch, length, hidden_size)`` of a forward."""
    tokens = arguments.get("input_ids")
    return cast(Tensor, arguments.get("inputs_embeds") if tokens is None else tokens)


def mask_of(arguments: Arguments) -> Tensor | None:
    """Mask of a forward, as the caller gave it; ``None`` where there was none."""
    return cast(Tensor | None, arguments.get("attention_mask"))  # a cache takes no other kind


def media_of(arguments: Arguments) -> list[str]:
    """Names of the arguments of a forward that are images, videos or sounds, or what an encoder has made of them."""
    words = ("pixel", "image", "video", "audio", "input_features")
    named = [name for name, value in arguments.items() if isinstance(value, Tensor) and any(word in name for word in words)]
    encoded = arguments.get(ENCODED)
    if isinstance(encoded, Mapping):
        named += [f"{ENCODED} of {medium}" for medium, output in encoded.items() if output is not None]
    return named


def require_one_text(arguments: Arguments) -> None:
    """Refuse rows that pack several documents, which a cache would merge: it counts the tokens of a row as one text.

    Raises:
        ConfigurationError: positions that start anew among the tokens of a row, or boundaries given in another way.
    """
    named = [name for name in BOUNDARIES if arguments.get(name) is not None]
    positions, mask = arguments.get("position_ids"), mask_of(arguments)
    if isinstance(positions, Tensor) and (length := positions.shape[-1]) > 1:
        if mask is not None and mask.ndim == 2 and mask.shape[1] >= length:  # those of padding say nothing
            positions = positions.where(mask[:, -length:].bool().to(positions.device), -1)
        later, before = positions[..., 1:], positions.cummax(dim=-1).values[..., :-1]
        if bool(((later >= 0) & (later <= before)).any()):
            named.append("position_ids that start anew inside a row")
    if named:
        raise ConfigurationError(
            f"the cache is given {named[0]}: several documents are packed into one row, and a cache holds one text for each "
            "row, so that later documents would see earlier ones. Give every document a row of its own, padded on the left, or "
            "reset() the cache between them"
        )


def split(arguments: Arguments, size: int, config: object = None, *, chunk: int) -> tuple[Arguments, Arguments]:
    """The arguments of a forward of the first ``size`` tokens, and those of the others.

    Args:
        config: of the module, which says what its forward gives where the arguments do not.
        chunk: what the cache was made with; ``size`` is less where something else takes fewer tokens.

    Raises:
        ConfigurationError: something that cannot be had, or given, in chunks.
    """
    length, mask = tokens_of(arguments).shape[1], mask_of(arguments)
    names = ("output_attentions", "output_hidden_states", "output_router_logits", "labels")
    given = {name: getattr(config, name, None) if arguments.get(name) is None else arguments[name] for name in names}
    whole = [name for name, value in given.items() if value is not None and value is not False]
    advice = "make the cache with a larger chunk" if size >= chunk else ""
    if media := media_of(arguments):
        raise ConfigurationError(
            f"{media[0]} cannot be divided, and {length:,} tokens at once are processed in chunks of {size:,}; "
            f"{advice or 'give fewer'}"
        )
    if isinstance(arguments.get("logits_to_keep"), Tensor):
        whole.append("logits_to_keep as indices")
    if whole:
        raise ConfigurationError(
            f"{whole[0]} cannot be had of {length:,} tokens at once, which are processed in chunks of {size:,}; give "
            f"fewer{', or ' if advice else ''}{advice}"
        )
    first, rest = dict(arguments), dict(arguments)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        tokens = arguments.get(name)
        if isinstance(tokens, Tensor):
            axis = 1 if name == "inputs_embeds" else -1
            first[name], rest[name] = tokens.narrow(axis, 0, size), tokens.narrow(axis, size, length - size)
    if mask is not None and mask.ndim == 2:
        first["attention_mask"] = mask[:, : mask.shape[1] - length + size]
    return first, rest


def kept_logits(arguments: Arguments) -> int | None:
    """How many of the last tokens get logits; ``None`` for all, or where the model leaves that to its head."""
    count = arguments.get("logits_to_keep")
    return count if isinstance(count, int) and count else None


class _Hooks:
    """The two hooks on a model that let its caches plan their forwards; other forwards pass."""

    def __init__(self, module: nn.Module) -> None:
        self.names = list(inspect.signature(module.forward).parameters)
        self.caches: set[weakref.ref[Planner]] = set()
        self.handles: list[RemovableHandle] = []

    def join(self, module: nn.Module, cache: Planner) -> None:
        """Serve this cache too, until it is gone; the last one takes the hooks along."""
        self.caches.add(weakref.ref(cache, self.leave))
        if not self.handles:  # looked at when there is a cache already: another may leave at any time
            self.handles = [
                module.register_forward_pre_hook(self.before, with_kwargs=True),
                module.register_forward_hook(self.after, with_kwargs=True, always_call=True),
            ]

    def leave(self, *gone: weakref.ref[Planner]) -> None:
        """A cache is gone; without any, the hooks are."""
        self.caches.difference_update(gone)
        if not self.caches:
            while self.handles:
                self.handles.pop().remove()

    def __getstate__(self) -> Arguments:
        """A copy of a model has copies of its hooks, and no caches yet."""
        return {**self.__dict__, "caches": set()}

    def __deepcopy__(self, memo: dict[int, object]) -> _Hooks:
        caches = [cache for reference in tuple(self.caches) if (cache := reference()) is not None]
        if any(id(cache) in memo for cache in caches):  # copied before the model, by the same call
            raise ConfigurationError(copied_together("the model"))
        memo[id(self)] = copied = _Hooks.__new__(_Hooks)
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def before(self, module: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> tuple[tuple[()], Arguments] | None:
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = _planner(given_cache(arguments))
        if not self.caches:  # these are the hooks of a copy
            self.leave()
        if cache is None:
            return None
        return (), _open(cache, module, arguments, torch.compiler.is_compiling() or is_compiled(module))

    def after(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: ModelOutput | None
    ) -> ModelOutput | None:
        cache = _planner(given_cache(kwargs))
        return None if cache is None else _close(cache, output)


def copied_together(model: str) -> str:
    """Why a cache is not copied by the call that copies its model."""
    return (
        f"a cache and {model} that it belongs to cannot be copied together: a copy of a cache is one of the same model. Copy "
        "the model alone and make a cache for the copy; save_state and load_state of sinklab.streaming.state hand over what "
        "one that goes by positions holds"
    )


def _planner(cache: object) -> Planner | None:
    """The cache that plans, as it was given or as the cache of a decoder's self-attention."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return cache if isinstance(cache, Planner) else None


@torch.compiler.disable
def _open(cache: Planner, module: nn.Module, arguments: Arguments, static: bool) -> Arguments:
    """Planning is no part of any graph, or there would be one for each slot."""
    cache.static = static
    return cache.open(module, arguments)


@torch.compiler.disable
def _close(cache: Planner, output: ModelOutput | None) -> ModelOutput | None:
    return cache.close(output)


def join(model: PreTrainedModel, cache: Planner) -> None:
    """Let a cache plan the forwards of a model's decoder that it is given to, as long as there is the cache."""
    decoder = decoder_of(model)
    owners = (getattr(entry, "__self__", None) for entry in decoder._forward_pre_hooks.values())
    hooks = next((owner for owner in owners if isinstance(owner, _Hooks)), None) or _Hooks(decoder)
    hooks.join(decoder, cache)
