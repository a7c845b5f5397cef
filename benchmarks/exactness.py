"""Bar 5: errors of the second pass, with the log-sum-exp of the stock kernel, against float64 row by row."""

from __future__ import annotations

import torch
from _timing import Bar, exit_with, make_call

from sinklab.attention.statistics.columns import column_statistics

LENGTH = 4096
NEEDS = frozenset({"columns", "entropy", "maximum"})


@torch.no_grad()
def measure() -> list[Bar]:
    bars = []
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-4)):
        call = make_call(LENGTH, dtype, heads=2)
        got = column_statistics(call, NEEDS, method="fused")
        columns, entropy = torch.zeros(2, LENGTH, dtype=torch.float64), []
        for start in range(0, LENGTH, 512):
            scores = call.queries[0, :, start : start + 512].double() @ call.keys[0].double().mT * call.scaling
            hidden = torch.arange(LENGTH) > torch.arange(start, start + 512)[:, None]
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
            columns += weights.sum(dim=1)
            entropy.append(torch.special.entr(weights).sum(dim=-1))
        assert got.column_sum is not None
        assert got.row_entropy is not None
        name = str(dtype).removeprefix("torch.")
        relative = (got.column_sum[0].double() / columns - 1).abs().max()
        mass = (got.column_sum[0].double().sum(dim=1) / LENGTH - 1).abs().max()
        bars += [
            Bar("5", f"largest relative error of a column sum ({name})", float(relative), "<=", bound, ""),
            Bar(
                "5",
                f"largest error of a row's entropy ({name})",
                float((got.row_entropy[0].double() - torch.cat(entropy, 1)).abs().max()),
                "<=",
                5e-5,
                "nats",
            ),
        ]
        if dtype == torch.float32:
            bars.append(Bar("5", f"total mass ÷ T, distance from 1 ({name})", float(mass), "<=", 1e-5, ""))
    return bars


if __name__ == "__main__":
    exit_with(measure)
