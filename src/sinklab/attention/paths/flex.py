"""The flex path: FlexAttention with the logarithm of a similarity in the place of the score; any non-negative similarity.

FlexAttention is a softmax. Given ``log φ(score)`` it returns ``Σ φ · values / Σ φ``, and with its log-sum-exp, ``log Σ φ``,
also what is not divided by the row sum, or shared with a null score. That log-sum-exp carries gradients, so all of this is
ordinary autograd. An operation other than softmax is served if it has the method

    log_similarity(scores, counts)    log φ, elementwise; weights are φ, or φ / Σ φ where ``normalized``

with ``counts``, broadcastable to ``scores``, the number of keys that the query sees, at least 1. Where φ is 0 its logarithm is
minus infinity, and must have a finite gradient (``torch.where`` around a clamped argument).

On a CPU FlexAttention has no backward and no fused kernel that returns a log-sum-exp: there the path serves to check numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention

from sinklab.attention.operation import Inputs, Operation

_BLOCK = 128
"""Queries, and keys, of a block that FlexAttention skips or computes as a whole."""

_MOST_KERNELS = 256
"""Of a process; torch's own limit for all recompilations of one function, after which something is wrong."""


def obstacle(operation: Operation, inputs: Inputs) -> str | None:
    """Why FlexAttention cannot serve the call, or ``None``."""
    if not operation.is_softmax and type(operation).log_similarity is Operation.log_similarity:
        return "it does not give the logarithm of its similarity (log_similarity)"
    device, dtype = inputs.queries.device.type, inputs.queries.dtype
    if device == "cuda":
        if dtype == torch.float64:
            return "the CUDA kernel does not take float64"
    elif device != "cpu":
        return f"it has not been tried on device {device!r}"
    elif torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (inputs.queries, inputs.keys, inputs.values, *inputs.state.values())
    ):
        return "FlexAttention has no backward on a CPU"
    return inputs.plain_scores()


def worthwhile(operation: Operation, inputs: Inputs) -> bool:
    """Whether it beats the plain path: on CUDA, from one block of keys on."""
    return inputs.queries.device.type == "cuda" and inputs.kv_len >= 128


