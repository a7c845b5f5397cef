"""Folded sinks on the seam: their keys are set to zero where they are made and hidden where they are read, and queries are kept
as they are before rotation, for the score of nothing.

A key of zeros needs no memory of where it stands: caches of any kind, evictions and reordered beams carry it along.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vecdot
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from sinklab.attention.host_arguments import HARMLESS, unknown_keywords
from sinklab.attention.operation import ATTRIBUTE, HeadShape, Inputs, Operation, OperationState, Source
from sinklab.attention.paths.decode import LARGE
from sinklab.attention.paths.table import compute
from sinklab.attention.visibility import Everything, Visibility
from sinklab.errors import UnsupportedModelError


def find_source(received: Tensor, outputs: dict[str, Tensor]) -> str | None:
    """Which output holds queries or keys as they are before rotation, as :class:`Source` writes it, ``None`` where none
    does. A rotation keeps the norm of every head at every token, or times a constant.

    Args:
        received: by the attention function, ``(batch, heads, tokens, size)``.
        outputs: of the parts of the attention module, by name, in the order in which they ran.
    """
    batch, heads, tokens, size = received.shape
    norms, last = received.float().norm(dim=-1), None
    rounding = max(1e-3, 4 * torch.finfo(received.dtype).eps)
    for name, output in outputs.items():
        candidates: list[Source] = []
        if output.shape == (batch, tokens, heads, size):
            candidates.append(Source(name, "bthd"))
        if output.shape == (batch, heads, tokens, size):
            candidates.append(Source(name, "bhtd"))
        if output.ndim == 3 and output.shape[:2] == (batch, tokens) and output.shape[2] >= heads * size:
            width = output.shape[2]
            candidates += [Source(name, "btn", start, size) for start in range(0, width - heads * size + 1, heads * size)]
            candidates += [Source(name, "btn", start, width // heads) for start in (0, size) if width == 3 * heads * size]
        for source in candidates:
            found = source.read(output, heads, size)
            own = found.float().norm(dim=-1)
            factor = norms.sum() / own.sum().clamp_min(1e-30)  # YaRN lengthens all by one number
            if torch.allclose(norms, factor * own, rtol=rounding, atol=1e-5 * float(norms.mean())):
                last = str(source)
    return last


_FLASH = torch._scaled_dot_product_flash_attention_for_cpu  # outputs, log-sum-exp; by torch.ops a call takes twice as long


def watch(module: nn.Module, state: OperationState) -> None:
    """Let an attention module mark the keys of its sinks and keep its queries; hooks go with copies, and pickle."""
    if state.shape.folded != ():
        module.register_forward_pre_hook(functools.partial(_begin, state), with_kwargs=True)


unmarked: contextvars.ContextVar[bool] = contextvars.ContextVar("sinklab_unmarked", default=False)
"""Keys of folded sinks are left as they are made, for whoever looks at how a model rotates keys."""


def _begin(state: OperationState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note which of the tokens that enter are sinks, ``(batch, tokens)``; nothing where the text began before."""
    shape, parts, state.passing.sinks = state.shape, state.parts, None
    if "k" in parts:
        parts.pop("k").remove()  # of a forward that broke off
    if shape.keys_from:
        name = Source.of(shape.queries_from).module
        part = module._modules.get(name) or module.get_submodule(name)
        if parts.get("q") is not part:  # again where it was replaced (by a quantised one, by an adapter's)
            parts["q"] = part
            part.register_forward_hook(functools.partial(_keep_queries, state))
    hidden = args[0] if args else kwargs["hidden_states"]
    mask = cache = None
    for one in (*args, *kwargs.values()):  # a mask and a cache, by one of three names
        if isinstance(one, Tensor):
            mask = one if one.ndim == 4 and one.dtype == torch.bool else mask
        elif isinstance(one, Cache):
            cache = one
    starts = None if unmarked.get() else _starts(module, hidden, mask, cache, kwargs.get("position_ids"))
    if starts is None:
        return
    positions = state.operation.positions  # type: ignore[attr-defined]
    state.passing.sinks = sinks = torch.zeros_like(starts)
    for position in positions:
        sinks[:, position:] |= starts[:, : starts.shape[1] - position]
    state.passing.first_only = mask is None and positions == (0,)
    if shape.keys_from:
        hook = functools.partial(_mark_keys, state, sinks)
        parts["k"] = module.get_submodule(Source.of(shape.keys_from).module).register_forward_hook(hook, prepend=True)


