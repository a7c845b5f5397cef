"""Sinks apart: in a chunk every query sees the sinks at a distance of its own; they are attended to beside the window.

Keys of a chunk hold one copy of the sinks for each distance, and every query computes scores with all of them. Where the
attention function is the stock softmax kernel, whose log-sum-exp is to be had, it is given the window alone; the few scores of
the sinks are computed beside it, and the two softmaxes become one.

That takes a model whose attention is given what its cache returned, and once for each layer; some repeat heads in an order of
their own, or attend twice. The first forward that could be had so is watched, with copies of the sinks, to find out.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention import host_arguments, seam
from sinklab.attention.anatomy import Anatomy
from sinklab.errors import UnsupportedModelError
from sinklab.streaming.slot_table import SlotTable
from sinklab.streaming.step import Step

__all__ = ["SinksApart"]

_fits: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Whether the attention of a model is such, of those that have been watched."""


class SinksApart(seam.Observer):
    """What computes the attention of chunks for one cache.

    Args:
        model: the model of the cache.
        table: of the cache; a layer leaves its sinks in ``table.left``.
        layers: of the cache.
    """

    running = True

    def __init__(self, model: PreTrainedModel, table: SlotTable, layers: int) -> None:
        self._table, self._looking = table, contextlib.ExitStack()
        self._modules = {id(module) for module in Anatomy(model).attention.values()}
        here = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._possible = here and len(self._modules) == layers
        self._watching = False
        self._calls: list[tuple[int, bool]] = []  # of the forward that is watched: modules, and whether each call was as usual

    def ask(self, length: int) -> None:
        """Say to the table whether a forward of so many tokens can be had so.

        It takes the stock kernel on a CPU, no padding, no query that is a sink itself, and nobody else who looks at attention.
        """
        table, model = self._table, self._table.model
        possible = (
            self._possible
            and model is not None
            and length > 1
            and table.in_cache
            and table.rows == 1
            and table.device.type == "cpu"
            and model.config._attn_implementation == "sdpa"
            and not model.training
            and not torch.is_autocast_enabled("cpu")
            and not seam.active_observers()
        )
        known = None if model is None else _fits.get(model)
        table.apart = possible and known is True and int(table.seen) > int(table.pinned.max())
        self._watching, self._calls = possible and known is None, []
        table.watched = self._watching or table.apart

    def begin(self) -> None:
        """A forward has been planned; of one whose layers leave their sinks attention is computed here."""
        step = self._table.step
        if isinstance(step, Step) and (step.which is not None or self._watching):
            self._looking.enter_context(seam.shadow(self))

    def end(self, failed: bool) -> None:
        """The forward is over, or has failed."""
        self._looking.close()
        table, watching, self._watching = self._table, self._watching, False
        if not failed:
            table.require_taken()
            if watching and table.model is not None:
                modules = [module for module, _ in self._calls]
                once = sorted(modules) == sorted(self._modules)
                _fits[table.model] = once and all(usual for _, usual in self._calls)
        table.left = table.given = None
        table.watched = False

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self._modules

    def on_attention(
        self,
        native: seam.Native,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object = None,
        **kwargs: Unpack[host_arguments.Keywords],
    ) -> seam.Attended:
        """Attend to the window with the stock kernel and to the sinks here."""
        table = self._table
        left, table.left = table.left, None
        given, table.given = table.given, None
        step = table.step
        assert isinstance(step, Step)
        changed = host_arguments.unknown_keywords(kwargs) + [
            name for name in ("position_bias", "s_aux", "sinks") if kwargs.get(name) is not None
        ]
        usual = (
            not changed
            and given is not None
            and key is given[0]
            and value is given[1]
            and isinstance(mask, Tensor)
            and step.visible is not None
            and mask.data_ptr() == step.visible.data_ptr()
        )
        if self._watching:
            self._calls.append((id(module), usual))
            return native(module, query, key, value, mask, **kwargs)
        if not usual or left is None or not isinstance(mask, Tensor):
            raise UnsupportedModelError(
                f"{type(module).__name__} was given {', '.join(changed) or 'other keys or another mask than before'}, where "
                "the sinks of a chunk cannot be apart; make the cache with chunk=1"
            )
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        bias = step.bias
        if bias is None:
            bias = step.bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        window, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scaling
        )
        with torch.autocast(query.device.type, enabled=False):
            outputs = _with_sinks(query, window, total, *left, scaling)
        return outputs.transpose(1, 2).contiguous(), None


def _with_sinks(query: Tensor, window: Tensor, total: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Head outputs over the window and the sinks, ``(batch, num_heads, length, value_dim)``.

    Args:
        window: those over the window.
        total: its log-sum-exp ``(batch, num_heads, length)``.
        keys: of the sinks as each query sees them, ``(batch, num_kv_heads, length, pinned, head_dim)``.
        values: ``(batch, num_kv_heads, pinned, value_dim)``.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // keys.shape[1]
    queries = query.to(wide).unflatten(1, (-1, groups))
    scores = (queries[..., None, :] * keys.to(wide)[:, :, None]).sum(dim=-1).flatten(1, 2) * scaling
    both = torch.logaddexp(total.to(wide), torch.logsumexp(scores, dim=-1))[..., None]
    weights = torch.exp(scores - both)
    far = torch.matmul(weights.unflatten(1, (-1, groups)), values.to(wide)[:, :, None]).flatten(1, 2)
    return (window.to(wide) * torch.exp(total.to(wide)[..., None] - both) + far).to(query.dtype)
