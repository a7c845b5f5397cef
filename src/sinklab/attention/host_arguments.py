"""What arguments mean: those of a model's forward, and those with which it calls an attention function."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.masking_utils import create_causal_mask

from sinklab.attention.visibility import Causal, Dense, Everything, Keys, Visibility, Window
from sinklab.errors import UnsupportedModelError

HONOURED = (
    "scaling", "softcap", "position_bias", "s_aux", "sinks", "is_causal", "sliding_window", "dropout", "layer_input",
)  # fmt: skip
"""Keywords that change the mathematics, and that sinklab takes into account."""

IN_THE_MASK = ("indices", "block_indices", "attention_bias")
"""Those whose effect has already reached the mask that the function receives."""

IRRELEVANT = (
    "position_ids", "position_embeddings", "cache_position", "past_key_values", "past_key_value", "cache", "use_cache",
    "encoder_hidden_states", "encoder_attention_mask", "deterministic", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "return_loss", "num_items_in_batch", "logits_to_keep", "labels", "token_type_ids",
    "mm_token_type_ids", "interpolate_pos_encoding", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx", "layer_head_mask", "layer_idx", "is_first_iteration",
)  # fmt: skip
"""Those that do not change what one call computes."""

KEYWORDS = frozenset((*HONOURED, *IN_THE_MASK, *IRRELEVANT))
"""Keyword arguments of the attention function that are known; one that is not here is refused, not ignored."""

HARMLESS = frozenset((*IRRELEVANT, "is_causal", "sliding_window")) - {"output_attentions"}
"""Those without which a query that sees all keys gets the same, and nobody asks for more."""

HIDDEN_FROM = -9_000.0
"""What an additive mask adds to hide a key, or less: the smallest number, -1e9, -10,000 (-9,984 in bfloat16). Beside a key
without it such a one has weight 0 in every dtype."""

HIDING_STEP = -math.log(torch.finfo(torch.float32).tiny)
"""How much lower a key is than without being hidden, at least, where one number hides it that is no bias by its size alone:
87.3, beyond which its weight beside a key of the same score is below the smallest normal number of float32 (Swin: 100)."""


class FurtherKeywords(TypedDict, total=False):
    """Keyword arguments of an attention function that sinklab reads; a model may give any of :data:`KEYWORDS`."""

    softcap: float | None
    position_bias: Tensor | None
    s_aux: Tensor | None
    sinks: Tensor | None
    is_causal: bool | None
    sliding_window: int | None
    position_ids: Tensor | None
    cache: object
    output_attentions: bool | None


class Keywords(FurtherKeywords, total=False):
    """The same, with those that an operation of ours names in its signature."""

    scaling: float | None
    dropout: float
    layer_input: Tensor | None


def unknown_keywords(keywords: Mapping[str, object], known: frozenset[str] = KEYWORDS) -> list[str]:
    """Keywords with a value that the table does not know; each may carry mathematics that a measurement would miss."""
    return [name for name, value in keywords.items() if name not in known and value is not None and value is not False]


def require_readable(mask: object, name: str, module: nn.Module) -> None:
    """Refuse a mask that :func:`read_mask` cannot read.

    Raises:
        UnsupportedModelError: neither ``None`` nor a tensor of two or four dimensions: FlexAttention's block mask, for one.
    """
    if mask is None or (isinstance(mask, Tensor) and mask.ndim in (2, 4)):
        return
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}) received a mask of type {type(mask).__name__}, which cannot be read; load the model "
        'with attn_implementation="sdpa" or "eager"'
    )


def read_mask(
    mask: object,
    keywords: FurtherKeywords,
    module: nn.Module,
    implementation: str,
    q_len: int,
    kv_len: int,
    device: torch.device,
    *,
    left_to_kernel: bool = False,
) -> tuple[Visibility, Tensor | None]:
    """Rule of visibility over tensor indices, and additive scores ``(batch or 1, heads or 1, q_len, kv_len)`` or ``None``.

    Args:
        mask: as the function received it: boolean or additive 4-D, 2-D padding (flash), or ``None``. What an additive one
            adds is a bias down to :data:`HIDDEN_FROM`, where it begins to hide; less than that hides where it is one number
            that is added or not, :data:`HIDING_STEP` or more (Swin's -100). Others (block masks) are refused.
        implementation: name of the backend; without a mask ``sdpa`` and ``flash`` follow ``is_causal``, eager sees everything.
        left_to_kernel: the mask function of this very call gave none; a function of another name follows ``is_causal`` then.
    """
    bias: Tensor | None = None
    rule: Visibility = Everything(device)
    # Operations registered here follow sdpa, for which "no mask" means "the module says whether it is causal".
    fused = "sdpa" in implementation or "flash" in implementation or implementation.startswith("sinklab_")
    fused |= left_to_kernel and "eager" not in implementation
    if isinstance(mask, Tensor) and mask.ndim == 4:
        mask = mask[..., :kv_len]
        if mask.shape[2] == 1:  # LayoutLM and Switch Transformers have one row for all queries
            mask = mask.expand(-1, -1, q_len, -1)
        if mask.dtype == torch.bool:
            rule = Dense(mask)
        else:
            hidden = _hidden(mask)
            # Swin and BEiT fold a relative bias into the mask; what is neither 0 nor "hidden" is such a bias.
            if bool(((mask != 0) & ~hidden).any()):
                hidden = hidden | _one_step_lower(mask, hidden)
                rest = mask.masked_fill(hidden, 0.0)
                bias = rest if bool((rest != 0).any()) else None
            rule = Dense(~hidden)
    elif mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        if mask is not None:
            rule = rule & Keys(mask.bool())
        causal = keywords.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if fused and causal and q_len > 1:
            # torch aligns is_causal with the upper left corner, flash kernels with the lower right; square calls agree.
            rule = rule & Causal(kv_len - q_len if "flash" in implementation else 0, device)
        window = keywords.get("sliding_window")
        if "flash" in implementation and window is not None and causal:
            rule = rule & Window(int(window), kv_len - q_len, device)
    else:
        require_readable(mask, "attention", module)
    position_bias = keywords.get("position_bias")
    if position_bias is not None:
        position_bias = position_bias[..., :kv_len]
        bias = position_bias if bias is None else bias + position_bias
    return rule, bias


def _hidden(mask: Tensor) -> Tensor:
    """Where an additive mask hides a key and is no bias, boolean in the shape of the mask."""
    hidden = mask <= HIDDEN_FROM
    # A bias that falls with the distance (ALiBi) gets that low step by step, over a long text; a mask jumps.
    return hidden if torch.equal(mask <= HIDDEN_FROM / 2, hidden) else mask <= torch.finfo(mask.dtype).min / 2


def _one_step_lower(mask: Tensor, hidden: Tensor) -> Tensor:
    """Where an additive mask is lower than elsewhere by one number that hides, boolean in the shape of the mask."""
    known = mask.detach().to(torch.promote_types(mask.dtype, torch.float32)).masked_fill(hidden, -math.inf)
    # The sum of bias and number is rounded in the dtype of the mask, by half of its eps times the sum at most, up or down.
    eps = torch.finfo(mask.dtype).eps if mask.is_floating_point() else 0.0
    rounding = eps * float(known.masked_fill(hidden, 0.0).abs().max())
    for shared in (known.new_zeros(()), known.amax(0, keepdim=True)):
        lower = torch.where(hidden, 0.0, shared - known)
        steps = lower[lower != 0]
        if not len(steps) or steps.min() < HIDING_STEP or steps.max() - steps.min() > rounding:
            continue
        unchanged = (lower == 0) & ~hidden
        # A row that is lower as a whole has the weights of one that is not: ALiBi may count from another key in every sample.
        beside = unchanged.any(-1) | (lower == 0).all(-1) if shared.ndim else unchanged.any()
        if beside.all():
            return lower > 0
    return torch.zeros_like(hidden)


def read_sink_scores(keywords: FurtherKeywords) -> Tensor | None:
    """Learned sink logits ``(batch or 1, num_heads, q_len or 1)`` from the forms in which models pass them, or ``None``."""
    vector = keywords.get("s_aux")
    if vector is not None:  # gpt-oss, Granite-SWA, MiMo, DeepSeek-V4: one logit a head
        return vector.detach().reshape(1, -1, 1)
    full = keywords.get("sinks")
    return None if full is None else full.detach().squeeze(-1)  # (batch, num_heads, q_len, 1): it depends on the query


OLD: Final = "past_key_values"

CACHE: Final = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else OLD
"""The name in the installed transformers: of the argument, and of the field of a model's output."""


def cache_argument(model: nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """The cache as a keyword argument of a model, by the name that its forward has for it."""
    return {_name(type(model).forward): cache}


def takes_cache(model: nn.Module) -> bool:
    """Whether the forward of a model has a cache among its arguments, by either name."""
    return not {CACHE, OLD}.isdisjoint(inspect.signature(model.forward).parameters)


def given_cache(arguments: Mapping[str, object]) -> Cache | None:
    """The cache among the keyword arguments of a forward, by either name; ``None`` without."""
    cache = arguments.get(CACHE)
    return cast("Cache | None", arguments.get(OLD) if cache is None else cache)


def returned_cache(output: object) -> Cache | None:
    """The cache in the output of a model; ``None`` without."""
    return getattr(output, CACHE, None)


@functools.cache
def _name(forward: Callable[..., object]) -> str:
    parameters = inspect.signature(forward).parameters
    return OLD if OLD in parameters and CACHE not in parameters else CACHE  # code that comes with a checkpoint has the old one


def lean_arguments(model: nn.Module, arguments: Mapping[str, Any], *, logits: bool = False) -> dict[str, Any]:
    """The arguments of a forward, with what a model would keep or compute for nobody switched off where its forward lets one.

    A cache holds the keys and values of every layer, and the logits of a large vocabulary are the largest tensor there is.
    Rows of text that are padded on the left have their first token at position 0, as ``generate`` of transformers has it.

    Args:
        arguments: of the forward; what they say themselves stays as it is.
        logits: whether the logits of all tokens are read; if not, those of the last one are made. With ``labels`` all are.
    """
    known, lean = inspect.signature(model.forward).parameters, dict[str, Any]()
    if "position_ids" in known and (counted := _counted(model, arguments)) is not None:
        lean["position_ids"] = counted
    if "use_cache" in known and given_cache(arguments) is None:
        lean["use_cache"] = False
    if "logits_to_keep" in known and not logits and "labels" not in arguments:
        lean["logits_to_keep"] = 1
    return lean | dict(arguments)


def _counted(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor | None:
    """Positions of the tokens of rows that are padded on the left, ``(batch, length)``, for a model with a table of positions.

    ``None`` where the model counts right by itself: it has no such table, or one with a row for padding (RoBERTa).
    """
    tokens, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if tokens is None or mask is None or mask.shape != tokens.shape or bool(mask[:, 0].all()):
        return None
    others = {"position_ids", "inputs_embeds", "pixel_values", "decoder_input_ids"} & set(arguments)
    if others or given_cache(arguments) is not None:
        return None
    named = [module for name, module in model.named_modules() if "position" in name or name.endswith("wpe")]
    learned = [module for module in named if isinstance(module, nn.Embedding)]
    computed = [module for module in named if "SinusoidalPositional" in type(module).__name__]
    if (not learned and not computed) or any(module.padding_idx is not None for module in learned):
        return None
    return (mask.long().cumsum(1) - 1).clamp(min=0)
