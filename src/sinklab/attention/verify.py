"""Proof of a call: recomputed head outputs must be the model's own, and the mass counted must be the mass there is."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.operation import repeat_groups
from sinklab.attention.visibility import Dense
from sinklab.errors import MeasurementError

ROWS = 4


def verify_call(call: AttentionCall) -> tuple[int, float]:
    """Recompute rows of ``call.head_outputs`` by the plain definition: how many, and the largest error, of what is allowed.

    Scores, cap, bias, mask, sink logits, scaling, operation and gate all enter the recomputation, so a keyword that was
    misread, a mask that was lost or a gain applied behind the function's back is a :class:`MeasurementError`.

    The allowed error is what rounding allows. Weights are exponentials of scores, so an error of ``eps · |score|`` in the score
    is the same relative error of the weight, and a head output is a weighted mean of values. A sum of n terms, one by one, is
    off by at most ``n · eps / 2`` times the sum of their sizes (Higham 2002, §4.2), and is that far off by a constant factor
    where the terms are alike, as under even attention to one token repeated. A row has two such sums, of its exponentials and
    of weights times values, and is computed twice: ``2 · n · eps · Σ |weight · value|`` together, with the eps of float32, in
    which sums are held. Kernels that sum in blocks need a part of it; a product of one row with a matrix needs a ninth.
    """
    if call.head_outputs is None:
        raise MeasurementError(f"{call.site.module}: the attention function returned no outputs to verify against")
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    sizes = call.values.to(dtype).abs()
    largest_value = repeat_groups(sizes.amax(dim=(2, 3))[..., None], call.groups)
    for vector in (call.null_value, call.output_bias):
        if vector is not None:
            largest_value = torch.maximum(largest_value, vector.abs().amax(-1, keepdim=True).to(dtype)[None])
    loudest = 1.0 if call.gain is None else max(1.0, float(call.gain.abs().max()))
    # The coarsest precision on the way decides: autocast mixes them, and many models take the softmax in float32 whatever
    # comes in.
    eps_of_sums = torch.finfo(torch.float32).eps
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (call.queries, call.keys, call.values, call.head_outputs))
    eps = max(eps, eps_of_sums)
    queries = sorted({round(step * (call.q_len - 1) / (ROWS - 1)) for step in range(ROWS)})
    index = _index(tuple(queries), call.queries.device, torch.is_inference_mode_enabled())
    part = _of_queries(call, index)
    scores, visible = part.scores(0, len(queries)), part.visible.block(0, len(queries), 0, call.kv_len)
    weights = part.signed_weights(0, len(queries), scores)
    mass = None if part.null_value is None else part.null_mass(0, len(queries), scores)
    expected = part.combine(weights, mass, repeat_groups(part.values.to(weights.dtype), part.groups), 0, len(queries))
    got = call.head_outputs[:, index].to(dtype).transpose(1, 2)  # (batch, num_heads, queries, value_dim), as expected
    taken = weights.abs()
    size = taken.sum(-1).clamp_min(1.0) * largest_value * loudest
    terms = torch.matmul(taken.reshape(len(sizes), sizes.shape[1], -1, call.kv_len), sizes).view(expected.shape) * loudest
    allowed = eps * (32 + 4 * scores.masked_fill(~visible, 0.0).abs().amax(-1, keepdim=True)) * size[..., None]
    allowed = allowed + 2 * eps_of_sums * visible.sum(-1, keepdim=True) * terms
    # A padding query sees nothing or everything, as the backend pleases; it is not measured.
    counted = part.counted & visible.any(3).any(1)
    error = ((got - expected).abs() / allowed.clamp_min(torch.finfo(dtype).tiny)).amax(-1).amax(1)  # (batch, queries)
    worst = error.masked_fill(~counted, 0.0).amax(0).tolist()
    for number, (query, largest) in enumerate(zip(queries, worst, strict=True)):
        if math.isnan(largest) and bool(expected[:, :, number][counted[:, number]].isnan().any()):
            raise MeasurementError(
                f"{call.site.module}: queries, keys or values of the model are NaN for query {query}, so there is nothing to "
                "measure; some models do so for padded texts in float64: try float32, or attn_implementation='sdpa'"
            )
        if not largest <= 1.0:
            difference = float((got - expected)[:, :, number][counted[:, number]].abs().max())
            raise MeasurementError(
                f"{call.site.module}: recomputing query {query} from the measured scores and mask gives head outputs that "
                f"differ from the model's by {difference:.3g}, {largest:.3g} times what rounding allows; the module computes "
                "something that sinklab does not account for, so its numbers are withheld"
            )
    return int(counted.sum()), max(worst)


@functools.lru_cache(maxsize=64)
def _index(queries: tuple[int, ...], device: torch.device, inference: bool) -> Tensor:
    """Kept, since every layer asks for the same: a GPU is waited for when one is made."""
    return torch.tensor(queries, device=device)


def _of_queries(call: AttentionCall, queries: Tensor) -> AttentionCall:
    """The call cut down to some of its queries, in the order given: int64 ``(some,)``."""
    null_scores = call.sink_scores
    visible = call.visible.pairs(queries, torch.arange(call.kv_len, device=queries.device))
    return dataclasses.replace(
        call,
        queries=call.queries[:, :, queries],
        visible=Dense(visible),
        bias=None if call.bias is None else call.bias[:, :, queries],
        sink_scores=null_scores if null_scores is None or null_scores.shape[2] == 1 else null_scores[:, :, queries],
        gain=None if call.gain is None else call.gain[:, :, queries],
        query_positions=call.query_positions[:, queries],
        query_documents=call.query_documents[:, queries],
        head_outputs=None,
        log_sum_exp=None,
    )


def verify_statistics(call: AttentionCall, statistics: Statistics) -> None:
    """Check that no mass lies on padding and that every counted query has spent exactly one unit of it.

    Raises:
        MeasurementError: padding received weight, or mass on keys and null mass do not add up to the number of queries.
    """
    if statistics.column_sum is None:
        return
    received = statistics.column_sum.double()
    on_padding = received.masked_fill((call.key_documents >= 0)[:, None], 0.0).abs().amax()
    if on_padding > 0:
        raise MeasurementError(
            f"{call.site.module}: padding received attention ({float(on_padding):.3g}); its mask was misread"
        )
    if not call.operation.normalized or (call.sink_scores is not None and statistics.null_mass is None):
        return
    total = received.sum(-1)
    if statistics.null_mass is not None:
        total = total + statistics.null_mass.double().masked_fill(~call.counted[:, None], 0.0).sum(-1)
    queries = call.counted.sum(-1, dtype=torch.float64)[:, None]
    # Half precision rounds every weight, each by at most half a unit in its last place; the sum of a row then by as much.
    # Scores and a log-sum-exp of them are rounded in proportion to their size, above 1,000 in layer 0 of Qwen2.5-Coder.
    allowed = 64 * torch.finfo(call.queries.dtype).eps * queries.clamp_min(1.0)
    if statistics.log_sum_exp is not None:
        sizes = statistics.log_sum_exp.abs().masked_fill(statistics.log_sum_exp.isinf(), 0.0)
        allowed = allowed + 4 * torch.finfo(sizes.dtype).eps * sizes.sum(-1, dtype=torch.float64)
    worst = float(((total - queries).abs() - allowed).amax())
    if worst > 0:
        difference = float((total - queries).abs().amax())
        raise MeasurementError(
            f"{call.site.module}: mass on keys and null mass differ from the {int(queries.max())} units that its queries spend "
            f"by {difference:.3g}; a query sees no key at all, or the statistics are wrong, so they are withheld"
        )
