"""What a head writes: the norm of its contribution to the residual stream, and how near that is to doing nothing."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, LayerOutput, Statistics
from sinklab.attention.probe import by_head
from sinklab.errors import ContractError
from sinklab.probes._shared import MeanProbe
from sinklab.registry import probes
from sinklab.results.metric import Metric

_ACTIVE = "Guo et al. 2024 (arXiv 2410.13835)"


HEAD_NORM = Metric(
    "head_norm",
    "norm",
    "Mean over counted queries of the norm of weights times values, before the output projection.",
    range=(0.0, float("inf")),
)
OUTPUT_NORM = Metric(
    "output_norm",
    "norm",
    "Mean over counted queries of |W_o^h o_h|: what the head adds to the residual stream, in front of any norm or factor that "
    "the block puts behind its attention.",
    paper=_ACTIVE,
    range=(0.0, float("inf")),
)
RELATIVE_NORM = Metric(
    "relative_norm",
    "ratio",
    "Mean over counted queries of |W_o^h o_h| divided by the norm of the residual that entered the layer; near 0 the "
    "head is nearly a no-op.",
    paper=_ACTIVE,
    range=(0.0, float("inf")),
)


@probes.register("head_output")
class HeadOutput(MeanProbe):
    """Mean norm of each head's output, before and after its slice of the output projection, and relative to the residual.

    The norm after the projection comes from the Gram matrix of the slice, ``|W o|² = oᵀ(WᵀW)o``, so nothing of the size heads ×
    hidden is formed per token. A bias of the projection belongs to no head and is left out. Where the model itself puts a gate
    in front of the projection (Qwen3-Next), what the gate lets through is projected; ``head_norm`` is that in front of it.
    ``relative_norm`` needs a residual stream with one state per query (not the windows of a vision tower); where projection or
    residual is unknown, the metrics that depend on it are absent.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"head_outputs", "gated_heads"})
    metrics: ClassVar[tuple[Metric, ...]] = (HEAD_NORM, OUTPUT_NORM, RELATIVE_NORM)

    axes, pooled = ("head",), True

    def __init__(self) -> None:
        super().__init__()
        self._at_gate: dict[str, AttentionCall] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        if call.head_outputs is None:
            raise ContractError(f"{call.site.module}: head_output was shown a call without head outputs")
        outputs = call.head_outputs.to(torch.promote_types(call.head_outputs.dtype, torch.float32))
        self._means.add(HEAD_NORM, call.site, *by_head(outputs.norm(dim=-1).transpose(1, 2), call.counted[:, None]))
        if call.site.gated:
            self._at_gate[call.site.module] = call
        else:
            self._add_written(call, outputs)

    def update_layer(self, output: LayerOutput) -> None:
        call = self._at_gate.pop(output.site.module, None)
        if call is not None and call.head_outputs is not None and call.head_outputs.numel() == output.hidden_states.numel():
            heads = output.hidden_states.reshape(call.head_outputs.shape)
            self._add_written(call, heads.to(torch.promote_types(heads.dtype, torch.float32)))

    def _add_written(self, call: AttentionCall, outputs: Tensor) -> None:
        """Norms of what heads write, of ``outputs (batch, q_len, num_heads, value_dim)``."""
        if call.projection is None:
            return
        counted = call.counted[:, None]
        written = _projected_norm(outputs, call.projection.to(outputs.dtype)).transpose(1, 2)
        self._means.add(OUTPUT_NORM, call.site, *by_head(written, counted))
        if call.residual is not None and call.residual.shape[:2] == outputs.shape[:2]:
            residual = call.residual.to(outputs.dtype).norm(dim=-1)[:, None]
            self._means.add(RELATIVE_NORM, call.site, *by_head(written / residual, counted & (residual > 0)))


def _projected_norm(outputs: Tensor, projection: Tensor) -> Tensor:
    """``|W_h o_h|`` for every head: ``(batch, q_len, num_heads)``; the projection must take the concatenated heads."""
    _, _, num_heads, value_dim = outputs.shape
    if projection.shape[1] != num_heads * value_dim:
        raise ContractError(
            f"projection has {projection.shape[1]} columns, expected num_heads * value_dim = {num_heads * value_dim}"
        )
    slices = projection.unflatten(1, (num_heads, value_dim))
    gram = torch.einsum("dhv,dhw->hvw", slices, slices)
    squares = (torch.einsum("bqhv,hvw->bqhw", outputs, gram) * outputs).sum(-1)
    return squares.clamp(min=0.0).sqrt()
