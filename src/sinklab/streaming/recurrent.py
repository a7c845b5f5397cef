"""Recurrent: layers that write no keys, beside those that a policy bounds.

A layer of linear attention (Mamba, gated delta nets, short convolutions) sums the whole text up in a state of fixed size. It
evicts nothing and needs no positions, so a policy bounds the layers of full attention, and the states are kept beside them. A
state cannot leave a token out that it has taken in: padding behind a token of a row would change it, and nothing can be taken
back. Other layers keep nothing at all: those of a feed-forward block alone, and those that attend to the keys of another layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from sinklab.attention.forward_arguments import cache_argument
from sinklab.attention.placement import input_device
from sinklab.models.layer_kinds import EMPTY_KINDS, HYBRID, RECURRENT_KINDS, layers_without_attention

__all__ = [
    "RecurrentLayer",
    "continues_in_chunks",
    "fresh_cache",
    "has_states",
    "hybrid_layers",
    "keyless_layers",
    "restore_states",
    "states_of",
]

_MARGIN, _ROUNDING = 0.1, 1e-4
"""Largest distance from the state of a text read at once: over that of a state that has seen the second half of it alone, and
over the state itself, for those that remember no more than that half. One that was not gone on from is as far as the former."""

_continues: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def keyless_layers(model: PreTrainedModel) -> dict[int, int]:
    """Index of every layer that writes no keys of its own, as the config says, and how many states it keeps, most often one.

    A layer that keeps nothing has 0.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if not shared and not layers_without_attention(config):
        return {}
    counts = {
        index: layer.number_of_states if kind in RECURRENT_KINDS else 0
        for index, (layer, kind) in enumerate(zip(DynamicCache(config=config).layers, kinds, strict=False))
        if kind in RECURRENT_KINDS | EMPTY_KINDS
    }
    return counts | dict.fromkeys(range(config.num_hidden_layers - shared, config.num_hidden_layers), 0)


def hybrid_layers(model: PreTrainedModel) -> dict[int, int]:
    """Index of every layer that keeps states beside keys of its own, and how many."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    if HYBRID not in kinds:
        return {}
    layers = enumerate(zip(DynamicCache(config=config).layers, kinds, strict=False))
    return {index: layer.number_of_states for index, (layer, kind) in layers if kind == HYBRID}


def has_states(model: PreTrainedModel) -> bool:
    """Whether a layer of ``model`` keeps a state of the whole text."""
    return any(keyless_layers(model).values()) or bool(hybrid_layers(model))


def fresh_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of transformers for one forward of ``model``."""
    return DynamicCache(config=model.config.get_text_config(decoder=True)) if has_states(model) else DynamicCache()


@torch.no_grad()
def continues_in_chunks(model: PreTrainedModel) -> bool:
    """Whether several tokens at once go on from the state of the tokens before, tried once a model.

    Some models begin anew there, without an error (Jamba, in transformers 5.24).
    """
    if model not in _continues:
        tokens = torch.arange(1, 5, device=input_device(model)).remainder(model.config.get_text_config().vocab_size)[None]
        training = model.training
        model.eval()
        whole, halves, second = (_states_behind(model, pieces) for pieces in ((tokens,), tokens.split(2, 1), (tokens[:, 2:],)))
        model.train(training)
        _continues[model] = all(
            bool((half - state).abs().max() <= _MARGIN * (alone - state).abs().max() + _ROUNDING * state.abs().max())
            for state, half, alone in zip(whole, halves, second, strict=True)
        )
    return _continues[model]


def _states_behind(model: PreTrainedModel, pieces: Sequence[Tensor]) -> list[Tensor]:
    """All states after forwards of these token ids, ``(1, length)`` each."""
    cache = fresh_cache(model)
    for piece in pieces:
        model(input_ids=piece, **cache_argument(model, cache), use_cache=True)
    return [state for layer in cache.layers for state in states_of(layer).values()]


def states_of(layer: object) -> dict[str, Tensor]:
    """The states of a layer of a cache by name; none before its first forward, and of a layer that has only keys."""
    kinds = {kind: getattr(layer, f"{kind}_states", {}) for kind in ("conv", "recurrent")}
    return {
        f"{kind}_states.{index}": state
        for kind, states in kinds.items()
        for index, state in states.items()
        if isinstance(state, Tensor)
    }


def restore_states(layer: LinearAttentionLayer, buffers: dict[str, Tensor]) -> None:
    """Give a layer the states among ``buffers``, as :func:`states_of` gave them."""
    for name, state in buffers.items():
        kind, _, index = name.partition("_states.")
        if not index:
            continue
        getattr(layer, f"{kind}_states")[int(index)] = state
        getattr(layer, f"is_{kind}_states_initialized")[int(index)] = True
        layer.has_previous_state[int(index)] = True
        layer.device, layer.dtype = state.device, state.dtype
        if kind == "conv" and hasattr(layer, "conv_kernel_size"):
            layer.conv_kernel_size[int(index)] = state.shape[-1]


class RecurrentLayer(LinearAttentionLayer):
    """The states of one layer, none or several, with what a :class:`~sinklab.streaming.bounded.BoundedCache` asks of layers."""

    @property
    def batch_size(self) -> int:
        """Rows of the states; -1 before the first call."""
        return next((len(state) for state in states_of(self).values()), -1)

    def bytes_held(self) -> int:
        """Bytes of the states."""
        return sum(state.nbytes for state in states_of(self).values())

    def move(self, steps: Tensor) -> None:
        """Nothing: a state has no positions."""

    def release(self) -> None:
        """Give the states back: the next text has another number of rows."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def state(self) -> dict[str, Tensor]:
        """The tensors that a saved cache has of it."""
        return states_of(self)

    def restore(self, buffers: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` of another layer of this kind gave."""
        restore_states(self, buffers)

    def take(self, rows: Tensor) -> None:
        """Rows of the batch are taken again, left out or reordered."""
        self.reorder_cache(rows)
