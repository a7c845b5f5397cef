"""The blocks path: a block of rows at a time against the keys that they see, and once more in the backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sinklab.attention.operation import Inputs, Operation, repeat_groups
from sinklab.attention.paths.row_blocks import kernel_key, row_attention

_BLOCK_SCORES = 2**21
"""Scores of a block, over all samples and heads, when it goes through autograd."""


def obstacle(operation: Operation, inputs: Inputs) -> str | None:
    """Why this path cannot serve the call, or ``None``."""
    dtypes = {inputs.queries.dtype, inputs.keys.dtype, inputs.values.dtype}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64, torch.bfloat16}:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        return f"queries, keys and values are {names}; it takes float32, float64 or bfloat16, one for all"
    if type(operation).head_outputs is not Operation.head_outputs:
        return "the operation computes its head outputs in a way of its own"
    if not inputs.q_len or not inputs.kv_len:
        return "there is no query or no key"
    return inputs.plain_scores()


def worthwhile(operation: Operation, inputs: Inputs) -> bool:
    """Whether it beats the plain path, as measured on one core with heads of size 64, in eager mode and compiled.

    A CPU gains as soon as the score matrix leaves its cache; on other devices the blocks are too small to keep them busy.
    """
    queries, length = inputs.queries, min(inputs.q_len, inputs.kv_len)
    if queries.device.type != "cpu":
        return False
    if kernel_key(operation) is None:
        return length >= 256 and queries.shape[0] * queries.shape[1] * inputs.q_len * inputs.kv_len >= 2**23
    return length >= 256


def head_outputs(operation: Operation, inputs: Inputs) -> Tensor:
    """Head outputs ``(batch, num_heads, q_len, value_dim)``; no tensor has the size of the score matrix.

    With a row kernel (:meth:`Operation.row_kernel`) only queries, keys and values are kept for the backward, and there is
    no second derivative. Outputs and gradients agree with the plain path to 1e-5 in float32; in bfloat16 their errors are at
    most twice those of the plain path. Without one, blocks are left to autograd.
    """
    queries, keys = operation.features(inputs.queries, inputs.keys, inputs.state)
    null_scores = operation.null_scores(queries, inputs.scaling, inputs.state)
    # Under autocast a feature map may have left the common dtype.
    queries, keys = queries.to(inputs.values.dtype), keys.to(inputs.values.dtype)
    if null_scores is not None:
        null_scores = null_scores.expand(queries.shape[:3])
    key = kernel_key(operation)
    visible = None if inputs.visible is None else inputs.visible[(None,) * (4 - inputs.visible.ndim)]
    null_mass: Tensor | None = None
    if key is None:
        needs_mass = operation.null_value(inputs.state) is not None
        outputs, null_mass = _through_autograd(operation, queries, keys, inputs, visible, null_scores, needs_mass)
    else:
        outputs, mass = row_attention(queries, keys, inputs.values, visible, null_scores, inputs.causal, inputs.scaling, key)
        null_mass = None if null_scores is None else mass
    return operation.finish(outputs, null_mass, inputs.state)


def _through_autograd(
    operation: Operation,
    queries: Tensor,
    keys: Tensor,
    inputs: Inputs,
    visible: Tensor | None,
    null_scores: Tensor | None,
    needs_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """Weights times values and, if needed, the null mass, in blocks that the backward computes again."""
    batch, num_heads, q_len, _ = queries.shape
    kv_len, groups = keys.shape[2], num_heads // keys.shape[1]

    def block(
        queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, null_scores: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        keys, values = repeat_groups(keys, groups), repeat_groups(values, groups)
        scores = torch.matmul(queries, keys.transpose(2, 3)) * inputs.scaling
        weights = operation.weights(scores, visible, null_scores)
        mass = operation.null_mass(scores, visible, null_scores) if needs_mass else None
        return torch.matmul(weights.to(values.dtype), values), mass

    rows = max(1, _BLOCK_SCORES // (batch * num_heads * kv_len))
    outputs, masses = [], []
    for start in range(0, q_len, rows):
        stop = min(start + rows, q_len)
        last = min(stop, kv_len) if inputs.causal else kv_len
        mask = visible
        if inputs.causal:
            mask = torch.ones(stop - start, last, dtype=torch.bool, device=queries.device).tril(start)
        elif visible is not None and visible.shape[2] > 1:
            mask = visible[:, :, start:stop]
        output, mass = checkpoint(
            block, queries[:, :, start:stop], keys[:, :, :last], inputs.values[:, :, :last], mask,
            None if null_scores is None else null_scores[:, :, start:stop], use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        outputs.append(output)
        masses.append(mass)
    return torch.cat(outputs, dim=2), torch.cat(masses, dim=2) if needs_mass else None
