"""What one call of the attention function is: its tensors, its rule of visibility, its place; shapes documented once, here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from sinklab.attention.operation import Operation, repeat_groups
from sinklab.attention.visibility import Visibility

Part: TypeAlias = Literal["", "encoder", "decoder", "cross-attention", "depth"]
"""Which attention of an encoder–decoder: of the source, of the target, of the target on the source; of any model that over its
own earlier blocks; empty elsewhere."""

PARTS: tuple[Part, ...] = ("encoder", "decoder", "cross-attention")
"""The attention of an encoder–decoder, in the order in which it is reported: always apart, since their keys differ."""

SCORES_AT_ONCE = 2**22
"""Scores of one block of queries, 16 MiB in float32; a handful of temporaries of this size live at the same time."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Which attention module (or layer) of the model.

    Args:
        module: qualified module name, the identity (``model.layers.3.self_attn``).
        layer: running number of the module among its kind, in the order of the first calls; 0-based, a convenience.
        kind: ``"self"`` or ``"cross"`` attention.
        output_projection: qualified name of the map from the concatenated heads to the hidden state, if one was found.
        gated: whether the model itself multiplies the heads by something in front of that map (Qwen3-Next).
        part: of an encoder–decoder, which one; the decoder's layers are counted behind the encoder's, those of cross-attention
            by themselves.
    """

    module: str
    layer: int
    kind: str = "self"
    output_projection: str | None = None
    gated: bool = False
    part: Part = ""


def run_name(module: str, run: int) -> str:
    """What a run of a module is called, counted from 0 in one forward of the model: ``module``, ``module#1``, ``module#2`` …

    A module whose own forward runs several times (ALBERT's one shared layer) stands for several layers.
    """
    return f"{module}#{run}" if run > 0 else module


def run_of(name: str) -> tuple[str, int]:
    """Module and number of the run from what :func:`run_name` gives."""
    module, _, run = name.partition("#")
    return module, int(run) if run.isdecimal() else 0


@dataclasses.dataclass
class AttentionCall:
    """One call of the attention function.

    ``scores = softcap(queries · keysᵀ · scaling) + bias``; the operation turns scores, ``visible`` and ``sink_scores`` into
    weights; ``outputs = (weights · values + null mass · null_value + output_bias) · gain``.

    Attributes:
        site: the module that called.
        queries: ``(batch, num_heads, q_len, head_dim)``, after rotary embedding and the operation's feature map.
        keys: ``(batch, num_kv_heads, kv_len, head_dim)``, likewise; never repeated for grouped queries.
        values: ``(batch, num_kv_heads, kv_len, value_dim)``; ``value_dim`` differs from ``head_dim`` under MLA.
        scaling: factor on ``queries · keysᵀ``.
        visible: the rule of visibility over tensor indices.
        operation: how scores become weights.
        softcap: ``cap · tanh(score / cap)`` is applied to the scaled scores before bias and mask, or ``None``.
        bias: additive scores ``(batch or 1, num_heads or 1, q_len, kv_len)``, or ``None``.
        sink_scores: null scores ``(batch or 1, num_heads, q_len or 1)``: a learned sink logit, a key bias; or ``None``.
        null_value: ``(num_heads or 1, value_dim)`` that the null mass carries to the output, or ``None`` for 0.
        output_bias: ``(num_heads or 1, value_dim)`` added to every head output, or ``None``.
        gain: factor on the head outputs ``(batch, num_heads, q_len, 1 or value_dim)`` (output gates), or ``None``.
        head_outputs: what the model's own function returned, ``(batch, q_len, num_heads, value_dim)``.
        log_sum_exp: float32 ``(batch, num_heads, q_len)``, natural logarithm, over visible keys and without the sink logit,
            when the model's own kernel computed it; ``None`` otherwise.
        query_positions, key_positions: int64 ``(batch, q_len)`` and ``(batch, kv_len)``: 0-based position inside the document;
            -1 marks padding, which is not measured, and keys that stand for several tokens, which are of their row's document.
        query_documents, key_documents: int64, same shapes: running number of the document inside its row (packed batches);
            -1 marks padding.
        key_tokens: int64 ``(batch, kv_len)``: id of the token of each key, of a model that was given ``input_ids`` and no
            cached keys; in cross-attention those of the source that its encoder was given in the same forward; -1 where there
            is none (padding, learned tokens in front). ``None`` elsewhere.
        front: learned tokens that the model puts in front of every text, where they have the first positions and no id.
        cached_keys: how many of the keys were there before this call; 0 for a fresh sequence.
        residual: hidden states that entered the enclosing layer ``(batch, q_len, hidden_size)``; only when a probe needs them,
            and not of several residual streams.
        projection: weight of the output projection ``(hidden_size, num_heads * value_dim)``; only when a probe needs it.
        heads: numbers that its heads have in the module, where it was cut down to some; ``None`` for all of them in order.
        subtracted: factor λ with which the module subtracts the second half of the heads from the first behind the call
            (differential attention); ``None`` where it does not.
        has_scores: whether :meth:`scores` are scores; false where only weights are known (:mod:`sinklab.attention.returned`).
    """

    site: Site
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    visible: Visibility
    operation: Operation
    query_positions: Tensor
    key_positions: Tensor
    query_documents: Tensor
    key_documents: Tensor
    softcap: float | None = None
    bias: Tensor | None = None
    sink_scores: Tensor | None = None
    null_value: Tensor | None = None
    output_bias: Tensor | None = None
    gain: Tensor | None = None
    head_outputs: Tensor | None = None
    log_sum_exp: Tensor | None = None
    key_tokens: Tensor | None = None
    front: int = 0
    cached_keys: int = 0
    residual: Tensor | None = None
    projection: Tensor | None = None
    heads: tuple[int, ...] | None = None
    subtracted: float | None = None
    has_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.gain is not None:  # an operation may give one factor for all queries, heads or samples
            size = self.gain.shape[-1] if self.gain.ndim else 1
            self.gain = self.gain.to(self.queries.device).expand(*self.queries.shape[:3], size)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.queries.shape[1]

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """Number in the module of each head of this call."""
        return tuple(range(self.num_heads)) if self.heads is None else self.heads

    @property
    def groups(self) -> int:
        """Query heads that share one key-value head."""
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def q_len(self) -> int:
        """Number of queries of this call."""
        return self.queries.shape[2]

    @property
    def kv_len(self) -> int:
        """Number of keys of this call."""
        return self.keys.shape[2]

    @functools.cached_property
    def counted(self) -> Tensor:
        """Boolean ``(batch, q_len)``: the queries that are tokens and not padding."""
        return self.query_positions >= 0

    @functools.cached_property
    def all_counted(self) -> bool:
        """Whether no query is padding; waits for the device when first asked."""
        return bool(self.counted.all())

    def blocks(self, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Ranges of queries, ``start`` and ``stop``, whose scores over all samples and heads are few enough to be held at once.

        Args:
            multiple: of how many queries a block is, but for the last one.
        """
        row = self.queries.shape[0] * self.num_heads * self.kv_len
        # A GPU is not kept busy by what a processor's cache holds: its launches would take longer than the work.
        scores = SCORES_AT_ONCE if self.queries.device.type == "cpu" else 4 * SCORES_AT_ONCE
        rows = max(1, scores // max(1, row) // multiple) * multiple
        for start in range(0, self.q_len, rows):
            yield start, min(start + rows, self.q_len)

    def scores(self, query_start: int, query_stop: int) -> Tensor:
        """Scores of a block of queries against every key, float32 (or float64) ``(batch, num_heads, block, kv_len)``.

        Scaled, capped and biased; neither masked nor normalised.
        """
        dtype = torch.promote_types(self.queries.dtype, torch.float32)
        queries = self.queries[:, :, query_start:query_stop].to(dtype)
        keys = self.keys.to(dtype)
        if self.groups > 1:
            batch, num_kv_heads, kv_len, head_dim = keys.shape
            grouped = queries.reshape(batch, num_kv_heads, -1, head_dim)
            scores = torch.matmul(grouped, keys.transpose(2, 3)).view(*queries.shape[:3], kv_len)
        else:
            scores = torch.matmul(queries, keys.transpose(2, 3))
        scores = scores * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.bias is not None:
            scores = scores + self.bias[:, :, query_start:query_stop].to(dtype)
        return scores

    def weights(self, query_start: int, query_stop: int, scores: Tensor | None = None) -> Tensor:
        """Weights of a block of queries, float32 (or float64) ``(batch, num_heads, block, kv_len)``: the plain definition.

        Of a signed operation the absolute values: how much of a value is taken, with either sign.

        Args:
            scores: those of the block, when the caller has them already.
        """
        weights = self.signed_weights(query_start, query_stop, scores)
        return weights.abs() if self.operation.signed else weights

    def signed_weights(self, query_start: int, query_stop: int, scores: Tensor | None = None) -> Tensor:
        """The same as :meth:`weights` with the signs that the operation gives them: the factors on the values."""
        scores = self.scores(query_start, query_stop) if scores is None else scores
        visible = self.visible.block(query_start, query_stop, 0, self.kv_len)
        return self.operation.weights(scores, visible, self.sink_rows(query_start, query_stop))

    def null_mass(self, query_start: int, query_stop: int, scores: Tensor | None = None) -> Tensor:
        """Null mass of a block of queries, ``(batch, num_heads, block)``; 0 where the operation knows of none."""
        scores = self.scores(query_start, query_stop) if scores is None else scores
        visible = self.visible.block(query_start, query_stop, 0, self.kv_len)
        mass = self.operation.null_mass(scores, visible, self.sink_rows(query_start, query_stop))
        return scores.new_zeros(scores.shape[:3]) if mass is None else mass

    def outputs(self, query_start: int, query_stop: int) -> Tensor:
        """Head outputs of a block of queries, float32 (or float64) ``(batch, num_heads, block, value_dim)``, recomputed."""
        scores = self.scores(query_start, query_stop)
        weights = self.signed_weights(query_start, query_stop, scores)
        mass = None if self.null_value is None else self.null_mass(query_start, query_stop, scores)
        return self.combine(weights, mass, repeat_groups(self.values.to(weights.dtype), self.groups), query_start, query_stop)

    def combine(self, weights: Tensor, null_mass: Tensor | None, values: Tensor, query_start: int, query_stop: int) -> Tensor:
        """Head outputs ``(batch, num_heads, block, value_dim)`` of a block of queries from its weights.

        Args:
            weights: signed, ``(batch, num_heads, block, kv_len)``.
            null_mass: ``(batch, num_heads, block)``; needed only if there is a null value.
            values: one for each query head, ``(batch, num_heads, kv_len, value_dim)``, in the dtype of the weights.
        """
        outputs = torch.matmul(weights, values)
        if self.null_value is not None and null_mass is not None:
            outputs = outputs + null_mass[..., None] * self.null_value[:, None].to(outputs.dtype)
        if self.output_bias is not None:
            outputs = outputs + self.output_bias[:, None].to(outputs.dtype)
        return outputs if self.gain is None else outputs * self.gain[:, :, query_start:query_stop].to(outputs.dtype)

    def sink_rows(self, query_start: int, query_stop: int) -> Tensor | None:
        """Null scores of a block of queries, ``(batch or 1, num_heads, block or 1)``, or ``None``."""
        scores = self.sink_scores
        return scores[:, :, query_start:query_stop] if scores is not None and scores.shape[2] > 1 else scores


@dataclasses.dataclass
class Statistics:
    """What a call is reduced to: O(q_len + kv_len) numbers per head; fields that no probe needs are ``None``.

    Only counted queries enter ``column_*``. Fields with a row per query are 0 in the rows of queries that are
    not counted; a counted query that sees no key has mass 0 and ``log_sum_exp`` minus infinity. Float64 calls give float64.

    Attributes:
        column_sum: float32 ``(batch, num_heads, kv_len)``: sum over counted queries of the weight on the key.
        column_share: the same with every row of weights divided by its sum (the proxy of Gu et al. 2024, arXiv 2410.10781:
            of absolute values, denominators + 1e-8); the same tensor as ``column_sum`` for normalised operations.
        column_count: float32 ``(batch or 1, num_heads or 1, kv_len)``: counted queries that see the key.
        row_mass: float32 ``(batch, num_heads, q_len)``: weight on all keys together.
        null_mass: same shape: what goes to no key; with ``row_mass`` it makes one. 0 for plain softmax, ``None`` for operations
            that are not normalised.
        log_sum_exp: same shape: natural logarithm of the sum of exp(score) over visible keys, without the sink logit; ``None``
            for operations that are not a softmax.
        row_entropy: same shape: ``-sum w ln w`` of the weights divided by their sum, in nats.
        row_max: same shape: the largest weight.
        score_mean: same shape: mean score over visible keys.
    """

    column_sum: Tensor | None = None
    column_share: Tensor | None = None
    column_count: Tensor | None = None
    row_mass: Tensor | None = None
    null_mass: Tensor | None = None
    log_sum_exp: Tensor | None = None
    row_entropy: Tensor | None = None
    row_max: Tensor | None = None
    score_mean: Tensor | None = None


@dataclasses.dataclass
class LayerOutput:
    """Hidden states at one place of the residual stream.

    Attributes:
        site: the module whose output it is; layer ``-1`` is what enters the first layer (the embeddings).
        kind: ``"layer"`` for the output of a whole layer, ``"attention"`` for that of an attention module, ``"heads"`` for the
            concatenated heads of one behind a gate of the model's own.
        hidden_states: ``(batch, seq_len, hidden_size)``; of a model with several residual streams one beside the other.
        positions, documents: int64 ``(batch, seq_len)``, as in :class:`AttentionCall`; -1 marks padding.
    """

    site: Site
    kind: str
    hidden_states: Tensor
    positions: Tensor
    documents: Tensor
