"""Traits: what a model has that its cache must know: states beside keys, learned tokens in front, a prefix, a bias by order.

A layer of linear attention (Mamba, gated delta nets, short convolutions) sums the whole text up in a state of fixed size. It
evicts nothing and needs no positions, so a policy bounds the layers of full attention, and the states are kept beside them. A
state cannot leave a token out that it has taken in: padding behind a token of a row would change it, and nothing can be taken
back. Other layers keep nothing at all: those of a feed-forward block alone, and those that attend to the keys of another layer.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from sinklab.attention.anatomy import EMPTY_KINDS, HYBRID, RECURRENT_KINDS, layers_without_attention
from sinklab.attention.host_arguments import cache_argument
from sinklab.attention.modules import held, input_device
from sinklab.errors import ConfigurationError

__all__ = [
    "columns_of",
    "continues_in_chunks",
    "fingerprint",
    "fresh_cache",
    "has_ordered_bias",
    "has_states",
    "hybrid_layers",
    "keyless_layers",
    "restore_states",
    "states_of",
    "tokens_in_front",
    "tokens_of_prefix",
]

_MARGIN, _ROUNDING = 0.1, 1e-4
"""Largest distance from the state of a text read at once: over that of a state that has seen the second half of it alone, and
over the state itself, for those that remember no more than that half. One that was not gone on from is as far as the former."""

_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Fields of a config that do not change what a model computes, or that the tensors tell better."""

_SAMPLED = 8
"""Tensors of a model that its fingerprint reads: enough to tell checkpoints of one training apart, in milliseconds."""

_continues: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def fingerprint(model: PreTrainedModel, *, rounded: bool = False) -> str:
    """16 hexadecimal digits of a hash over config and some weights (``rounded`` to bfloat16 first): whose a saved cache is.

    Eight tensors, spread over the model, are read at both ends: another checkpoint of the same architecture differs, and so
    does another dtype.
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


# --- tokens that are not of the text, or seen both ways -------------------------------------------------------------------


def tokens_in_front(model: PreTrainedModel) -> int:
    """Learned tokens that a model puts in front of every text, which its cache counts and its arguments do not."""
    return int(getattr(model, "tokens_in_front", 0))  # SinkLM


def tokens_of_prefix(model: PreTrainedModel) -> int:
    """How many of the first tokens of a text see each other both ways."""
    return int(getattr(model.config.get_text_config(), "prefix_length", 0) or 0)  # SinkLM


def columns_of(valid: Tensor, count: int) -> int:
    """Columns from the first one on in which every row of a boolean ``(rows, length)`` has ``count`` tokens; all must have
    them."""
    totals = valid.long().cumsum(dim=1)
    if (fewest := int(totals[:, -1].min())) < count:
        raise ConfigurationError(
            f"the first {count} tokens of a text see each other both ways, and the cache is given {fewest} to begin with; give "
            f"{count} or more at once"
        )
    return int((totals < count).sum(dim=1).max()) + 1


def has_ordered_bias(model: PreTrainedModel) -> bool:
    """Whether the scores of a model depend on the order of the keys in its cache."""
    if getattr(getattr(model, "position", None), "biased", False):  # SinkLM
        return True
    config = model.config.get_text_config()
    # Nothing in a config says so in general: these are the families of transformers that build ALiBi from columns.
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


# --- states ---------------------------------------------------------------------------------------------------------------


def keyless_layers(model: PreTrainedModel) -> dict[int, int]:
    """Index of every layer that writes no keys of its own, as the config says, and how many states it keeps, 0 if none."""
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
    return {
        f"{kind}_states.{index}": state
        for kind in ("conv", "recurrent")
        for index, state in getattr(layer, f"{kind}_states", {}).items()
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
