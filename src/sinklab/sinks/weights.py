"""What every head gives to the sink once it is known, and how long the value is that stands there."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Part, Statistics
from sinklab.attention.chosen_keys import scores_of_keys, stands_on_no_key, weights_of_keys
from sinklab.attention.operation import repeat_groups, row_share
from sinklab.attention.probe import Watcher
from sinklab.sinks.value import Head, Sinks

__all__ = ["SinkWeights", "share_of_sink"]


def share_of_sink(sinks: Sinks, call: AttentionCall, statistics: Statistics) -> Tensor | None:
    """Share of every row on the main sink, ``(batch, num_heads, q_len)``; ``None`` without one, or where the call lacks it."""
    if sinks.main is None:
        return None
    if sinks.main.kind == "null":
        return statistics.null_mass
    share = weights_of_keys(call, sinks.all_keys(call), statistics.log_sum_exp).sum(-1)
    if not call.operation.normalized:
        assert statistics.row_mass is not None
        share = row_share(share, statistics.row_mass, call.operation)
    return share


class SinkWeights(Watcher):
    """What every self-attention head gives to the main sink, and how long its value is; for sinks that are known.

    Args:
        sinks: with a main one.
        part: of an encoder–decoder, that they are of.
    """

    name, needs = "sink_weights", frozenset({"mass", "log_sum_exp"})

    def __init__(self, sinks: Sinks, *, part: Part = "") -> None:
        self.given, self.part = sinks, part
        self._sums: dict[str, tuple[list[Head], Tensor]] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        main = self.given.main
        if main is None or (call.site.part != self.part if self.part else call.site.kind != "self"):
            return
        share = share_of_sink(self.given, call, statistics)
        if share is None:
            return
        norms = repeat_groups(call.values, call.groups).double().norm(dim=-1)
        at = main.mask(call.key_positions, call.key_documents, call.key_tokens)
        real = call.key_positions >= 0
        if main.kind == "null":
            queries = call.counted[:, None]
            null = call.null_value
            own = torch.zeros(call.num_heads) if null is None else null.double().norm(dim=-1).expand(call.num_heads)
            own_count = torch.ones(call.num_heads)
        else:
            index = self.given.all_keys(call)
            places = call.key_positions.gather(1, index.clamp(min=0).flatten(1)).view_as(index)
            standing = (places == call.query_positions[..., None]).any(-1)
            if stands_on_no_key(call):
                standing = torch.zeros_like(standing)
            queries = scores_of_keys(call, index)[1].any(-1) & (call.counted & ~standing)[:, None]
            own = norms.masked_fill(~at[:, None], 0.0).sum((0, 2))
            own_count = at.sum().expand(call.num_heads)
        rest = (real & ~at)[:, None]
        numbers = torch.stack([
            part.double().cpu()
            for part in (
                share.double().masked_fill(~queries, 0.0).sum((0, 2)), queries.expand(share.shape).sum((0, 2)), own, own_count,
                norms.masked_fill(~rest, 0.0).sum((0, 2)), rest.sum().expand(call.num_heads),
            )
        ])  # fmt: skip
        heads, known = self._sums.get(call.site.module, ([], torch.zeros(6, call.num_heads, dtype=torch.float64)))
        if main.kind == "null" and heads:  # one value for all calls
            numbers[2:4] = 0.0
        heads = heads or [Head(call.site.layer, number, call.site.module) for number in range(call.num_heads)]
        self._sums[call.site.module] = (heads, known + numbers)

    def completed(self) -> Sinks:
        """The sinks with the numbers of all heads; a head none of whose queries sees the sink has NaN."""
        heads = [head for heads, _ in self._sums.values() for head in heads]
        sums = np.concatenate([sums.numpy() for _, sums in self._sums.values()], axis=1)
        share, queries, own, own_count, rest, rest_count = sums
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = share / queries
            others = rest / rest_count
            ratio = np.where(others > 0, own / np.maximum(own_count, 1.0) / others, np.nan)
        main = self.given.main
        assert main is not None
        if main.mass is None and queries.sum():
            main = dataclasses.replace(main, mass=float(share.sum() / queries.sum()))
        return dataclasses.replace(
            self.given, sinks=(main, *self.given.sinks[1:]), heads=tuple(heads), weights=weights, value_ratio=ratio
        )
