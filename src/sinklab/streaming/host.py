"""Host: how a cache gets at the forwards and the attention of its model; what transformers does not tell it is found here.

In a chunk every query sees the sinks at a distance of its own. Keys of a chunk hold a copy of the sinks for each distance, and
every query computes scores with all of them. Where attention is the stock softmax kernel, whose log-sum-exp is to be had,
:class:`SinksApart` gives it the window alone; the few scores of the sinks are computed beside it, and the two softmaxes become
one. Some models repeat heads in an order of their own, or attend twice, so the first such forward is watched, with copies.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.host_arguments import given_cache
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.streaming.step import StaticStep, Step
from sinklab.streaming.table import SlotTable

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

Arguments: TypeAlias = dict[str, object]
"""Keyword arguments of a forward."""

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""Keyword arguments by which a collator says where the documents of a packed row begin."""

ENCODED = "mm_encoder_outputs"
"""Keyword argument with which generate() gives a model the images, videos and sounds that it has let it encode before."""

_RECOMPUTES = (
    "is_activation_checkpointing"
    if hasattr(PreTrainedModel, "is_activation_checkpointing")
    else "is_gradient_checkpointing"  # before transformers 5.23
)


class Planner(abc.ABC):
    """A cache that plans the forwards it is given to."""

    static: bool  # whether the forward at hand is compiled

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


def generated_ids() -> Tensor | None:
    """All ids ``(batch, length)`` that the generate() at hand begins with; ``None`` outside of its first forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_prefill":
        frame = frame.f_back
    ids = None if frame is None else frame.f_locals.get("input_ids")
    return ids if isinstance(ids, Tensor) and ids.numel() else None


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
    """Refuse rows that pack several documents, which a cache would merge: it counts the tokens of a row as one text."""
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


def require_plain(model: PreTrainedModel, module: nn.Module, arguments: Arguments) -> None:
    """Refuse a forward that no cache of ours can plan: of images with positions of their own, with gradients, and the like."""
    if arguments.get("use_cache") is False:
        raise ConfigurationError(
            f"{type(module).__name__} is given a cache and use_cache=False, with which generate() feeds the whole text "
            "again at every step; pass use_cache=True"
        )
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError("a bounded cache is written in place and has no gradient; run under torch.no_grad()")
    if module.training and getattr(model, _RECOMPUTES):
        raise ConfigurationError(
            f"{type(model).__name__} is in training mode with gradient checkpointing, in which transformers withholds the "
            "cache from its layers; call model.eval() before"
        )
    own = [kind for kind in ("token_type_ids", "mm_token_type_ids") if arguments.get(kind) is not None]
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if (own or "mrope_section" in rope) and (media := media_of(arguments)):
        raise UnsupportedModelError(
            f"{type(model).__name__} is given {media[0]} and has positions or a mask of its own for them, where a bounded "
            "cache has those of a text; give it text alone"
        )
    require_one_text(arguments)


def split(arguments: Arguments, size: int, config: object = None, *, chunk: int) -> tuple[Arguments, Arguments]:
    """The arguments of a forward of the first ``size`` tokens, and of the others; refuses what cannot be had in chunks."""
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

    def before(self, module: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> tuple[tuple[()], Arguments] | None:
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = given_cache(arguments)
        if not self.caches:  # these are the hooks of a copy
            self.leave()
        if not isinstance(cache, Planner):
            return None
        return (), _open(cache, module, arguments, torch.compiler.is_compiling() or is_compiled(module))

    def after(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: ModelOutput | None
    ) -> ModelOutput | None:
        cache = given_cache(kwargs)
        return _close(cache, output) if isinstance(cache, Planner) else None


@torch.compiler.disable
def _open(cache: Planner, module: nn.Module, arguments: Arguments, static: bool) -> Arguments:
    """Planning is no part of any graph, or there would be one for each slot."""
    cache.static = static
    return cache.open(module, arguments)


@torch.compiler.disable
def _close(cache: Planner, output: ModelOutput | None) -> ModelOutput | None:
    return cache.close(output)


def join(model: PreTrainedModel, cache: Planner) -> None:
    """Let a cache plan the forwards of a model, without its head, that it is given to, as long as there is the cache."""
    decoder = model.base_model
    owners = (getattr(entry, "__self__", None) for entry in decoder._forward_pre_hooks.values())
    hooks = next((owner for owner in owners if isinstance(owner, _Hooks)), None) or _Hooks(decoder)
    hooks.join(decoder, cache)


# --- compiled steps -------------------------------------------------------------------------------------------------------


_MARK = "_sinklab_compiled_steps"


def compile_steps(model: PreTrainedModel, **options: Any) -> None:
    """Compile the decoder of ``model`` for single tokens in a :class:`~sinklab.streaming.cache.PolicyCache`.

    The first token behind a prompt compiles, which takes tens of seconds; no later one does, however long the text gets. Other
    forwards are left as they are. On an H200, in CUDA graphs, a step of a model of 12 layers took 1.15 ms in place of 11.7, on
    one core of a CPU it was 1.2 times as fast. A model compiled as a whole, by ``model.compile()``, works too: its graph is
    broken where the step is planned, and there is no new one for later tokens either.

    ``options`` are those of :func:`torch.compile`; by default ``fullgraph=True, dynamic=False``.
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


