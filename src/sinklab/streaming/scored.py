"""Scored: the cache of policies that look at what was computed; every head keeps tokens of its own.

Who leaves depends on the weights of all tokens before. A prompt is read in chunks nevertheless, if scores are sums of weights
(:meth:`~sinklab.policies.base.ScoredPolicy.growth`): what takes time is done for a chunk at once, the decisions one token
after the other; see :mod:`sinklab.streaming.eviction`. Otherwise tokens are processed one by one.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import Anatomy
from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.operation import Operation, state_of
from sinklab.attention.placement import input_device
from sinklab.errors import UnsupportedModelError
from sinklab.policies.base import ScoredPolicy
from sinklab.streaming.attending import AttendingCache, require_unordered
from sinklab.streaming.decoding import Tokenizer
from sinklab.streaming.eviction import Attention
from sinklab.streaming.host import Arguments, split
from sinklab.streaming.scored_layer import ScoredLayer
from sinklab.streaming.scored_table import ScoredTable

__all__ = ["ScoredCache"]


class ScoredCache(AttendingCache):
    """The cache of a :class:`~sinklab.policies.base.ScoredPolicy`, for one model; pass it as ``past_key_values``.

    Attention weights, where a policy needs them, are computed from what the model's own attention
    function is given, which therefore has to be reached through the attention interface of transformers.

    Arguments and errors are those of :class:`PolicyCache`. Tokens are processed one by one, whatever ``chunk``, where rows have
    padding or hold different numbers of tokens, in a model in training mode, and under another observer of its attention.

    Raises:
        UnsupportedModelError: also a model whose bias depends on the order of its keys, and one whose weights are needed and
            cannot be seen.
    """

    takes: ClassVar[type] = ScoredPolicy
    policy: ScoredPolicy
    table: ScoredTable

    def __init__(
        self,
        policy: ScoredPolicy,
        model: PreTrainedModel | None = None,
        *,
        chunk: int = 128,
        rebase_at: int | None = None,
    ) -> None:
        if rebase_at is not None and isinstance(policy, ScoredPolicy):
            chunk = max(1, min(chunk, rebase_at - policy.reach))
        super().__init__(policy, model, chunk=chunk, rebase_at=rebase_at)

    def _fit(self, model: PreTrainedModel) -> None:
        require_unordered(self.policy, model)
        rotations = self._fit_positions(model)
        self._anatomy = Anatomy(model)
        if self.policy.needs_weights and not self._anatomy.attention:
            raise UnsupportedModelError(
                f"{type(model).__name__} computes attention in its own code, where its weights cannot be seen; policy "
                f"{self.policy.name!r} needs them"
            )
        self._table = table = ScoredTable(self.policy, input_device(model), model)
        self.layers = [ScoredLayer(table, rotation) for rotation in rotations.layers.values()]

    @property
    def _places_are_ranks(self) -> bool:
        return self.policy.positions == "in_cache"

    def open(self, module: nn.Module, arguments: Arguments) -> Arguments:
        if arguments.get("output_attentions"):  # of a chunk there are none to be had
            split(arguments, 1, chunk=self.chunk)
        arguments = super().open(module, arguments)
        self._stop_looking()
        if self.policy.needs_weights or (self.table.step is not None and self.table.step.length > 1):
            self._look()
        return arguments

    def _room(self, mask: Tensor | None, batch: int, length: int) -> int:
        return super()._room(mask, batch, length) if length > 1 and self._takes_chunks() else 1

    def _takes_chunks(self) -> bool:
        """Whether attention of a chunk can be computed here, and gives what its tokens give one by one."""
        model, anatomy, policy = self.model, self._anatomy, self.policy
        assert model is not None
        assert anatomy is not None
        if type(policy).growth is ScoredPolicy.growth or model.training or not anatomy.attention:
            return False
        if any(
            observer is not self and any(map(observer.owns, anatomy.attention.values())) for observer in seam.active_observers()
        ):
            return False
        function = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)
        kinds = {type(seam.operation_of(module, function)) for module in anatomy.attention.values()}
        # Maps of rotated keys are no rotated maps.
        return all(
            kind.head_outputs is Operation.head_outputs and (kind.features is Operation.features or not self.table.in_cache)
            for kind in kinds
        )

    def on_attention(
        self,
        native: seam.Native,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object = None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:
        """Run the model's own function, and hand the weights of the one query to the layer; of a chunk the layer attends."""
        layer, self.table.waiting = self.table.waiting, None
        if layer is None or key.shape[1] != layer.tokens.shape[1]:
            how = "attends twice to what it keeps" if layer is None else "repeats the heads of its keys in its own code"
            raise UnsupportedModelError(
                f"{type(module).__name__} {how}; policy {self.policy.name!r} needs one attention to the keys of each layer as "
                "they are kept. One that goes by positions does not, such as sink_window"
            )
        unknown = host_arguments.unknown_keywords(kwargs)
        if unknown:
            raise UnsupportedModelError(
                f"{type(module).__name__} was given the keyword {', '.join(unknown)}, which may change its attention "
                f"weights in a way that sinklab does not know; policy {self.policy.name!r} needs them"
            )
        if query.shape[2] > 1:
            with torch.autocast(query.device.type, enabled=False):
                return layer.attend(_attention(native, module, query, key, kwargs)), None
        result = native(module, query, key, value, mask, **kwargs)
        with torch.autocast(query.device.type, enabled=False):
            layer.rescore(_weights(native, module, query, key, value, mask, kwargs))
        return result

    # --- what it holds -------------------------------------------------------------------------------------------------------

    def describe(self, tokenizer: Tokenizer | None = None) -> pd.DataFrame:
        """The tokens held, one a line: ``layer``, ``row``, ``head`` (of keys and values), ``slot``, ``token``, ``score``."""
        lines = []
        for index, layer in enumerate(self.layers):
            if layer.batch_size < 0:
                continue
            for row, head, slot in (layer.tokens >= 0).nonzero().tolist():
                token, score = int(layer.tokens[row, head, slot]), float(layer.scores[row, head, slot])
                lines.append((index, row, head, slot, token, score))
        return pd.DataFrame(lines, columns=["layer", "row", "head", "slot", "token", "score"])


