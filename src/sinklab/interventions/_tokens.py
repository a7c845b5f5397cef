"""What interventions on inputs share: where tokens stand, and the inputs of a model with tokens put in or taken out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sinklab.attention.host_arguments import given_cache
from sinklab.attention.intervention import InputIntervention, ModelInputs
from sinklab.errors import ConfigurationError


def cached_tokens(edit: InputIntervention, inputs: ModelInputs) -> int:
    """How many tokens the model has in its cache already; the encoder of an encoder–decoder has none."""
    cache = given_cache(inputs)
    if cache is None or (edit.tokens == "input_ids" and inputs.get("decoder_input_ids") is not None):
        return 0
    return int(cache.get_seq_length())


def token_positions(edit: InputIntervention, inputs: ModelInputs) -> Tensor:
    """Position of every token in its row: int64 ``(batch, seq_len)``, from the first that is not padding, -1 for padding.

    Raises:
        ConfigurationError: a mask that is not one number a token.
    """
    ids = inputs[edit.tokens]
    mask = inputs.get(names_beside(edit)[0])
    if mask is None:
        start = cached_tokens(edit, inputs)
        return torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape)
    if mask.ndim != 2:
        raise ConfigurationError(
            f"{edit.name}: where its tokens are cannot be read off a mask of shape {tuple(mask.shape)}; give one of shape "
            "(batch, seq_len)"
        )
    counted = torch.where(mask.bool(), mask.bool().cumsum(1) - 1, -1)
    return counted[:, counted.shape[1] - ids.shape[1] :]


def first_tokens(edit: InputIntervention, inputs: ModelInputs) -> Tensor:
    """Index of the first token of every row that is not padding, int64 ``(batch,)``."""
    return (token_positions(edit, inputs) == 0).int().argmax(1)


def put_in(edit: InputIntervention, inputs: ModelInputs, new: Tensor, behind: int) -> ModelInputs:
    """Inputs with tokens put in behind the first ``behind`` of every row: ids ``(count,)`` for all, or ``(batch, count)``."""
    batch, length = inputs[edit.tokens].shape
    count = new.shape[-1]
    here = (first_tokens(edit, inputs) + behind)[:, None]
    if int(here.max()) > length:
        raise ConfigurationError(f"{edit.name}: a row has fewer than the {behind} tokens behind which {count} are to be put")
    column = torch.arange(length + count, device=here.device)[None]
    source = torch.where(column < here, column, torch.where(column < here + count, -1, column - count))
    added = new.expand(batch, count).gather(1, (column - here).clamp(0, count - 1))
    return rearranged(edit, inputs, source, added)


def rearranged(edit: InputIntervention, inputs: ModelInputs, source: Tensor, new: Tensor) -> ModelInputs:
    """Inputs with tokens put in or taken out.

    Masks follow, positions are counted anew, and a new token is of the type of the first one.

    Args:
        source: int64 ``(batch, new_len)``: index that the token had, -1 for one that was not there.
        new: int64, broadcastable to the same shape: ids of those.

    Raises:
        ConfigurationError: something else is given token by token (labels), a cache, or positions that do not count tokens.
    """
    ids, shape = inputs[edit.tokens], inputs[edit.tokens].shape
    encodes = edit.tokens == "input_ids" and inputs.get("decoder_input_ids") is not None
    if given_cache(inputs) is not None and not encodes:
        raise ConfigurationError(
            f"{edit.name}: it changes the number of tokens, of which a cache and what is decoded with it would know nothing; "
            "run without past_key_values (generate(use_cache=False)), or edit the tokens before"
        )
    mask_name, positions_name = names_beside(edit)
    follows = {edit.tokens, mask_name, positions_name, "token_type_ids"}
    for name, value in inputs.items():
        own = not encodes or not (name.startswith("decoder_") or name == "labels")
        if own and name not in follows and isinstance(value, Tensor) and value.ndim and value.shape[:2] == shape:
            raise ConfigurationError(
                f"{edit.name}: it changes the number of tokens, and {name!r} is given for each of the {shape[1]}; leave it "
                "out, and align it yourself (kept() says where the old tokens are)"
            )
    positions = token_positions(edit, inputs)
    fresh, index = source < 0, source.clamp_min(0)
    inputs[edit.tokens] = torch.where(fresh, new, ids.gather(1, index))
    mask, given, types = inputs.get(mask_name), inputs.get(positions_name), inputs.get("token_type_ids")
    if mask is not None:
        inputs[mask_name] = torch.where(fresh, mask.new_ones(()), mask.gather(1, index))
    if given is not None:
        given = given.expand(shape)
        if not torch.equal(given[positions >= 0], positions[positions >= 0]):
            raise ConfigurationError(
                f"{edit.name}: {positions_name} that do not count the tokens of a row cannot be counted anew; leave them out"
            )
        inputs[positions_name] = token_positions(edit, inputs).clamp_min(0)
    if edit.tokens == "input_ids" and types is not None:
        first = types.gather(1, (positions == 0).int().argmax(1, keepdim=True))
        inputs["token_type_ids"] = torch.where(fresh, first, types.gather(1, index))
    return inputs


def names_beside(
    edit: InputIntervention,
) -> tuple[Literal["attention_mask", "decoder_attention_mask"], Literal["position_ids", "decoder_position_ids"]]:
    """Names of the mask and of the positions of the tokens that are edited."""
    if edit.tokens == "decoder_input_ids":
        return "decoder_attention_mask", "decoder_position_ids"
    return "attention_mask", "position_ids"
