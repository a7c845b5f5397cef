"""Proof of a call: a few rows of head outputs recomputed from what was measured must be the model's own."""

from __future__ import annotations

import torch

from sinklab.attention.call import AttentionCall
from sinklab.errors import MeasurementError

__all__ = ["verify_call"]

ROWS = 4


def verify_call(call: AttentionCall) -> tuple[int, float]:
    """Recompute some rows of ``call.head_outputs`` by the plain definition and compare.

    Scores, cap, bias, mask, sink logits, scaling and operation all enter the recomputation, so a keyword that was misread, a
    mask that was lost or a gain applied behind the function's back shows here.

    The allowed error grows with what rounding allows: weights are exponentials of scores, so an error of ``eps · |score|`` in
    the score is the same relative error of the weight, and a head output is a weighted mean of values.

    Returns:
        Number of rows compared, and the largest error in units of what is allowed (at most 1).

    Raises:
        MeasurementError: a row differs by more than rounding explains.
    """
    if call.head_outputs is None:
        raise MeasurementError(f"{call.site.module}: the attention function returned no outputs to verify against")
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    values = call.values.to(dtype)
    if call.groups > 1:
        values = values.repeat_interleave(call.groups, dim=1)
    eps = torch.finfo(call.queries.dtype).eps
    largest, rows = 0.0, 0
    for query in sorted({round(step * (call.q_len - 1) / (ROWS - 1)) for step in range(ROWS)}):
        weights = call.weights(query, query + 1)
        visible = call.visible.block(query, query + 1, 0, call.kv_len)
        scores = call.scores(query, query + 1).masked_fill(~visible, 0.0)
        expected = torch.matmul(weights, values).squeeze(2)
        got = call.head_outputs[:, query].to(dtype)
        size = weights.sum(-1).clamp_min(1.0) * values.abs().amax(dim=(2, 3))[..., None]
        allowed = eps * (32 + 4 * scores.abs().amax(-1)) * size
        # A padding query sees nothing or everything, as the backend pleases; it is not measured.
        counted = call.counted[:, query] & visible.any(-1).any(1).any(-1)
        error = ((got - expected).abs() / allowed.clamp_min(torch.finfo(dtype).tiny)).amax(-1).amax(-1)[counted]
        rows += int(counted.sum())
        if error.numel():
            worst = float(error.max())
            if not worst <= 1.0:
                difference = float((got - expected)[counted].abs().max())
                raise MeasurementError(
                    f"{call.site.module}: recomputing query {query} from the measured scores and mask gives head outputs that "
                    f"differ from the model's by {difference:.3g}, {worst:.3g} times what rounding allows; the module computes "
                    "something that sinklab does not account for, so its numbers are withheld"
                )
            largest = max(largest, worst)
    return rows, largest
