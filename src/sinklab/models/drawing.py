"""Drawing: what a model is shown from a corpus, as samples of the kind that it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import HELD, Corpus
from sinklab.corpora.samples import Kind, Samples
from sinklab.errors import InputError
from sinklab.models.lengths import require_positions
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import hide_tokens, is_two_sided, loss_kind
from sinklab.models.media import draw_pictures, draw_recordings, reading_part
from sinklab.models.pairs import draw_pairs
from sinklab.models.processor import kind_of

__all__ = ["AUTO", "default_corpus", "draw_samples", "reading_part"]

AUTO = "auto"
"""As a corpus: the default for the kind of model."""

DEFAULTS: dict[Kind, str] = {"text": "python_source", "pairs": "python_source", "image": "photographs", "audio": "chirps"}
"""Kind of model to what it is measured on if nothing is said; none of it needs a download."""


def default_corpus(loaded: LoadedModel) -> Corpus:
    """What a model is measured on if nothing is said: Python source, photographs, or synthetic sound."""
    return resolve_corpus(DEFAULTS[kind_of(loaded.model)])


def draw_samples(loaded: LoadedModel, corpus: Corpus, *, seq_len: int, samples: int, seed: int, bos: bool) -> Samples:
    """Samples of a corpus for a model, ready for its forward; the same arguments give the same samples.

    Args:
        seq_len: tokens of a sample of text, frames of one of sound; a model of pictures has as many positions as it has.
        samples: how many.
        bos: put the beginning-of-sequence token in front.

    Raises:
        ConfigurationError: ``bos`` asked of a model without such a token, or lengths below 2.
        InputError: the corpus holds fewer samples than asked for, or nothing that the model reads.
    """
    kind = kind_of(loaded.model)
    two_sided = kind == "text" and is_two_sided(loaded.model)
    if not corpus.kinds & ({"text", "pairs"} if two_sided else {kind}):
        held = " or ".join(HELD[known] for known in sorted(corpus.kinds))
        advice = {"image": "a folder of pictures, a dataset with a column of images, or photographs"}
        advice |= {"audio": "a folder of wav files, or chirps"}
        raise InputError(
            f"{type(loaded.model).__name__} reads {HELD[kind]}, and corpus {corpus.label!r} holds {held}; give "
            f"{advice.get(kind, 'a text file, a folder of texts, or python_source')}"
        )
    if kind == "image":
        return draw_pictures(loaded, corpus, samples=samples, seed=seed)
    if kind == "audio":
        return draw_recordings(loaded, corpus, seq_len=seq_len, samples=samples, seed=seed)
    require_positions(loaded.model, seq_len)
    if two_sided:
        return draw_pairs(loaded, corpus, seq_len=seq_len, samples=samples, seed=seed, bos=bos)
    tokens = corpus.sample(loaded.encoder, seq_len=seq_len, samples=samples, seed=seed, bos=bos)
    return Samples({"input_ids": tokens}, scored=_masked(loaded, tokens, seed))


def _masked(loaded: LoadedModel, tokens: Tensor, seed: int) -> Samples | None:
    """What the masked-LM loss of some texts is taken on; ``None`` for other models, and where no mask token is known."""
    mask: int | None = getattr(loaded.tokenizer, "mask_token_id", None)
    if loss_kind(loaded.model) != "masked token" or mask is None:
        return None
    free = ~torch.isin(tokens, torch.tensor(sorted(loaded.encoder.special_ids)))
    hidden, targets = hide_tokens(tokens, free, mask, seed=seed)
    return Samples({"input_ids": hidden}, targets=targets)
