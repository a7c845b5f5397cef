"""The seam: the only file that knows how transformers dispatches attention; what it passes is read in ``host_arguments.py``.

transformers looks the attention function of every layer up in one shared table, and the function that builds its mask in a
second one. :func:`register_operation` puts an operation into both under one name, to *replace* attention. :func:`shadow`
wraps whatever the tables answer, for as long as somebody looks, to *measure* it: the model keeps the name it uses, so code that
branches on that name behaves as before.
"""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, Unpack

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from sinklab.attention.folding import attend, short_step
from sinklab.attention.host_arguments import IN_THE_MASK, FurtherKeywords, read_mask, read_sink_scores, unknown_keywords
from sinklab.attention.operation import ATTRIBUTE, Inputs, Operation, state_of
from sinklab.attention.paths.table import compute
from sinklab.attention.visibility import Everything
from sinklab.errors import UnsupportedModelError

Attended: TypeAlias = tuple[Tensor, Tensor | None]
"""What an attention function gives: head outputs ``(batch, q_len, num_heads, value_dim)``, and the weights if it has them."""

Native: TypeAlias = Callable[..., Attended]
"""An attention function of transformers."""


class Observer(Protocol):
    """What is called in place of the attention of some modules; see :class:`sinklab.attention.session.Session`.

    A subclass that does not care about masks says so by leaving out ``on_mask`` and ``running``.
    """

    def owns(self, module: nn.Module) -> bool:
        """Whether the module belongs to the model under observation."""

    def on_attention(self, native: Native, module: nn.Module, *args: Any, **kwargs: Any) -> Attended:
        """Call ``native`` and return what it returned, or something else of the same form."""

    def on_mask(self, record: MaskRecord) -> None:
        """A mask was built while the model of this observer was running, or before a forward that may be of this observer."""
        return None

    @property
    def running(self) -> bool:
        """Whether the model of this observer is inside its forward."""
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class MaskRecord:
    """What the host said when it built a mask; only here are the absolute offsets of queries and keys known."""

    mask: object  # None when the kernel was left to do causality by itself
    q_length: int
    kv_length: int
    q_offset: int  # absolute index of the first query, and below of the first key
    kv_offset: int
    padding: Tensor | None  # 2-D (batch, tokens so far), true for tokens


def implementation_name(operation: str) -> str:
    """Name under which an operation is known to transformers, as in ``attn_implementation="sinklab_sigmoid"``."""
    return f"sinklab_{operation}"