def _starts(module: nn.Module, hidden: Tensor, mask: Tensor | None, cache: Cache | None, positions: object) -> Tensor | None:
    """Tokens that begin a text, ``(batch, tokens)``; ``None`` where it began before.

    In an encoder that is the first key that is seen. In a causal model it is a token that sees no key but its own, and has no
    predecessor: it comes first, or behind padding, or its position does not go on (packed texts). A token may also see itself
    alone because a window has no room for more.
    """
    if mask is None and cache is not None and cache.get_seq_length(getattr(module, "layer_idx", 0) or 0) > 0:
        return None
    batch, tokens = hidden.shape[:2]
    if mask is None:
        starts = torch.zeros(batch, tokens, dtype=torch.bool, device=hidden.device)
        starts[:, 0] = True
        return starts
    seen = mask.any(dim=(1, 2)).expand(batch, -1)[:, :tokens]
    if not getattr(module, "is_causal", True):
        return seen & (seen.cumsum(1) == 1)
    if tokens == 1 and mask.shape[-1] > 1:
        return None
    alone = mask.sum(-1).eq(1).any(1).expand(batch, -1)
    if mask.shape[-1] == tokens:
        alone = alone & mask.diagonal(dim1=-2, dim2=-1).any(1)
    first = torch.ones_like(alone)
    first[:, 1:] = ~seen[:, :-1]
    if isinstance(positions, Tensor) and positions.shape[-1] == tokens:
        places = positions.reshape(-1, tokens)[-batch:] if positions.ndim > 1 else positions[None]
        first[:, 1:] |= places[:, 1:] != places[:, :-1] + 1
    return alone & first


