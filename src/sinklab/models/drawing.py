"""Drawing: what a model is shown from a corpus, as samples of the kind that it reads."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import HELD, Corpus, Encoder
from sinklab.corpora.samples import Kind, Samples
from sinklab.errors import ConfigurationError, InputError, first_line
from sinklab.models.loading import LoadedModel, num_parameters
from sinklab.models.losses import IGNORED, hide_tokens, is_two_sided, loss_kind
from sinklab.models.positions import require_positions
from sinklab.models.tokenizer import kind_of, load_processor
from sinklab.results.blocks import counted


def reading_part(loaded: LoadedModel) -> LoadedModel:
    """The part of a model that reads pictures or sound: the tower of pictures beside that of texts, the encoder of two sides.

    A model without such a part is given back as it is.
    """
    model = loaded.model
    parameters = inspect.signature(model.forward).parameters
    part: object = None
    if {"input_ids", "pixel_values"} <= parameters.keys() and not model.can_generate():
        part = getattr(model, "vision_model", None)
    elif kind_of(model) == "audio" and "decoder_input_ids" in parameters:
        part = model.get_encoder()
    if not isinstance(part, PreTrainedModel) or kind_of(part) not in ("image", "audio"):
        return loaded
    processor = loaded.processor
    if processor is None and loaded.source is not None:
        processor = load_processor(loaded.source, loaded.name, kind_of(part), False)
    return dataclasses.replace(
        loaded, model=part, tokenizer=None, encoder=Encoder(0), processor=processor, num_parameters=num_parameters(part)
    )


def _halves(loaded: LoadedModel, corpus: Corpus, seq_len: int, samples: int, seed: int, bos: bool) -> Samples:
    """Of twice as many tokens the first half is the source and the second half the target, which goes on and has no end."""
    front, back = loaded.encoder.frame(bos)
    inner = seq_len - len(front) - len(back)
    if inner < 1:
        raise ConfigurationError(f"`seq_len` {seq_len} holds {loaded.encoder.bos_name} and no token of a source")
    bare = dataclasses.replace(loaded.encoder, closing_ids=())  # the frame goes round the source alone
    whole = corpus.sample(bare, seq_len=inner + seq_len, samples=samples, seed=seed, bos=False)
    source = torch.cat((_repeated(front, samples), whole[:, :inner], _repeated(back, samples)), dim=1)
    return _samples(
        loaded.model, source, None, whole[:, inner:],
        f"Source and target are halves of one text: {inner:,} tokens are the source, the {seq_len:,} after them the target.",
    )  # fmt: skip


def _drawn_pairs(loaded: LoadedModel, corpus: Corpus, seq_len: int, samples: int, seed: int, bos: bool) -> Samples:
    """Pairs of a corpus, each text with the tokens that are put round it, cut and padded to the longest, padding masked."""
    pairs = list(islice(corpus.pairs(seed), samples))
    if len(pairs) < samples:
        raise InputError(f"corpus {corpus.label!r} holds {len(pairs)} of {samples} pairs; lower `samples`")
    cut = 0
    sources, targets = [], []
    front, back = loaded.encoder.frame(bos)
    for source_text, target_text in pairs:
        whole, target = loaded.encoder.behind(front).encode(source_text), _target(loaded, target_text)
        ids = whole[: max(0, seq_len - len(front) - len(back))]
        sources.append([*front, *ids, *back] if ids else [])
        targets.append(target[:seq_len])
        cut += (len(ids) < len(whole)) + (len(target) > seq_len)
    for name, rows in (("source", sources), ("target", targets)):
        if empty := [number for number, row in enumerate(rows) if not row]:
            raise InputError(f"the tokenizer makes no token of the {name} {pairs[empty[0]][name == 'target'][:40]!r}")
    source, labels = _padded(sources, _padding(loaded, sources, targets)), _padded(targets, IGNORED)
    lengths = [f"{min(map(len, rows))} to {max(map(len, rows))}" for rows in (sources, targets)]
    definition = (
        f"Samples are pairs: sources of {lengths[0]} tokens and targets of {lengths[1]}, {counted(cut, 'text')} cut to "
        f"{seq_len}."
    )
    return _samples(loaded.model, source, _padded([[1] * len(row) for row in sources], 0), labels, definition)


def _padding(loaded: LoadedModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> int:
    """The padding token of the tokenizer or the model; of rows of one length, which need none, any."""
    pad = loaded.tokenizer.pad_token_id if loaded.tokenizer is not None else None
    pad = getattr(loaded.model.config, "pad_token_id", None) if pad is None else pad
    if pad is not None:
        return int(pad)
    if len(set(map(len, sources))) > 1 or len(set(map(len, targets))) > 1:
        raise ConfigurationError(f"{type(loaded.model).__name__} has no padding token, and the pairs differ in length")
    return 0


def shifted(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """What the decoder reads while it predicts the labels: the token that begins a target, then the labels up to the last.

    By the model's own function, since some begin with the end of the target (mBART).
    """
    try:
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            return model.prepare_decoder_input_ids_from_labels(labels=labels)
        start = model.config.decoder_start_token_id
        padded = labels.masked_fill(labels == IGNORED, getattr(model.config, "pad_token_id", None) or 0)
        return torch.cat((labels.new_full((len(labels), 1), start), padded[:, :-1]), dim=1)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        known = getattr(model.config, "decoder_start_token_id", None)
        why = first_line(error) if known is not None else "its configuration has no decoder_start_token_id"
        raise ConfigurationError(
            f"{type(model).__name__} cannot be given a target: {why}; set decoder_start_token_id in config.json"
        ) from error


def _samples(model: PreTrainedModel, source: Tensor, mask: Tensor | None, labels: Tensor, definition: str) -> Samples:
    device = next(model.parameters()).device
    arguments = {"input_ids": source, "decoder_input_ids": shifted(model, labels.to(device)).cpu()}
    if mask is not None:
        arguments |= {"attention_mask": mask, "decoder_attention_mask": (labels != IGNORED).long()}
    return Samples(arguments, kind="pairs", targets=labels, definition=definition)


def _repeated(ids: tuple[int, ...], samples: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64).expand(samples, -1)


def _target(loaded: LoadedModel, text: str) -> list[int]:
    """Ids of a target with its closing tokens; some tokenizers have a vocabulary of their own for it."""
    loaded.encoder.encode("")  # refuses a model without a tokenizer
    assert loaded.tokenizer is not None
    return list(loaded.tokenizer(text_target=text, verbose=False)["input_ids"])


def _padded(rows: list[list[int]], value: int) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.int64)


AUTO = "auto"
"""As a corpus: the default for the kind of model."""

DEFAULTS: dict[Kind, str] = {"text": "python_source", "pairs": "python_source", "image": "photographs", "audio": "chirps"}
"""Kind of model to what it is measured on if nothing is said; none of it needs a download."""


def default_corpus(loaded: LoadedModel) -> Corpus:
    """What a model is measured on if nothing is said: Python source, photographs, or synthetic sound.

    A model that was made to talk, as its chat template says, reads prose.
    """
    kind = kind_of(loaded.model)
    if kind == "text" and getattr(loaded.tokenizer, "chat_template", None):
        from sinklab.corpora.python_manual import PythonManual

        if PythonManual.is_there():
            return PythonManual()
    return resolve_corpus(DEFAULTS[kind])


def draw_samples(loaded: LoadedModel, corpus: Corpus, *, seq_len: int, samples: int, seed: int, bos: bool) -> Samples:
    """Samples of a corpus for a model, ready for its forward; the same arguments give the same samples.

    Args:
        seq_len: tokens of a sample of text, frames of one of sound; a model of pictures has as many positions as it has.
        samples: how many.
        bos: put the beginning-of-sequence token in front; a model without one is a :class:`ConfigurationError`.

    Raises:
        InputError: the corpus holds fewer samples than asked for, or nothing that the model reads.
    """
    from sinklab.models.media import draw_described, draw_pictures, draw_recordings, reads_described

    kind = kind_of(loaded.model)
    two_sided = kind == "text" and is_two_sided(loaded.model)
    if "image" in corpus.kinds and reads_described(loaded.model):
        return draw_described(loaded, corpus, samples=samples, seed=seed)
    if not corpus.kinds & ({"text", "pairs"} if two_sided else {kind}):
        held = " or ".join(HELD[known] for known in sorted(corpus.kinds))
        advice = {"image": "a folder of pictures, or photographs"}
        advice |= {"audio": "a folder of wav files, or chirps"}
        raise InputError(
            f"{type(loaded.model).__name__} reads {HELD[kind]}, and corpus {corpus.label!r} holds {held}; give "
            f"{advice.get(kind, 'a text file, a folder of texts, or python_source')}"
        )
    if kind != "text":
        if kind == "image":
            return draw_pictures(loaded, corpus, samples=samples, seed=seed)
        return draw_recordings(loaded, corpus, seq_len=seq_len, samples=samples, seed=seed)
    require_positions(loaded.model, seq_len)
    if two_sided:
        draw = _drawn_pairs if "pairs" in corpus.kinds else _halves
        return draw(loaded, corpus, seq_len, samples, seed, bos)
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
