"""Why a key attracts: the score q·k taken apart into norms and angle; in trained models the angle makes the sink."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.positions import by_position
from sinklab.probes._shared import MeanProbe, visible_tiles
from sinklab.registry import probes
from sinklab.results.metric import Metric

_GU = "Gu et al. 2024 (arXiv 2410.10781)"


COSINE = Metric(
    "cosine",
    "cosine",
    "Mean of cos(q, k) over the counted queries that see the key; 0 for a zero vector.",
    paper=_GU,
    range=(-1.0, 1.0),
)
NORM_PRODUCT = Metric(
    "norm_product", "norm", "Mean of |q| |k| over the counted queries that see the key.", paper=_GU, range=(0.0, float("inf"))
)
SCORE = Metric(
    "score",
    "score",
    "Mean of scaling * q·k over the counted queries that see the key, before soft-cap, bias and mask.",
    paper=_GU,
)


@probes.register("query_key_angle")
class QueryKeyAngle(MeanProbe):
    """``q·k = |q| |k| cos(q, k)``, each factor averaged over the counted queries that see the key.

    The mean cosine at a key is the dot product of the unit key with the mean of the unit queries that see it, so sums of
    queries are enough and no cosine of a pair is ever formed: the cost is one product of the visibility with the queries on the
    tiles beside the diagonal. Queries and keys are taken after rotary embedding, as the scores see them.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"vectors"})
    metrics: ClassVar[tuple[Metric, ...]] = (COSINE, NORM_PRODUCT, SCORE)

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        dtype = torch.promote_types(call.queries.dtype, torch.float32)
        queries, keys = call.queries.to(dtype), call.keys.to(dtype)
        head_dim = queries.shape[-1]
        norms = queries.norm(dim=-1, keepdim=True)
        # One row of features per query: unit query, query, norm and one; their sums over the queries that see a key hold all.
        features = torch.cat((_unit(queries, norms), queries, norms, torch.ones_like(norms)), dim=-1)
        features = features.masked_fill(~call.counted[:, None, :, None], 0.0)
        sums = _sums_of_seeing(call, features).unflatten(1, (keys.shape[1], call.groups))
        key_norms = keys.norm(dim=-1, keepdim=True)
        units = _unit(keys, key_norms)
        counts = by_position(sums[..., -1].flatten(1, 2), call.key_positions)
        by_metric = {
            COSINE: (sums[..., :head_dim] * units[:, :, None]).sum(-1),
            NORM_PRODUCT: sums[..., -2] * key_norms[:, :, None, :, 0],
            SCORE: (sums[..., head_dim:-2] * keys[:, :, None]).sum(-1) * call.scaling,
        }
        for metric, values in by_metric.items():
            self._means.add(metric, call.site, by_position(values.flatten(1, 2), call.key_positions), counts)


def _unit(vectors: Tensor, norms: Tensor) -> Tensor:
    return torch.where(norms > 0, vectors / norms, 0.0)


def _sums_of_seeing(call: AttentionCall, features: Tensor) -> Tensor:
    """For every key the sum of the features of the queries that see it: ``(batch, num_heads, kv_len, size)``."""
    batch, num_heads, _, size = features.shape
    sums = features.new_zeros(batch, num_heads, call.kv_len, size)
    for queries, keys, block in visible_tiles(call):
        part = features[:, :, queries]
        if block is None:
            sums[:, :, keys] += part.sum(dim=2, keepdim=True)
        else:
            sums[:, :, keys] += torch.matmul(block.to(part.dtype).transpose(2, 3), part)
    return sums
