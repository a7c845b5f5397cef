"""find_sinks(): the sinks of a model on a few texts of one's own, and what every head gives to the main one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinklab.errors import ConfigurationError, InputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from sinklab.models.loading import GivenModel
    from sinklab.models.tokenizer import GivenTokenizer
    from sinklab.sinks import Sinks

_FINDING = ("threshold", "place", "groups", "batch_size", "names", "together", "part")


def find_sinks(
    model: GivenModel,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    tokenizer: GivenTokenizer | None = None,
    **settings: Any,
) -> Sinks:
    """Find the sinks of a model on some texts, and what every head gives to the main one.

    Args:
        model: its name, its directory, or itself.
        inputs: a text or several, token ids ``(samples, seq_len)``, or the model's inputs by name.
        tokenizer: in place of the model's own, for texts and to name the tokens of sinks.
        settings: ``threshold``, ``place``, ``batch_size`` and others as of :func:`sinklab.sinks.find_sinks`; ``dtype``,
            ``device``, ``revision`` and others as of :func:`sinklab.load_model`.

    Raises:
        InputError: texts without a tokenizer; see the errors of loading and of :func:`sinklab.sinks.find_sinks`.
    """
    import torch

    from sinklab.attention.modules import input_device
    from sinklab.models.loading import model_and_tokenizer
    from sinklab.sinks.finding import find_sinks as find

    finding = {name: settings.pop(name) for name in _FINDING if name in settings}
    plain, reads = model_and_tokenizer(model, tokenizer, **settings)
    if isinstance(inputs, str) or (not isinstance(inputs, torch.Tensor | Mapping)):
        inputs = _ids([inputs] if isinstance(inputs, str) else inputs, reads)
    inputs = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else inputs
    place = input_device(plain)
    decode = None if reads is None else lambda token: str(reads.decode([token]))
    return find(plain.eval(), {name: tensor.to(place) for name, tensor in inputs.items()}, decode=decode, **finding)


def _ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Tensor]:
    """Ids of texts, padded behind."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    if tokenizer is None:
        raise InputError("texts need a tokenizer, and the model has none; give one with `tokenizer`, or token ids")
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigurationError("`inputs` is a list with something that is no text; give texts, ids, or a mapping of tensors")
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    ones = [torch.ones_like(row) for row in rows]
    return {"input_ids": pad_sequence(rows, batch_first=True), "attention_mask": pad_sequence(ones, batch_first=True)}