def _weights(
    native: seam.Native,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    kwargs: host_arguments.Keywords,
) -> Tensor:
    """Weights of the last query, summed over the query heads of a group, ``(batch, num_kv_heads, kv_len)``."""
    name = getattr(native, "__name__", "")
    host_arguments.require_readable(mask, name, module)
    q_len, kv_len = query.shape[2], key.shape[2]
    visible, bias = host_arguments.read_mask(mask, kwargs, module, name, q_len, kv_len, query.device)
    operation = seam.operation_of(module, native)
    state = state_of(module, operation, kwargs.get("layer_input"))
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    query, key = operation.features(query, key, state)
    sinks = host_arguments.read_sink_scores(kwargs)
    nowhere = query.new_zeros(len(query), kv_len, dtype=torch.long)
    call = AttentionCall(
        site=Site("", 0),
        queries=query,
        keys=key,
        values=value,
        scaling=scaling,
        visible=visible,
        operation=operation,
        query_positions=nowhere[:, :q_len],
        key_positions=nowhere,
        query_documents=nowhere[:, :q_len],
        key_documents=nowhere,
        softcap=kwargs.get("softcap"),
        bias=bias,
        sink_scores=operation.null_scores(query, scaling, state) if sinks is None else sinks,
    )
    weights = call.weights(q_len - 1, q_len)[:, :, 0]
    return weights.unflatten(1, (key.shape[1], -1)).sum(dim=2)


def _attention(
    native: seam.Native, module: nn.Module, query: Tensor, key: Tensor, kwargs: host_arguments.Keywords
) -> Attention:
    """How this call makes head outputs of scores, for a chunk."""
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a bias to its scores; a cache of scores reads its prompts with chunk=1 only"
        )
    operation = seam.operation_of(module, native)
    state = state_of(module, operation, kwargs.get("layer_input"))
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    heads = key.shape[1], query.shape[1] // key.shape[1]
    null = host_arguments.read_sink_scores(kwargs)
    if null is None:
        null = operation.null_scores(operation.features(query, key, state)[0], scaling, state)
    return Attention(
        queries=query.unflatten(1, heads),
        null_scores=None if null is None else null.unflatten(1, heads),
        operation=operation,
        state=state,
        scaling=scaling,
        softcap=kwargs.get("softcap"),
        dtype=query.dtype,
    )
