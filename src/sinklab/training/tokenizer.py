"""Tokenizers of pre-training: a byte-level BPE trained on the spot, or one that is given; and text to token ids in bulk."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sinklab.errors import InputError

BOS, EOS = "<|bos|>", "<|eos|>"

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")
"""Without any of these transformers makes an empty tokenizer for some architectures, which reads every text as nothing."""

CHUNK = 1 << 21
"""Characters encoded together: about 700,000 tokens and 300 MB. A longer document is cut here, after a line end."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE in GPT-2's manner with ``<|bos|>`` (id 0, put in front of a text) and ``<|eos|>`` (id 1, also padding).

    Args:
        texts: read once.
        vocab_size: with the two special tokens and the 256 bytes; fewer where the texts have too few pairs to merge.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory, or of that name on the hub; code that comes with it is never run.

    Raises:
        InputError: there is none, or it cannot be loaded.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not any(next(path.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise InputError(f"data.tokenizer {name!r} is a directory without the files of a tokenizer, such as tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(path if path.is_dir() else name, trust_remote_code=False)
    except Exception as error:
        # tokenizers raises bare Exception for a damaged tokenizer.json.
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"data.tokenizer {name!r} cannot be loaded; it is a directory or a hub id: {reason}") from error


def beginning_as_rows(tokenizer: PreTrainedTokenizerBase, bos: bool) -> PreTrainedTokenizerBase:
    """A tokenizer that begins a text as the rows of a training begin, for those who use the trained model.

    Without it a model that was trained without BOS reads, in every program, a token that it has never seen.

    Returns:
        The tokenizer itself where it does so already, or where it is not a fast one, whose own code decides; else a copy.
    """
    if tokenizer.bos_token_id is None or _begins(tokenizer) == bos:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    if hasattr(changed, "add_bos_token"):
        changed.add_bos_token = bos
    if isinstance(changed, PreTrainedTokenizerFast) and _begins(changed) != bos:
        front = [changed.bos_token] if bos else []
        changed.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*front, "$A"], pair=[*front, "$A", *front, "$B"], special_tokens=[(changed.bos_token, changed.bos_token_id)]
        )
    return changed


def _begins(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it puts BOS in front of a text; an empty one, as there are vocabularies without any letter."""
    return tokenizer("", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id that the tokenizer can give."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that stand for no text."""
    added = {token for token, entry in getattr(tokenizer, "added_tokens_decoder", {}).items() if entry.special}
    return frozenset(tokenizer.all_special_ids) | added


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides the ids of a text, in hexadecimal: vocabulary, merges, normalisation; padding does not."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        description = _private(tokenizer).to_str()
    else:
        description = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    return hashlib.sha256(description.encode()).hexdigest()


class Piece(NamedTuple):
    """Token ids of a document or, of a very long one, a part.

    Args:
        ids: int64 ``(tokens,)``, without special tokens.
        characters: of the text.
        first, last: whether the document begins and ends here.
    """

    ids: np.ndarray
    characters: int
    first: bool
    last: bool


def encode(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> Iterator[Piece]:
    """Token ids of documents, in order; only a chunk of some two million characters is in memory at a time.

    Special tokens that are spelled out in a text are encoded as the characters that they are. Blank documents are left out.
    """
    private = _private(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerFast) else None
    for batch in _batches(documents):
        texts = [text for text, _, _ in batch]
        if private is not None:
            rows = [encoding.ids for encoding in private.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            rows = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        for ids, (text, first, last) in zip(rows, batch, strict=True):
            yield Piece(np.array(ids, dtype=np.int64), len(text), first, last)


def _private(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the Rust tokenizer with what a caller may have set taken out."""
    private = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    private.no_padding()
    private.no_truncation()
    private.encode_special_tokens = True
    return private


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool, bool]]]:
    """Documents as (text, begins, ends), grouped to about ``CHUNK`` characters."""
    batch: list[tuple[str, bool, bool]] = []
    size = 0
    for document in documents:
        if not document.strip():
            continue
        start = 0
        while start < len(document):
            stop = _cut(document, start)
            batch.append((document[start:stop], start == 0, stop == len(document)))
            size += stop - start
            start = stop
            if size >= CHUNK:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _cut(document: str, start: int) -> int:
    """Where the part that begins at ``start`` ends: after the last line end or space within ``CHUNK`` characters."""
    stop = start + CHUNK
    if stop >= len(document):
        return len(document)
    for mark in ("\n", " "):
        cut = document.rfind(mark, start, stop)
        if cut >= 0:
            return cut + 1
    return stop
