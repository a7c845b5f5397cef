"""Some heads of a call: cut out of it as a call of their own, and put back as one call whose heads differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall
from sinklab.attention.operation import repeat_groups
from sinklab.attention.visibility import Visibility
from sinklab.errors import ContractError

__all__ = ["ByHead", "OfHeads", "merged_call", "of_heads"]

NO_NULL = -1e30
"""Null score of heads without one where others have one: a mass of exactly 0, and finite for rows that see no key."""


def of_heads(call: AttentionCall, heads: Sequence[int]) -> AttentionCall:
    """The call cut down to some of its heads, each with keys and values of its own; the call itself if these are all."""
    if list(heads) == list(range(call.num_heads)):
        return call
    index = torch.as_tensor(heads, device=call.queries.device)
    groups = index // call.groups

    def pick(tensor: Tensor | None, dim: int = 1) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[dim] == 1 else tensor.index_select(dim, index)

    return dataclasses.replace(
        call,
        queries=call.queries[:, index],
        keys=call.keys[:, groups],
        values=call.values[:, groups],
        visible=OfHeads(call.visible, index),
        softcap=pick(call.softcap) if isinstance(call.softcap, Tensor) else call.softcap,
        bias=pick(call.bias),
        sink_scores=pick(call.sink_scores),
        null_value=pick(call.null_value, 0),
        output_bias=pick(call.output_bias, 0),
        gain=pick(call.gain),
        head_outputs=pick(call.head_outputs, 2),
        log_sum_exp=pick(call.log_sum_exp),
        projection=None,
        heads=tuple(call.head_numbers[head] for head in heads),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class OfHeads(Visibility):
    """A rule for some of the heads that another one is about."""

    rule: Visibility
    index: Tensor

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        return self._chosen(self.rule.block(query_start, query_stop, key_start, key_stop))

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._chosen(self.rule.pairs(queries, keys))

    def _chosen(self, visible: Tensor) -> Tensor:
        return visible if visible.shape[1] == 1 else visible.index_select(1, self.index.to(visible.device))


@dataclasses.dataclass(frozen=True, eq=False)
class ByHead(Visibility):
    """Different rules for different heads."""

    rule: Visibility
    parts: Sequence[tuple[Sequence[int], Visibility]]
    num_heads: int

    def block(self, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Tensor:
        tile = (query_start, query_stop, key_start, key_stop)
        return self._merged(self.rule.block(*tile), [rule.block(*tile) for _, rule in self.parts])

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._merged(self.rule.pairs(queries, keys), [rule.pairs(queries, keys) for _, rule in self.parts])

    def _merged(self, whole: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        batch = max(block.shape[0] for block in (whole, *blocks))
        whole = whole.expand(batch, self.num_heads, -1, -1).clone()
        for (heads, _), block in zip(self.parts, blocks, strict=True):
            whole[:, list(heads)] = block
        return whole


Parts: TypeAlias = Sequence[tuple[list[int], AttentionCall, AttentionCall]]
"""Heads, their call before, and their call after."""


def merged_call(call: AttentionCall, parts: Parts) -> AttentionCall:
    """One call for all heads again: that of the model, with what the first stage changed for some of them.

    Raises:
        ContractError: an intervention changed something that heads of one call cannot differ in.
    """

    def differs(*fields: str) -> bool:
        return any(getattr(after, field) is not getattr(before, field) for _, before, after in parts for field in fields)

    if all(after is before for _, before, after in parts):
        return call
    if len(parts) == 1 and len(parts[0][0]) == call.num_heads:
        return parts[0][2]
    if differs("operation", "output_bias"):
        raise ContractError(
            f"{call.site.module}: an intervention on some of its heads may not change the operation or its bias"
        )
    changed: dict[str, Any] = {}
    for fields, merge in _MERGED:
        if differs(*fields):
            changed |= merge(call, parts)
    return dataclasses.replace(call, **changed)


def _merged_visible(call: AttentionCall, parts: Parts) -> dict[str, object]:
    return {"visible": ByHead(call.visible, [(heads, after.visible) for heads, _, after in parts], call.num_heads)}


def _merged_queries(call: AttentionCall, parts: Parts) -> dict[str, object]:
    queries = call.queries.clone()
    for heads, _, after in parts:
        queries[:, heads] = (after.queries * (after.scaling / call.scaling)).to(queries.dtype)
    return {"queries": queries}


def _merged_keys_and_values(call: AttentionCall, parts: Parts) -> dict[str, object]:
    # Query heads that shared keys and values may not do so any more.
    keys, values = repeat_groups(call.keys, call.groups).clone(), repeat_groups(call.values, call.groups).clone()
    for heads, _, after in parts:
        keys[:, heads] = repeat_groups(after.keys, after.groups).to(keys.dtype)
        values[:, heads] = repeat_groups(after.values, after.groups).to(values.dtype)
    return {"keys": keys, "values": values}


def _merged_softcap(call: AttentionCall, parts: Parts) -> dict[str, object]:
    assert call.softcap is not None
    softcap = call.queries.new_ones(1, call.num_heads, 1, 1, dtype=torch.float64) * call.softcap
    for heads, _, after in parts:
        softcap[:, heads] = torch.as_tensor(after.softcap, dtype=softcap.dtype, device=softcap.device)
    return {"softcap": softcap}


def _merged_bias(call: AttentionCall, parts: Parts) -> dict[str, object]:
    # A copy of the size of the scores; only interventions that add to scores of some heads alone come here.
    shape = (call.queries.shape[0], call.num_heads, call.q_len, call.kv_len)
    bias = call.queries.new_zeros(shape) if call.bias is None else call.bias.expand(shape).clone()
    for heads, _, after in parts:
        bias[:, heads] = 0.0 if after.bias is None else after.bias.to(bias.dtype)
    return {"bias": bias}


def _merged_sink_scores(call: AttentionCall, parts: Parts) -> dict[str, object]:
    calls = (call, *(after for _, _, after in parts))
    shapes = [each.sink_scores.shape for each in calls if each.sink_scores is not None]
    shape = (
        max((shape[0] for shape in shapes), default=1),
        call.num_heads,
        max((shape[2] for shape in shapes), default=1),
    )
    dtype = torch.promote_types(call.queries.dtype, torch.float32)
    if call.sink_scores is None:
        sinks = call.queries.new_full(shape, NO_NULL, dtype=dtype)
    else:
        sinks = call.sink_scores.expand(shape).to(dtype, copy=True)
    for heads, _, after in parts:
        sinks[:, heads] = NO_NULL if after.sink_scores is None else after.sink_scores.to(dtype)
    return {"sink_scores": sinks}


def _merged_null_value(call: AttentionCall, parts: Parts) -> dict[str, object]:
    shape = (call.num_heads, call.values.shape[-1])
    null_value = call.values.new_zeros(shape) if call.null_value is None else call.null_value.expand(shape).clone()
    for heads, _, after in parts:
        null_value[heads] = 0.0 if after.null_value is None else after.null_value.to(null_value.dtype)
    return {"null_value": null_value}


_MERGED: tuple[tuple[tuple[str, ...], Callable[[AttentionCall, Parts], dict[str, object]]], ...] = (
    (("visible",), _merged_visible),
    (("queries", "scaling"), _merged_queries),
    (("keys", "values"), _merged_keys_and_values),
    (("softcap",), _merged_softcap),
    (("bias",), _merged_bias),
    (("sink_scores",), _merged_sink_scores),
    (("null_value",), _merged_null_value),
)
"""Fields of a call that the heads of one call can differ in, and what makes those of one call of them."""
