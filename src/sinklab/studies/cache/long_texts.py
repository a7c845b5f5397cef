"""Long texts of a corpus: the beginnings of documents, one a row, for measurements that need thousands of tokens in a row."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.corpora.base import PASSAGES_IN_VAIN, Corpus, Encoder, TextCorpus
from sinklab.corpora.text_file import TextFile
from sinklab.errors import ConfigurationError, InputError, calling
from sinklab.results.requirements import require_memory

__all__ = ["long_texts"]


def long_texts(text: Corpus, encoder: Encoder, *, tokens: int, documents: int, seed: int, bos: bool) -> Tensor:
    """The beginnings of up to ``documents`` texts, int64 ``(documents, tokens)``; no two share a token.

    A text file is cut into consecutive pieces; of a corpus with documents those of its held-out part are taken, in their order,
    which have enough tokens; other corpora are drawn from.

    Args:
        bos: put the beginning-of-sequence token at position 0; a text then gives ``tokens - 1`` of its own.

    Raises:
        InputError: no text is long enough.
        ConfigurationError: fewer than 2 tokens or 1 document.
    """
    if tokens < 2 or documents < 1:
        raise ConfigurationError(f"`tokens` must be at least 2 and `documents` at least 1, got {tokens} and {documents}")
    require_memory(16 * tokens, f"`tokens` {tokens}")
    if type(text).documents is Corpus.documents:
        with calling(seq_len="tokens", samples="documents"):
            return text.sample(encoder, seq_len=tokens, samples=documents, seed=seed, bos=bos)
    own = tokens - bos
    if isinstance(text, TextFile):
        ids = encoder.encode(text.text)
        rows = [ids[start : start + own] for start in range(0, len(ids) - own + 1, own)][:documents]
        longest = len(ids)
    else:
        rows, longest = _beginnings(text, encoder, own, documents)
    if not rows:
        raise InputError(
            f"corpus {text.name!r} ({text.identity.source}) is too short: its longest text has {longest:,} tokens and {own:,} "
            "are wanted; lower `tokens`, or " + text.more
        )
    result = torch.tensor(rows, dtype=torch.int64)
    return torch.nn.functional.pad(result, (1, 0), value=encoder.bos_token_id) if bos else result


def _beginnings(text: Corpus, encoder: Encoder, length: int, number: int) -> tuple[list[list[int]], int]:
    rows: list[list[int]] = []
    longest = in_vain = 0
    patience = text.patience if isinstance(text, TextCorpus) else PASSAGES_IN_VAIN
    for document in text.documents("held_out"):
        ids = _first_ids(encoder, document, length)
        longest = max(longest, len(ids))
        if len(ids) == length:
            rows.append(ids)
            in_vain = 0
        else:
            in_vain += 1
        if len(rows) == number or in_vain >= patience:
            break
    return rows, longest


def _first_ids(encoder: Encoder, document: str, length: int) -> list[int]:
    """Up to ``length`` first ids; no more of the text is encoded than is likely to be needed."""
    part = document[: 8 * length]
    ids = encoder.encode(part)
    if len(ids) <= length and len(part) < len(document):
        ids = encoder.encode(document)
    return ids[:length]