def register_operation(operation: Operation) -> str:
    """Make an operation available to every transformers model, as ``sinklab_<operation>``, for function and mask; that name.

    The mask function is registered too because transformers hands a function without one no mask at all, and causality is
    silently gone. Parameters of the instance serve modules that do not carry their own in ``module.operation``.

    Soft cap, position bias and attention dropout of the host model keep their meaning. A model with learned sink logits, or
    with a keyword that is not in :data:`~sinklab.attention.host_arguments.KEYWORDS`, raises :class:`UnsupportedModelError`
    when it runs.
    """
    default = operation
    name = implementation_name(operation.name)

    def attention_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        layer_input: Tensor | None = None,
        **keywords: Unpack[FurtherKeywords],
    ) -> Attended:
        alone = attention_mask is None and query.shape[2] == 1 and not (dropout and module.training)
        if alone and not torch.compiler.is_compiling() and not _weights_are_collected():
            step = short_step(module, query, key, value, scaling, keywords)
            if step is not None:
                return step, None
        chosen = operation_of(module, attention_forward)
        # What eager and sdpa find in the mask, a sparse model hands to functions of any other name as a keyword alone.
        unmasked = [key for key in IN_THE_MASK if keywords.get(key) is not None]
        unknown = unknown_keywords(keywords) + unmasked
        if unknown or read_sink_scores(keywords) is not None:
            what = (
                f"is given the keyword {', '.join(unknown)}"
                if unknown
                else "has learned sink logits, which are part of a softmax"
            )
            raise UnsupportedModelError(
                f"{type(module).__name__} {what}; {name} cannot take the place of its attention. Use the model's own "
                "implementation"
            )
        causal, visible, bias = False, attention_mask, keywords.get("position_bias")
        if attention_mask is None:
            flag = keywords.get("is_causal")
            causal = query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if flag is None else flag)
        elif attention_mask.dtype != torch.bool or attention_mask.ndim != 4:
            rule, bias = read_mask(attention_mask, keywords, module, name, query.shape[2], key.shape[2], query.device)
            visible = None if isinstance(rule, Everything) else rule.block(0, query.shape[2], 0, key.shape[2])
        elif attention_mask.shape[-1] > key.shape[2]:
            visible = attention_mask[..., : key.shape[2]]
        inputs = Inputs(
            queries=query, keys=key, values=value, visible=visible, causal=causal,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, state=state_of(module, chosen, layer_input),
            softcap=keywords.get("softcap"), bias=None if bias is None else bias[..., : key.shape[2]],
            dropout=dropout if module.training else 0.0,
        )  # fmt: skip
        path = getattr(module, "attention_path", "auto")
        wanted = bool(keywords.get("output_attentions")) or _weights_are_collected()
        if chosen.folds:
            outputs, weights = attend(chosen, inputs, getattr(module, ATTRIBUTE), path, need_weights=wanted)
            if torch.compiler.is_compiling() or not _observers.get():  # which read them, too
                getattr(module, ATTRIBUTE).passing.unrotated = None  # they keep the graph of the whole forward alive
        else:
            outputs, weights = compute(chosen, inputs, path, need_weights=wanted)
        return outputs.transpose(1, 2).contiguous(), weights

    attention_forward.__name__ = name
    attention_forward._sinklab_operation = default  # type: ignore[attr-defined]

    ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
    # Boolean, or None where causality says it all: operations are given what is visible, never an additive mask.
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    copyreg.pickle(type(operation), _travelling)
    return name


def _travelling(operation: Operation) -> tuple[Callable[..., Operation], tuple[type[Operation], dict[str, object]]]:
    """How an operation is pickled: with its model it may come to a process whose transformers does not know its name."""
    settings = {field.name: getattr(operation, field.name) for field in dataclasses.fields(operation)}
    return _arrived, (type(operation), settings)


def _arrived(kind: type[Operation], settings: dict[str, object]) -> Operation:
    operation = kind(**settings)
    if implementation_name(operation.name) not in ALL_ATTENTION_FUNCTIONS:
        register_operation(operation)
    return operation


def _weights_are_collected() -> bool:
    """Whether transformers is gathering attention weights for the caller (``output_attentions=True``)."""
    # While a graph is captured a context variable cannot be read; transformers keeps the collector in a global then.
    collected = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return bool(collected) and any("attentions" in name for name in collected)


def operation_of(module: nn.Module, function: Native) -> Operation:
    """What ``function`` computes for ``module``: an operation registered here, or the softmax of transformers' own functions.

    The function decides, not the module: a module that carries a sigmoid computes a softmax when somebody switches its model to
    ``sdpa``.
    """
    default = getattr(function, "_sinklab_operation", None)
    if default is None:
        from sinklab.registry import operations

        return operations["softmax"]()
    own = getattr(module, "operation", None)
    return own if isinstance(own, Operation) else default


# --- shadowing -------------------------------------------------------------------------------------------------------------

_observers: contextvars.ContextVar[tuple[Observer, ...]] = contextvars.ContextVar("sinklab_observers", default=())
_lock = threading.Lock()
_everywhere: tuple[Observer, ...] = ()
"""Observers of all contexts: a context variable cannot be read while a graph is captured."""


@contextlib.contextmanager
def shadow(observer: Observer) -> Iterator[None]:
    """Let ``observer`` see the attention calls and masks of this context (thread or task) until the block ends.

    The tables are wrapped while at least one observer is active anywhere, and restored when the last one leaves, also after an
    exception. Calls that no observer of the calling context owns go straight to the model's own function.
    """
    global _everywhere
    with _lock:
        _everywhere = (*_everywhere, observer)
        if len(_everywhere) == 1:
            _install()
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)
        with _lock:
            at = next(index for index, other in enumerate(_everywhere) if other is observer)
            _everywhere = _everywhere[:at] + _everywhere[at + 1 :]
            if not _everywhere:
                _remove()