def head_outputs(operation: Operation, inputs: Inputs) -> Tensor:
    """Head outputs ``(batch, num_heads, q_len, value_dim)``; on CUDA in memory O(q_len + kv_len)."""
    queries, keys = operation.features(inputs.queries, inputs.keys, inputs.state)
    null_scores = operation.null_scores(queries, inputs.scaling, inputs.state)
    visible = inputs.visible
    if visible is not None:
        visible = visible[(None,) * (4 - visible.ndim)].expand(-1, -1, inputs.q_len, inputs.kv_len)
    # Under autocast a feature map may have left the common dtype.
    queries, keys, values = queries.to(inputs.values.dtype), keys.to(inputs.values.dtype), inputs.values
    if not torch.is_grad_enabled():  # on a CPU it refuses parameters, gradients or not
        queries, keys, values = queries.detach(), keys.detach(), values.detach()
    outputs, statistics = _kernel(queries.device)(
        queries, keys, values, score_mod=None if operation.is_softmax else _score_rule(operation, inputs, visible),
        block_mask=_mask(inputs, visible), scale=inputs.scaling, enable_gqa=queries.shape[1] != keys.shape[1],
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    log_sum = statistics.lse
    assert log_sum is not None  # it was asked for
    # A row without anything to attend to is 0, whatever the kernel makes of 0 / 0.
    outputs = outputs.masked_fill(log_sum.eq(float("-inf"))[..., None], 0.0)
    null_mass = None
    if null_scores is not None:
        null_scores = null_scores.to(log_sum.dtype)
        outputs = (outputs * torch.sigmoid(log_sum - null_scores)[..., None]).to(inputs.values.dtype)
        null_mass = torch.sigmoid(null_scores - log_sum)
    elif not operation.normalized:
        outputs = (outputs * torch.exp(log_sum)[..., None]).to(inputs.values.dtype)
    return operation.finish(outputs, null_mass, inputs.state)


def _score_rule(operation: Operation, inputs: Inputs, visible: Tensor | None) -> Callable[..., Tensor]:
    """``log φ`` as a score modification."""
    kv_len, causal = inputs.kv_len, inputs.causal
    seen = None if visible is None else visible.sum(dim=-1).expand(*inputs.queries.shape[:3])

    def rule(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if seen is not None:
            count = seen[sample, head, query]
        else:
            count = (query + 1).clamp(max=kv_len) if causal else torch.full_like(query, kv_len)
        similarity = operation.log_similarity(score, count.clamp(min=1).to(score.dtype))
        assert similarity is not None  # else there was an obstacle
        return similarity

    return rule


def _mask(inputs: Inputs, visible: Tensor | None) -> BlockMask | None:
    """What FlexAttention may skip and must hide."""
    size, device = (inputs.q_len, inputs.kv_len), inputs.queries.device
    if visible is None:
        if not inputs.causal:
            return None
        if torch.compiler.is_compiling():  # where the mode cannot be asked for, and nothing is kept from call to call
            return _causal_mask(*size, device)
        return _known_causal_mask(*size, device, torch.is_inference_mode_enabled())
    everywhere = visible.expand(*inputs.queries.shape[:2], -1, -1)

    def rule(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return everywhere[sample, head, query, key]

    # What is the same for all samples or heads is looked through once.
    samples, heads = (full if given > 1 else None for full, given in zip(everywhere.shape[:2], visible.shape[:2], strict=True))
    return create_block_mask(rule, samples, heads, *size, device=device)


def _causal_mask(q_len: int, kv_len: int, device: torch.device) -> BlockMask:
    """The causal rule by blocks; ``create_block_mask`` would look at every pair of query and key, ``O(q_len · kv_len)``."""
    row = torch.arange(-(-q_len // _BLOCK), device=device)[:, None]
    column = torch.arange(-(-kv_len // _BLOCK), device=device)
    # Blocks that end beyond the last query or key are not whole.
    whole = (column < row) & ((row + 1) * _BLOCK <= q_len) & ((column + 1) * _BLOCK <= kv_len)
    partly = (column <= row) & ~whole

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks of every row, and which ones, first of all."""
        which = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(dim=-1, dtype=torch.int32)[None, None], which.to(torch.int32)[None, None]

    return BlockMask.from_kv_blocks(
        *listed(partly),
        *listed(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=lambda sample, head, query, key: query >= key,
        seq_lengths=(q_len, kv_len),
    )


@functools.lru_cache(maxsize=8)
def _known_causal_mask(q_len: int, kv_len: int, device: torch.device, inference: bool) -> BlockMask:
    """Every layer asks for the same one. One made in inference mode cannot be used in training: the mode is in the key."""
    return _causal_mask(q_len, kv_len, device)


def _kernel(device: torch.device) -> Callable[..., tuple[Tensor, AuxOutput]]:
    if torch.compiler.is_compiling():
        return flex_attention  # a part of the graph of the compiled model
    # A setting of the operation is a number in the rule. Met with a second value, it would become a symbol, which rules of
    # FlexAttention cannot hold. So there is a kernel for every setting, mask, dtype and gradient mode of a process, and by
    # default torch refuses the ninth.
    settings = torch._dynamo.config.patch(specialize_float=True, recompile_limit=_MOST_KERNELS)
    return settings(flex_attention if device.type == "cpu" else _as_compiled)


def _as_compiled(*tensors: Tensor, **settings: Any) -> tuple[Tensor, AuxOutput]:
    """The kernel, which is there in compiled form alone, also where a model that is measured runs as written."""
    with torch.compiler.set_stance("default"):
        return _compiled()(*tensors, **settings)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, AuxOutput]]:
    return torch.compile(flex_attention, fullgraph=True)  # too many recompilations raise; they would materialise the scores