# --- sinks apart ----------------------------------------------------------------------------------------------------------


_fits: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Whether the attention of a model is such, of those that have been watched."""


class SinksApart(seam.Observer):
    """What computes the attention of chunks for the cache of a table, in whose ``left`` a layer leaves its sinks."""

    running = True

    def __init__(self, model: PreTrainedModel, table: SlotTable, layers: int) -> None:
        self._table, self._looking = table, contextlib.ExitStack()
        self._modules = {id(module) for module in Anatomy(model).attention.values()}
        here = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._possible = here and len(self._modules) == layers
        self._watching = False
        self._calls: list[tuple[int, bool]] = []  # of the forward that is watched: modules, and whether each call was as usual

    def ask(self, length: int) -> None:
        """Say to the table whether a forward of so many tokens can be had so.

        It takes the stock kernel on a CPU, no padding, no query that is a sink itself, and nobody else who looks at attention.
        """
        table, model = self._table, self._table.model
        possible = (
            self._possible
            and model is not None
            and length > 1
            and table.in_cache
            and table.rows == 1
            and table.device.type == "cpu"
            and model.config._attn_implementation == "sdpa"
            and not model.training
            and not torch.is_autocast_enabled("cpu")
            and not seam.active_observers()
        )
        known = None if model is None else _fits.get(model)
        table.apart = possible and known is True and int(table.seen) > int(table.pinned.max())
        self._watching, self._calls = possible and known is None, []
        table.watched = self._watching or table.apart

    def begin(self) -> None:
        """A forward has been planned; of one whose layers leave their sinks attention is computed here."""
        step = self._table.step
        if isinstance(step, Step) and (step.which is not None or self._watching):
            self._looking.enter_context(seam.shadow(self))

    def end(self, failed: bool) -> None:
        """The forward is over, or has failed."""
        self._looking.close()
        table, watching, self._watching = self._table, self._watching, False
        if not failed:
            table.require_taken()
            if watching and table.model is not None:
                modules = [module for module, _ in self._calls]
                once = sorted(modules) == sorted(self._modules)
                _fits[table.model] = once and all(usual for _, usual in self._calls)
        table.left = table.given = None
        table.watched = False

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self._modules

    def on_attention(
        self, native: seam.Native, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object = None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:  # fmt: skip
        """Attend to the window with the stock kernel and to the sinks here."""
        table = self._table
        left, table.left = table.left, None
        given, table.given = table.given, None
        step = table.step
        assert isinstance(step, Step)
        changed = host_arguments.unknown_keywords(kwargs) + [
            name for name in ("position_bias", "s_aux", "sinks") if kwargs.get(name) is not None
        ]
        usual = (
            not changed
            and given is not None
            and key is given[0]
            and value is given[1]
            and isinstance(mask, Tensor)
            and step.visible is not None
            and mask.data_ptr() == step.visible.data_ptr()
        )
        if self._watching:
            self._calls.append((id(module), usual))
            return native(module, query, key, value, mask, **kwargs)
        if not usual or left is None or not isinstance(mask, Tensor):
            raise UnsupportedModelError(
                f"{type(module).__name__} was given {', '.join(changed) or 'other keys or another mask than before'}, where "
                "the sinks of a chunk cannot be apart; make the cache with chunk=1"
            )
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        bias = step.bias
        if bias is None:
            bias = step.bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        window, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scaling
        )
        with torch.autocast(query.device.type, enabled=False):
            outputs = _with_sinks(query, window, total, *left, scaling)
        return outputs.transpose(1, 2).contiguous(), None


def _with_sinks(query: Tensor, window: Tensor, total: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Head outputs over the window and the sinks, ``(batch, num_heads, length, value_dim)``."""
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // keys.shape[1]
    queries = query.to(wide).unflatten(1, (-1, groups))
    scores = (queries[..., None, :] * keys.to(wide)[:, :, None]).sum(dim=-1).flatten(1, 2) * scaling
    both = torch.logaddexp(total.to(wide), torch.logsumexp(scores, dim=-1))[..., None]
    weights = torch.exp(scores - both)
    far = torch.matmul(weights.unflatten(1, (-1, groups)), values.to(wide)[:, :, None]).flatten(1, 2)
    return (window.to(wide) * torch.exp(total.to(wide)[..., None] - both) + far).to(query.dtype)
