"""From the configuration of a run to its data: corpus and tokenizer found, text encoded once, rows of both sides, identity."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sinklab.corpora import resolve_corpus
from sinklab.corpora.base import Corpus, Encoder, Split, drawable_ids
from sinklab.errors import ConfigurationError, InputError
from sinklab.results.blocks import counted
from sinklab.results.run import Progress, silent
from sinklab.training.config import DataConfig, PretrainingConfig
from sinklab.training.rows import RandomPositions, RowDataset, kept_rows
from sinklab.training.tokenizer import (
    TokenStream,
    cached_folder,
    encode,
    hash_key,
    hash_tokenizer,
    load_tokenizer,
    special_ids,
    storing,
    train_bpe,
    vocabulary_size,
    write_stream,
)

FORMAT = 1
"""Of the cache; a change of how text becomes tokens needs another number, or old folders would be taken for new ones."""

SAMPLE_CHARACTERS = 4096
"""Characters per entry of the vocabulary that the BPE is trained on, from the first training documents: 8 MB for 2,048."""

HELD_OUT_CHOICE = 8
"""Rows of held-out text encoded for each that is kept, so that the kept ones come from many documents."""


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedData:
    """What a run trains and is evaluated on.

    Args:
        train: the training rows.
        held_out: int64 ``(rows, context)``: rows of text that training never sees, evenly spaced over it, with the same
            beginning-of-sequence, end-of-sequence and fixed tokens and never with random ones. They do not depend on the seed.
        held_out_dataset: the same rows as a dataset.
        tokenizer: given or trained.
        identity: ``source``, ``revision``, ``licence``; ``documents``, ``characters``, ``tokens``, ``dtype`` and ``sha256`` of
            the training stream; ``rows`` and ``tokens_per_row`` cut from it, ``unique_rows`` and ``unique_tokens`` kept;
            ``held_out``, the same of the held-out stream; ``tokenizer``: ``name``, ``vocab_size``, ``sha256``.
    """

    train: RowDataset
    held_out: Tensor
    held_out_dataset: RowDataset
    tokenizer: PreTrainedTokenizerBase
    identity: dict[str, Any]

    def probe_rows(self, samples: int, seq_len: int) -> Tensor:
        """The first ``seq_len`` tokens of the first ``samples`` held-out rows, int64 ``(samples, seq_len)``.

        Raises:
            ConfigurationError: rows longer than those of training.
            InputError: fewer rows than asked for.
        """
        rows, context = self.held_out.shape
        if seq_len > context:
            raise ConfigurationError(f"probe rows of {seq_len:,} tokens are longer than those of training, {context:,}")
        if samples > rows:
            raise InputError(f"{samples} probe rows of {rows} held-out rows; lower watch.samples or raise data.held_out_rows")
        return self.held_out[:samples, :seq_len].clone()


def prepare_data(config: PretrainingConfig, cache: Path, progress: Progress = silent) -> PreparedData:
    """Training and held-out rows of a configuration; encodes the corpus if no run before has.

    The tokenizer and the encoded text are kept in ``cache``, in folders named after everything that decides them, so that runs
    and cells of a sweep share them; several processes may ask at once. Memory does not grow with the corpus.

    Args:
        cache: folder; made if need be.
        progress: called with the tokens encoded, and those in all, 0 where that is not known.

    Raises:
        UnknownNameError, InputError: no such corpus or tokenizer, no text in it, too little of it, or no room on the disk.
        ConfigurationError: settings that this corpus or tokenizer cannot follow.
    """
    data, context = config.data, config.model.max_position_embeddings
    settings = data.model_dump(include={"subset", "revision", "train_split", "held_out_split", "text_column"})
    if data.train_split == "train":
        del settings["train_split"]  # the default, which texts that are no dataset need not refuse
    corpus = resolve_corpus(data.corpus, **settings)
    if corpus.endless and data.max_tokens is None:
        tokens = config.training.steps * config.training.batch_size * context
        raise ConfigurationError(
            f"data.corpus {data.corpus!r} never ends: say how many tokens to read, such as data.max_tokens={tokens}, read once"
        )
    identity = corpus.identity
    source = {
        "format": FORMAT,
        "corpus": corpus.name,
        **dataclasses.asdict(identity),
        **data.model_dump(include={"subset", "train_split", "held_out_split", "text_column"}),
    }
    tokenizer = _tokenizer(data, corpus, source, cache)
    bos = _special(tokenizer, "bos") if data.bos != "none" else None
    eos = _special(tokenizer, "eos") if data.eos else None
    vocab_size, tokenizer_hash = vocabulary_size(tokenizer), hash_tokenizer(tokenizer)

    def stream(split: Split, limit: int | None) -> TokenStream:
        document_bos = bos if data.bos == "documents" else None
        key = hash_key([source, tokenizer_hash, split, limit, document_bos, eos])

        def build(folder: Path) -> None:
            stage = f"encoding the {'training' if split == 'train' else 'held-out'} text"
            write_stream(
                folder,
                encode(tokenizer, corpus.documents(split)),
                bos=document_bos,
                eos=eos,
                vocab_size=vocab_size,
                limit=limit,
                progress=lambda done: progress(stage, done, limit or 0),
            )

        try:
            return TokenStream.open(cached_folder(cache, f"tokens-{key}", build))
        except InputError as error:
            raise InputError(f"data.corpus {data.corpus!r}, {split} documents: {error}") from error

    row_bos = bos if data.bos == "rows" else None
    content = context - (row_bos is not None)
    if data.fixed_position is not None and data.fixed_token >= vocab_size:
        raise ConfigurationError(f"data.fixed_token {data.fixed_token} is no token: the vocabulary has {vocab_size} ids")
    form: dict[str, Any] = {
        "context": context,
        "bos": row_bos,
        "fixed": None if data.fixed_position is None else (data.fixed_position, data.fixed_token),
    }
    random = None
    if data.random_positions is not None:
        ids = np.array(drawable_ids(Encoder(vocab_size=vocab_size, special_ids=special_ids(tokenizer))))
        random = RandomPositions(*data.random_positions, ids, data.seed)

    text = stream("train", data.max_tokens)
    train = RowDataset(text, _training_rows(text, content, config), random=random, **form)
    held_out_text = stream("held_out", HELD_OUT_CHOICE * data.held_out_rows * context)
    held_out = RowDataset(held_out_text, _held_out_rows(held_out_text, content, config), **form)
    return PreparedData(
        train=train,
        held_out=torch.stack([held_out[index]["input_ids"] for index in range(len(held_out))]),
        held_out_dataset=held_out,
        tokenizer=tokenizer,
        identity={
            **dataclasses.asdict(identity),
            **text.identity,
            "rows": text.identity["tokens"] // content,
            "tokens_per_row": content,
            "unique_rows": len(train),
            "unique_tokens": len(train) * content,
            "held_out": {**held_out_text.identity, "rows": len(held_out)},
            "tokenizer": {
                "name": data.tokenizer or "byte-level BPE trained on the training text",
                "vocab_size": vocab_size,
                "sha256": tokenizer_hash,
            },
        },
    )


def _tokenizer(data: DataConfig, corpus: Corpus, source: dict[str, object], cache: Path) -> PreTrainedTokenizerBase:
    if data.tokenizer is not None:
        return load_tokenizer(data.tokenizer)

    def build(folder: Path) -> None:
        sample = _first(corpus.documents("train"), SAMPLE_CHARACTERS * data.vocab_size)
        trained = train_bpe(sample, data.vocab_size)
        with storing(cache):
            trained.save_pretrained(folder)

    return load_tokenizer(str(cached_folder(cache, f"tokenizer-{hash_key([source, data.vocab_size])}", build)))


def _first(documents: Iterable[str], characters: int) -> Iterator[str]:
    for document in documents:
        yield document[:characters]
        characters -= len(document)
        if characters <= 0:
            return


def _special(tokenizer: PreTrainedTokenizerBase, role: str) -> int:
    token = getattr(tokenizer, f"{role}_token_id")
    if token is None:
        what, off = ("beginning", "data.bos=none") if role == "bos" else ("end", "data.eos=false")
        raise ConfigurationError(f"data.{role} asks for an {what}-of-sequence token, and this tokenizer has none; set {off}")
    return int(token)


def _training_rows(text: TokenStream, content: int, config: PretrainingConfig) -> np.ndarray:
    """Numbers of the rows to train on."""
    data, context, batch = config.data, config.model.max_position_embeddings, config.training.batch_size
    tokens = text.identity["tokens"]
    total = tokens // content
    numbers = kept_rows(total, data.unique_fraction, data.seed)
    if len(numbers) >= batch:
        return numbers
    rows = f"{counted(total, 'row')} of {context:,} tokens"
    if len(numbers) < total:
        rows += f", of which data.unique_fraction {data.unique_fraction:g} keeps {len(numbers)}"
    cut = data.max_tokens is not None and tokens == data.max_tokens
    remedy = f"raise data.max_tokens, which is {data.max_tokens:,}" if cut else "give more text"
    raise InputError(
        f"too little data for one batch: data.corpus {data.corpus!r} gives {tokens:,} training tokens, {rows}, and "
        f"training.batch_size is {batch}; lower training.batch_size or model.max_position_embeddings, or {remedy}"
    )


def _held_out_rows(text: TokenStream, content: int, config: PretrainingConfig) -> np.ndarray:
    """Numbers of the rows to evaluate on, evenly spaced."""
    data, context = config.data, config.model.max_position_embeddings
    tokens = text.identity["tokens"]
    # A token or two are left at the end: which rows are evaluated does not change between versions.
    available = max(0, tokens - (context + 1 - content)) // content
    if available < data.held_out_rows:
        raise InputError(
            f"too little held-out text: data.corpus {data.corpus!r} holds out {tokens:,} tokens, {available:,} rows of "
            f"{context}, and data.held_out_rows is {data.held_out_rows}; lower it, or give more text"
        )
    return np.arange(data.held_out_rows, dtype=np.int64) * available // data.held_out_rows
