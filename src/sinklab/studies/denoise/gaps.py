"""What is masked of a text, and by which token; and the models and settings with which nothing can be filled in."""

from __future__ import annotations

import inspect
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.anatomy import on_seam_modules
from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.looks_ahead import looks_ahead
from sinklab.attention.placement import input_device
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import loss_kind
from sinklab.models.tokenizer import kind_of
from sinklab.results.intervals import require_threshold
from sinklab.results.naming import counted

__all__ = ["gaps_of", "mask_token_of", "require_settings"]

ASKED_WITH = 32
"""Tokens that a model is asked with: more than the prefix of an instruction, less than any context."""

FILLS = "give a model that fills gaps in a text (BERT, ALBERT, ModernBERT; transformers calls its class …ForMaskedLM)"


def require_settings(*, samples: int, steps: int, prompt: int, threshold: float, batch_size: int | None) -> None:
    """Refuse numbers that no measurement can be made with, before a model is loaded.

    Raises:
        ConfigurationError: fewer than two samples, no step, a negative prompt, a threshold outside [0, 1), no text a forward.
    """
    if samples < 2:
        raise ConfigurationError(f"`samples` {samples}: an interval over samples needs two or more")
    if steps < 1:
        raise ConfigurationError(f"`steps` must be at least 1, got {steps}")
    if prompt < 0:
        raise ConfigurationError(f"`prompt` {prompt} must be 0 or more: tokens that are not masked")
    require_threshold(threshold, "`threshold`")
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"`batch_size` must be at least 1, got {batch_size}")


def mask_token_of(loaded: LoadedModel, given: int | None) -> int:
    """The id of the mask token: that of the tokenizer, or the one that is given.

    A model whose class does not say that it fills gaps (a decoder that was trained to, without its causal mask) is believed
    where its mask token is given.

    Raises:
        ConfigurationError: no mask token is known, the one given is outside the vocabulary, or not that of the tokenizer.
        UnsupportedModelError: the model fills no gaps in a text.
    """
    model, name = loaded.model, type(loaded.model).__name__
    if kind_of(model) != "text":
        raise UnsupportedModelError(f"{name} reads no text, and denoising fills in tokens; {FILLS}")
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:  # BART, and DiffusionGemma with its canvas
        raise UnsupportedModelError(f"{name} writes one text behind another, and denoising fills in one; {FILLS}")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no head that predicts tokens; {FILLS}")
    if not on_seam_modules(model):  # whether it sees what is behind a gap cannot be asked of it either
        raise UnsupportedModelError(
            f"{name} computes attention in its own code, not through the attention interface of transformers, so that no sink "
            f"can be seen in it; {FILLS}"
        )
    if not (looks_ahead(model) or (given is not None and _sees_the_end(model))):
        raise UnsupportedModelError(f"{name} predicts the next token and sees none behind a gap; {FILLS}")
    known: int | None = getattr(loaded.tokenizer, "mask_token_id", None)
    if given is None and (known is None or loss_kind(model) != "masked token"):
        why = "its tokenizer names no mask token" if known is None else f"nothing says that {name} was trained to fill gaps"
        raise ConfigurationError(f"{why}; give the id of the token that stood in their place in training with `mask_token`")
    rows = model.get_input_embeddings().weight.shape[0]
    mask = known if given is None else given
    assert mask is not None
    if not 0 <= mask < rows:
        raise ConfigurationError(f"`mask_token` {mask} is no token of {name}, which has {rows:,}")
    if known is not None and mask != known:
        raise ConfigurationError(f"`mask_token` {mask} is not that of the tokenizer, {known}; leave it out")
    return mask


class _End(Watcher):
    """Notes whether the first token sees the last one."""

    name: ClassVar[str] = "end"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.is_seen = False

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        self.is_seen = self.is_seen or bool(call.visible.block(0, 1, call.kv_len - 1, call.kv_len).any())


@torch.inference_mode()
def _sees_the_end(model: PreTrainedModel) -> bool:
    """Whether the first of a few tokens sees the last, in a decoder whose prefix is all of a text."""
    probe = _End()
    with attend(model, [probe], verify=False):
        model(input_ids=torch.arange(ASKED_WITH, device=input_device(model))[None])
    return probe.is_seen


def gaps_of(loaded: LoadedModel, tokens: Tensor, *, prompt: int, steps: int) -> Tensor:
    """Boolean ``(texts, length)``: which tokens are masked at the start: all but special ones and the prompt.

    Raises:
        ConfigurationError: a text has fewer of them than there are steps.
    """
    free = ~torch.isin(tokens, torch.tensor(sorted(loaded.encoder.special_ids)))
    free &= free.cumsum(1) > prompt
    least = int(free.sum(1).min())
    if least < steps:
        left = f" behind a prompt of {prompt}" if prompt else ""
        raise ConfigurationError(
            f"`steps` {steps}: a text has {counted(least, 'token')} to fill in{left}, and every step fills in one or more; "
            "take fewer steps or longer texts (`seq_len`)"
        )
    return free
