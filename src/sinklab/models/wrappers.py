"""The model of transformers inside what others put round it: ``torch.compile``, data parallelism, the adapters of PEFT, the
poolings of sentence-transformers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinklab.attention.anatomy import model_inside, require_module
from sinklab.attention.modules import out_of_peft, out_of_torch
from sinklab.errors import InputError

__all__ = ["tokenizer_inside", "transformers_model", "unwrapped"]


def unwrapped(model: Any) -> Any:
    """The model itself: out of ``torch.compile``, DataParallel, DistributedDataParallel, PEFT and sentence-transformers."""
    model = out_of_torch(model)
    inner = _out_of_sentences(out_of_peft(model))
    return model if inner is model else unwrapped(inner)


def transformers_model(model: object) -> PreTrainedModel:
    """The model of transformers itself, out of what others put round it, for what can be done with no other.

    Raises:
        InputError: no module of torch, or one that is no model of transformers and holds none where one is looked for.
    """
    require_module(model)
    found = unwrapped(model)
    if not isinstance(found, PreTrainedModel):
        raise InputError(f"{type(found).__name__} is no model of transformers; give {model_inside(found)}")
    return found


def tokenizer_inside(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a model of sentence-transformers holds beside the model of transformers; ``None`` of others."""
    model = out_of_torch(model)
    tokenizer = None if _out_of_sentences(model) is model else getattr(model, "tokenizer", None)
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def _out_of_sentences(model: Any) -> Any:
    """The model of transformers in front of what sentence-transformers makes of its hidden states; another as it is."""
    inner = getattr(model, "transformers_model", None)
    return inner if isinstance(inner, PreTrainedModel) else model