def active_observers() -> tuple[Observer, ...]:
    """Observers of the calling context, outermost first."""
    return _observers.get()


not_compiled = torch.compiler.disable(
    reason="sinklab looks at this model, and looking is not compiled: leave fullgraph=True out, or give the model itself"
)
"""What a graph is broken for, in place of being traced through it: what the observers of a model are given of it."""


def _install() -> None:
    native_interface = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(attn_implementation: str, default: Native) -> Native:
        # "eager" is not in the table: each modeling file passes its own eager function as the default. Wrapping the answer
        # rather than the entry reaches it without knowing in which file it lives.
        return _wrap_attention(native_interface(attn_implementation, default))

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface
    for name in list(ALL_ATTENTION_FUNCTIONS.keys()):  # a few models index the table instead
        ALL_ATTENTION_FUNCTIONS[name] = _wrap_attention(ALL_ATTENTION_FUNCTIONS[name])
    for name in list(ALL_MASK_ATTENTION_FUNCTIONS.keys()):
        ALL_MASK_ATTENTION_FUNCTIONS[name] = _wrap_mask(ALL_MASK_ATTENTION_FUNCTIONS[name])


def _remove() -> None:
    del ALL_ATTENTION_FUNCTIONS.get_interface  # the instance attribute; the method of the class shows again
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for name, function in list(table._local_mapping.items()):
            native = getattr(function, "_sinklab_native", None)
            if native is None:
                continue
            if table._global_mapping.get(name) is native:
                del table[name]
            else:
                table[name] = native  # somebody else's local entry was there before us


def _wrap_attention(native: Native) -> Native:
    if hasattr(native, "_sinklab_native"):
        return native

    def shown(module: nn.Module, *args: object, **kwargs: object) -> Attended:
        for observer in _observers.get():
            if observer.owns(module):
                if "attention_mask" in kwargs:  # AFMoE and Doge name it; for observers it is the fourth
                    others = {name: value for name, value in kwargs.items() if name != "attention_mask"}
                    return observer.on_attention(native, module, *args, kwargs["attention_mask"], **others)
                return observer.on_attention(native, module, *args, **kwargs)
        return native(module, *args, **kwargs)

    broken_for = not_compiled(shown)

    def attention(module: nn.Module, *args: object, **kwargs: object) -> Attended:
        if not torch.compiler.is_compiling():
            return shown(module, *args, **kwargs)
        if any(observer.owns(module) for observer in _everywhere):
            return broken_for(module, *args, **kwargs)
        return native(module, *args, **kwargs)

    attention._sinklab_native = native  # type: ignore[attr-defined]
    return attention


def _wrap_mask(native: Callable[..., object]) -> Callable[..., object]:
    if hasattr(native, "_sinklab_native"):
        return native
    signature = inspect.signature(native)

    def shown(*args: object, **kwargs: object) -> object:
        result = native(*args, **kwargs)
        # A running model builds its own masks. Before a forward, generate() builds those of a static cache; whose they are
        # shows only when the very object reaches an attention call, so every observer is called.
        observers = [observer for observer in _observers.get() if observer.running][-1:] or _observers.get()
        if observers:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            arguments = {**arguments.get("kwargs", {}), **arguments}
            padding = arguments.get("attention_mask")
            record = MaskRecord(
                mask=result,
                q_length=int(arguments["q_length"]),
                kv_length=int(arguments["kv_length"]),
                q_offset=int(arguments.get("q_offset") or 0),
                kv_offset=int(arguments.get("kv_offset") or 0),
                padding=padding.bool() if isinstance(padding, Tensor) and padding.ndim == 2 else None,
            )
            for observer in observers:
                observer.on_mask(record)
        return result

    broken_for = not_compiled(shown)

    def mask(*args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling():
            return shown(*args, **kwargs)
        if any(observer.running for observer in _everywhere):
            return broken_for(*args, **kwargs)
        return native(*args, **kwargs)

    mask._sinklab_native = native  # type: ignore[attr-defined]
    return mask
