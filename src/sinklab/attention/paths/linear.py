"""The linear path: feature kernels in chunks, the keys before a chunk summed up as one ``head_dim × value_dim`` state.

Weights that are products need no matrix of weights (Katharopoulos et al. 2020, arXiv 2006.16236): with ``S`` the sum of
``φ(k) ⊗ v`` over the keys before a chunk,

    Σ_j (φ(q) · φ(k_j)) v_j  =  φ(q) · S  +  the same sum over the keys of the chunk, in its quadratic form

and likewise for the row sums, with 1 for ``v``. All chunks are formed at once; time is ``O(q_len · head_dim · value_dim)``,
memory ``O(q_len · head_dim)``, gradients are those of autograd.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.operation import Inputs, Operation


@dataclass(frozen=True, kw_only=True)
class FeatureKernel(Operation):
    """``weights = φ(queries) · φ(keys) · scaling`` over visible keys, as they are or divided by what their row sums to.

    Gu et al. 2024 (arXiv 2410.10781), general form of attention; ``φ`` acts after rotary embedding. Weights are linear in the
    scores, on which :mod:`sinklab.attention.paths.linear` builds. A subclass overrides :meth:`features` alone.

    Args:
        normalize: divide each row by its sum; by ``max(|sum|, 1)`` where scores may be negative, since their sum may be 0.
    """

    normalize: bool = False

    @property
    def normalized(self) -> bool:  # type: ignore[override]
        """Whether rows sum to one: non-negative scores divided by their sum."""
        return self.normalize and not self.signed

    def divisor(self, row_sums: Tensor) -> Tensor:
        """What ``normalize`` divides a row by, given the sum of its scores; never 0."""
        # Non-negative scores sum to 0 only where no key is visible, and nothing is there to be divided.
        return row_sums.abs().clamp(min=1.0) if self.signed else row_sums + (row_sums == 0)

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores if visible is None else scores.masked_fill(~visible, 0.0)
        return weights / self.divisor(weights.sum(dim=-1, keepdim=True)) if self.normalize else weights


def obstacle(operation: Operation, inputs: Inputs) -> str | None:
    """Why chunks cannot serve the call, or ``None``."""
    if not isinstance(operation, FeatureKernel):
        return "its weights are not products of mapped queries and keys"
    if inputs.visible is not None:
        return "sums over keys know the causal rule and no other mask"
    if inputs.queries.dtype == torch.float16:
        return "sums over keys leave the range of float16"
    return inputs.plain_scores()


def worthwhile(operation: Operation, inputs: Inputs) -> bool:
    """Whether summing keys up is cheaper than weighing them one by one: from some head sizes on."""
    return min(inputs.q_len, inputs.kv_len) >= (4 if inputs.causal else 2) * inputs.queries.shape[3]


def head_outputs(operation: Operation, inputs: Inputs) -> Tensor:
    """Head outputs ``(batch, num_heads, q_len, value_dim)``."""
    assert isinstance(operation, FeatureKernel)
    queries, keys = operation.features(inputs.queries, inputs.keys, inputs.state)
    values, q_len = inputs.values, inputs.q_len
    # The groups of a key-value head are more rows that meet the same keys.
    queries = queries.to(values.dtype).unflatten(1, (keys.shape[1], -1))
    # Autocast would round the row sums and what they are made of.
    with torch.autocast(values.device.type, enabled=False):
        outputs, row_sums = (_causal if inputs.causal else _full)(queries, keys.to(values.dtype), values, operation.normalize)
    factor = inputs.scaling if row_sums is None else inputs.scaling / operation.divisor(row_sums * inputs.scaling)
    outputs = (outputs * factor).to(values.dtype).flatten(1, 2)[:, :, :q_len]
    return operation.finish(outputs, None, inputs.state)


def _full(queries: Tensor, keys: Tensor, values: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """Sums of values ``(batch, num_kv_heads, groups, q_len, value_dim)`` over all keys, and of weights, neither scaled yet."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    outputs = queries @ (keys.mT @ values)[:, :, None]
    return outputs, queries.to(wide) @ keys.sum(dim=2, dtype=wide)[:, :, None, :, None] if normalize else None


def _causal(queries: Tensor, keys: Tensor, values: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """The same over the keys up to each query's own; with up to a chunk of padding behind the last query."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    groups, q_len, head_dim = queries.shape[2:]
    size = 64 if head_dim <= 64 else 128
    length = -(-q_len // size) * size

    def chunks(tensor: Tensor) -> Tensor:
        # Mapped keys of 0 weigh nothing.
        return F.pad(tensor, (0, 0, 0, length - tensor.shape[-2])).unflatten(-2, (-1, size))

    keys, values = chunks(keys[:, :, :q_len]), chunks(values[:, :, :q_len])
    queries = chunks(queries).transpose(2, 3).flatten(3, 4)
    scores = (queries @ keys.mT).unflatten(3, (groups, size)).tril().flatten(3, 4)
    states = _before(keys[:, :, :-1].mT @ values[:, :, :-1])
    outputs = scores @ values + queries @ states.to(queries.dtype)
    if not normalize:
        return _rows(outputs, groups), None
    states = _before(keys[:, :, :-1].sum(dim=3, dtype=wide)[..., None])
    row_sums = scores.sum(dim=-1, keepdim=True, dtype=wide) + queries.to(wide) @ states
    return _rows(outputs, groups), _rows(row_sums, groups)


def _before(states: Tensor) -> Tensor:
    """Sums over the chunks before each chunk, in float32 or wider, of one state ``(head_dim, …)`` for each chunk but the last.

    Not the sum up to each chunk minus its own: that would let a large key of the future round the past.
    """
    return F.pad(states.cumsum(dim=2, dtype=torch.promote_types(states.dtype, torch.float32)), (0, 0, 0, 0, 1, 0))


def _rows(chunks: Tensor, groups: int) -> Tensor:
    """From ``(batch, num_kv_heads, chunks, groups · size, …)`` to ``(batch, num_kv_heads, groups, length, …)``."""
    return chunks.unflatten(3, (groups, -1)).transpose(2, 3).flatten(3, 4)
