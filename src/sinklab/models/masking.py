"""Where the tokens of one forward stand, and what each of them sees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask

from sinklab.attention.host_arguments import CACHE
from sinklab.attention.seam import implementation_name
from sinklab.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The tokens of one forward, in indices that count cached tokens and the learned tokens in front."""

    front: int  # learned tokens in front of every sequence
    seen: int | Tensor  # tokens in the cache, those in front included; a static cache counts in a tensor
    length: int  # tokens of this forward, those in front included when none is cached
    attention_mask: Tensor | None  # 2-D padding mask, extended to the tokens in front, or 4-D mask as the caller gave it
    position_ids: Tensor  # int64 (batch or 1, length)
    starts: Tensor | None  # (batch, 1): where the text of a row starts behind padding; None where no row has any

    def inside_prefix(self, prefix: int) -> Tensor:
        """Boolean ``(batch or 1, tokens given)``: the tokens given that are among the first ``prefix`` of their text."""
        given = self.length - (self.front if isinstance(self.seen, int) and self.seen == 0 else 0)
        index = torch.arange(self.length - given, self.length, device=self.position_ids.device)[None] + self.seen
        return index - (self.front if self.starts is None else self.starts) < prefix

    def key_positions(self, kv_len: int) -> Tensor:
        """Positions of all keys, cached ones included, int64 ``(batch or 1, kv_len)``: counted back from the last query over
        the
        tokens that the attention mask shows, since a cache does not keep them."""
        if isinstance(self.seen, int) and self.seen == 0 and kv_len == self.length:
            return self.position_ids
        index = torch.arange(kv_len, device=self.position_ids.device)
        last: Tensor | int
        if self.attention_mask is not None and self.attention_mask.ndim == 2:
            counts = self.attention_mask.long().cumsum(dim=1)
            last = counts[:, -1:]
            counts = torch.cat((counts, last + 1 + index[: max(kv_len - counts.shape[1], 0)]), dim=1)
        else:
            counts, last = index[None], self.seen + self.length - 1
        return self.position_ids[:, -1:] + counts - last


def lay_out(
    *,
    tokens: int,
    front: int,
    cache: Cache | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    device: torch.device,
) -> Layout:
    """Layout of a forward from what the caller gave, in the caller's counts, which know nothing of the tokens in front.

    Args:
        tokens: how many tokens were given.
        front: learned tokens in front of every sequence; they are added to a forward that begins a sequence.
        attention_mask: 2-D over cached and given tokens, or 4-D, over the tokens in front too.
        position_ids: ``(batch or 1, tokens)``; by default real tokens are counted.
    """
    seen = 0 if cache is None else cache.get_seq_length()
    begins = isinstance(seen, int) and seen == 0
    added = front if begins else 0
    length = tokens + added
    if attention_mask is not None and attention_mask.ndim == 2:
        if isinstance(seen, int) and attention_mask.shape[1] != seen + length - front:
            raise ConfigurationError(
                f"the attention mask has {attention_mask.shape[1]} columns; {seen + added - front} tokens are cached and "
                f"{tokens} are given, so it needs {seen + length - front}"
            )
        attention_mask = nn.functional.pad(attention_mask, (front, 0), value=1)
    starts = None
    if position_ids is not None:
        if attention_mask is None and cache is None:
            _require_one_document(position_ids)
        position_ids = position_ids + front
        if added:
            ahead = torch.arange(front, device=device).expand(position_ids.shape[0], -1)
            position_ids = torch.cat((ahead, position_ids), dim=1)
    elif attention_mask is not None and attention_mask.ndim == 2:
        position_ids = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -length:]
    else:
        position_ids = torch.arange(length, device=device)[None] + seen
    if attention_mask is not None and attention_mask.ndim == 2:
        behind = attention_mask[:, front:].long().cumsum(dim=1)
        starts = front + (behind == 0).sum(dim=1, keepdim=True)
    return Layout(front, seen, length, attention_mask, position_ids, starts)


def make_mask(
    config: PreTrainedConfig,
    hidden_states: Tensor,
    layout: Layout,
    cache: Cache | None,
    *,
    window: int | None,
    prefix: int,
    explicit: bool,
) -> Tensor | BlockMask | None:
    """The mask for ``config._attn_implementation``, or ``None`` where it is causal and the attention function knows.

    Tokens in front are visible to every token and see only each other, causally; under a ``window`` token ``t`` sees
    ``t - window + 1 … t``; the first ``prefix`` tokens of every text see each other both ways, and a cache that cuts them in
    two is refused. Dtype and device are those of ``hidden_states``; an ``explicit`` mask is never ``None``.
    """
    front, starts, seen = layout.front, layout.starts, layout.seen
    windowed = window is not None and not (isinstance(seen, int) and seen + layout.length - front <= window)
    first = None if starts is None else starts[:, 0]

    def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        return (key > query - window) | (key < front)

    def seen_both_ways(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start = front if first is None else first[batch]
        return (query >= front) & (key >= start) & (key - start < prefix)

    explicit_mask = layout.attention_mask is not None and layout.attention_mask.ndim == 4  # which then says it all
    if prefix and cache is not None and not explicit_mask:
        _require_whole_prefix(layout, prefix)
    # Once the prefix is in the cache it is the past of every query.
    opens = bool(prefix) and isinstance(seen, int) and seen == 0
    implementation = config._attn_implementation
    fused = implementation == "sdpa" or implementation.startswith(implementation_name(""))
    if fused and not (explicit or opens or windowed or cache is not None or layout.attention_mask is not None):
        return None
    return create_causal_mask(
        config=config,
        inputs_embeds=hidden_states,
        attention_mask=layout.attention_mask,
        **{CACHE: cache},
        or_mask_function=seen_both_ways if opens else None,
        and_mask_function=in_window if windowed else None,
        allow_is_causal_skip=not explicit,
    )


def fold_bias(mask: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask of ``dtype`` that carries a bias of the scores, ``(batch or 1, num_heads, q_len, kv_len)``, for
    attention
    functions that take nothing else."""
    if mask.dtype == torch.bool:
        # Half of the least number stays finite when autocast rounds it to fewer digits.
        return torch.where(mask, bias.to(dtype), torch.finfo(dtype).min / 2)
    return (mask + bias).to(dtype)


def _require_one_document(position_ids: Tensor) -> None:
    """Refuse rows of several documents, which would see each other."""
    if not torch.compiler.is_compiling() and bool((torch.diff(position_ids, dim=1) != 1).any()):
        raise ConfigurationError("position_ids begin again inside a row: give each document a row of its own, or a 4-D mask")


def _require_whole_prefix(layout: Layout, prefix: int) -> None:
    """Refuse to cache part of a prefix: its tokens see each other both ways, and those cached cannot look again."""
    if not isinstance(layout.seen, int) or torch.compiler.is_compiling():
        return
    given = layout.length - (layout.front if layout.seen == 0 else 0)
    before = max(layout.seen - layout.front, 0)
    padding = 0 if layout.starts is None else int(layout.starts.max()) - layout.front
    whole = before - padding >= prefix if before else given - padding >= prefix
    if not whole:
        raise ConfigurationError(
            f"prefix {prefix}: {before} tokens are cached and {given} are given, which cuts the prefix in two; "
            f"give at least {prefix} tokens at once, or use_cache=False"
        )