def _keep_queries(state: OperationState, module: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
    state.passing.unrotated = output


def _mark_keys(state: OperationState, sinks: Tensor, module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
    """Called once for every text that begins, so that steps of decoding pay for no hook."""
    state.parts.pop("k").remove()
    shape, marked = state.shape, output.clone()
    keys = Source.of(shape.keys_from).read(marked, shape.num_kv_heads, shape.head_dim)
    for head in range(shape.num_kv_heads) if shape.folded is None else shape.folded:
        keys[:, head].masked_fill_(sinks[..., None], 0.0)
    return marked


@dataclasses.dataclass(frozen=True, eq=False)
class Hidden(Visibility):
    """Keys of folded sinks are hidden, but from the query of their own token.

    That has the index of the key where there are as many queries as keys. Caches may put copies of keys in front of a text that
    begins, whose first token sees no other token.
    """

    keys: Tensor  # boolean (batch, heads or 1, kv_len): true where hidden
    sinks: Tensor | None  # boolean (batch, q_len): queries of sinks; None where there are none

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the keys."""
        return self.keys.device

    def unfolded(self) -> Visibility:
        return Everything(self.device)

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        seen = ~self.keys[:, :, None, keys]
        if self.sinks is None:
            return seen.expand(-1, -1, len(queries), -1)
        own = self.sinks[:, None, queries, None]
        return seen | (own & (keys == queries[:, None]) if self.keys.shape[2] == self.sinks.shape[1] else own)


def hidden_keys(keys: Tensor, shape: HeadShape) -> Tensor:
    """Which keys are those of folded sinks, boolean ``(batch, num_heads or 1, kv_len)``; 1 where all heads are folded."""
    if shape.folded is None or len(shape.folded) == shape.num_kv_heads:
        return keys[:, :1].eq(0).all(-1)
    return keys.eq(0).all(-1).repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1)


def attend(
    operation: Operation, inputs: Inputs, state: OperationState, path: str, *, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """What :func:`~sinklab.attention.paths.table.compute` gives for a call in which keys of folded sinks are hidden.

    Where a text begins with its sink and nothing else is masked, the rest of it is a causal call of one token less. All other
    calls get a mask.

    Raises:
        UnsupportedModelError: keys that are zero could not be told from others, since the module does not mark them.
    """
    shape = state.shape
    if shape.folded == ():
        return compute(operation, inputs, path, need_weights=need_weights)
    if not shape.keys_from:
        raise UnsupportedModelError(
            "operation 'folded_sink' was attached without saying where keys are made; fold a model with sinklab.fold_sinks"
        )
    passing, sinks, square = state.passing, state.passing.sinks, inputs.q_len == inputs.kv_len
    whole = shape.folded is None or len(shape.folded) == shape.num_kv_heads
    plain = whole and inputs.visible is None and inputs.bias is None and not need_weights
    if plain and sinks is not None and passing.first_only and square and (inputs.causal or inputs.q_len == 1):
        own = inputs.values[:, :, :1].repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1).to(inputs.queries.dtype)
        if inputs.q_len == 1:
            return own, None
        behind = {name: tensor[:, :, 1:] if name == "unrotated" else tensor for name, tensor in inputs.state.items()}
        del behind["sinks"]
        queries, keys, values = (tensor[:, :, 1:] for tensor in (inputs.queries, inputs.keys, inputs.values))
        cut = dataclasses.replace(inputs, queries=queries, keys=keys, values=values, state=behind, causal=inputs.q_len > 2)
        rest, _ = compute(operation, cut, path)
        return torch.cat((own.transpose(1, 2), rest.transpose(1, 2)), dim=1).transpose(1, 2), None  # copied once, as it goes on
    rule = Hidden(hidden_keys(inputs.keys, shape), sinks)
    visible, seen = inputs.mask(), rule.block(0, inputs.q_len, 0, inputs.kv_len)
    inputs = dataclasses.replace(inputs, visible=seen if visible is None else visible & seen, causal=False)
    return compute(operation, inputs, path, need_weights=need_weights)


@functools.cache
def _has_only_a_null(kind: type[Operation]) -> bool:
    as_it_is = ("features", "head_outputs", "null_mass", "finish", "output_bias", "gain")
    null = kind.is_softmax and kind.null_scores is not Operation.null_scores
    return null and all(getattr(kind, name) is getattr(Operation, name) for name in as_it_is)


def short_step(
    module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None, keywords: Mapping[str, object]
) -> Tensor | None:
    """Head outputs ``(batch, 1, num_heads, value_dim)`` of one query that sees all keys, in a module with parameters of a null
    score, on a CPU, in float32, without gradients; ``None`` for others. A step is made of calls: here are as few as can be.
    """
    state, kept = module._modules.get(ATTRIBUTE), module.__dict__.get("attention_path", "auto")
    if not isinstance(state, OperationState) or not _has_only_a_null(type(state.operation)) or kept != "auto":
        return None
    (batch, heads, _, size), (_, groups, length, _) = queries.shape, keys.shape
    alike = queries.dtype is values.dtype is torch.float32 and values.shape[3] == size and queries.is_cpu
    usual = alike and (keywords.keys() <= HARMLESS or not unknown_keywords(keywords, HARMLESS))
    if scaling is None or not usual or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    own: dict[str, Any] = state._parameters
    operation: Any = state.operation
    grouped = queries.reshape(batch, groups, -1, size)  # as queries of one head, which read its keys once
    if not operation.folds:
        if keys.nbytes >= LARGE:
            return None
        null_scores, value = operation.null_scores(queries, scaling, own), operation.null_value(own)
    elif state.shape.folded == ():
        return scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(batch, 1, heads, size)
    else:
        before, whole = state.passing.unrotated, state.shape.folded is None or len(state.shape.folded) == groups
        usual = whole and operation.positions == (0,) and state.passing.sinks is None
        if before is None or not usual or keys.select(2, 0).select(1, 0).count_nonzero():
            return None
        keys, values, value = keys.narrow(2, 1, length - 1), values.narrow(2, 1, length - 1), own["value"]
        if before.numel() != queries.numel():  # it has keys, too
            before = Source.of(state.shape.queries_from).read(before, heads, size)
        null_scores = vecdot(before.reshape(batch, heads, size), own["key"]).add_(own["constant"])
    outputs, log_sum = _FLASH(grouped, keys, values, scale=scaling)
    null_scores = null_scores.view(-1, groups, heads // groups)
    if value is None:
        outputs.mul_((log_sum - null_scores).sigmoid_().unsqueeze(3))
    else:  # values are of heads, of groups, or of all
        value = value.view(groups, -1, size) if len(value) == heads else value.unsqueeze(1)
        outputs = torch.lerp(outputs, value, (null_scores - log_sum).sigmoid_().unsqueeze(3))
    return outputs.reshape(batch, 1, heads, size)
