"""Rows of tokens for pre-training: read once, encoded once, packed by explicit rules, and the same for everybody who asks.

What row ``i`` holds depends on the configuration and on ``i`` alone: not on workers, processes, epochs or what was read before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from sinklab.corpora._corpus import Corpus, Encoder, Split, drawable_ids
from sinklab.corpora._resolve import resolve_corpus
from sinklab.errors import ConfigurationError, InputError
from sinklab.pretraining.config import DataConfig, PretrainingConfig
from sinklab.pretraining.token_cache import TokenStream, cached_folder, hash_key, storing, write_stream
from sinklab.pretraining.tokenizer import (
    encode,
    hash_tokenizer,
    load_tokenizer,
    special_ids,
    train_bpe,
    vocabulary_size,
)

__all__ = ["PreparedData", "Progress", "Rows", "prepare_data"]

Progress = Callable[[str, int, int], None]
"""Called with the stage, the tokens done and the tokens in all (0 where that is not known)."""

FORMAT = 1
"""Of the cache; a change of how text becomes tokens needs another number, or old folders would be taken for new ones."""

SAMPLE_CHARACTERS = 4096
"""Characters per entry of the vocabulary that the BPE is trained on, from the first training documents: 8 MB for 2,048."""

HELD_OUT_CHOICE = 8
"""Rows of held-out text encoded for each that is kept, so that the kept ones come from many documents."""

ROWS, RANDOM = 0, 1
"""What a draw is for; keeps the draws of one seed apart."""


class Rows(Dataset):
    """Rows cut from a stream of documents, map-style.

    Row ``i`` is ``{"input_ids", "labels"}``, int64 ``(context,)``; with ``isolated`` also ``"position_ids"``, which begin at 0
    again where a document begins. Labels are the ids themselves, for a model that shifts them; with ``isolated`` the first
    token of a document that begins inside the row is -100, because nothing that it may see predicts it.

    Args:
        stream: the documents.
        numbers: which of the stream's rows, int64 ``(rows,)``; row ``n`` begins at token ``n × content``.
        context: tokens of a row.
        bos: id in front of every row, which then holds ``content = context - 1`` tokens of the stream; or ``None``.
        isolated: give position ids.
        random: start and stop of the positions that hold random tokens, ids to draw from, seed. The draw depends on the seed
            and on the row's number in the stream: the same row is the same in every epoch and in every subset.
        fixed: position and id of a token that every row holds.
    """

    def __init__(
        self,
        stream: TokenStream,
        numbers: np.ndarray,
        *,
        context: int,
        bos: int | None = None,
        isolated: bool = False,
        random: tuple[int, int, np.ndarray, int] | None = None,
        fixed: tuple[int, int] | None = None,
    ) -> None:
        self.stream, self.numbers, self.context, self.bos = stream, numbers, context, bos
        self.isolated, self.random, self.fixed = isolated, random, fixed
        self.content = context - (bos is not None)
        self._tokens, self._starts = stream.tokens(), stream.starts()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = int(self.numbers[index])
        begin = number * self.content
        row = self._tokens[begin : begin + self.content].astype(np.int64)
        if self.bos is not None:
            row = np.concatenate(([self.bos], row))
        if self.random is not None:
            start, stop, ids, seed = self.random
            row[start:stop] = ids[np.random.default_rng((seed, RANDOM, number)).integers(len(ids), size=stop - start)]
        if self.fixed is not None:
            position, token = self.fixed
            row[position] = token
        labels = row.copy()
        if not self.isolated:
            return {"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(labels)}
        inside = np.searchsorted(self._starts, (begin + 1, begin + self.content))
        starts = self._starts[slice(*inside)] - begin + (self.context - self.content)
        labels[starts] = -100
        first = np.zeros(self.context, dtype=np.int64)  # where the document of each token begins
        first[starts] = starts
        positions = np.arange(self.context) - np.maximum.accumulate(first)
        return {
            "input_ids": torch.from_numpy(row),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }

    def leading(self, index: int, length: int, front: int | None, bos: int | None) -> Tensor:
        """The first tokens of a row's text behind ``front`` (or nothing), int64 ``(length,)``; only the fixed token is put in.

        A ``bos`` that the stream has at that place is left out, so that ``front`` is not doubled or smuggled in.
        """
        begin = int(self.numbers[index]) * self.content
        row = self._tokens[begin : begin + length + 1].astype(np.int64)
        row = row[int(row[0] == bos) :]
        row = (row if front is None else np.concatenate(([front], row)))[:length]
        if self.fixed is not None and self.fixed[0] < length:
            row[self.fixed[0]] = self.fixed[1]
        return torch.from_numpy(row)

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled with all that it maps.
        return {name: value for name, value in vars(self).items() if name not in ("_tokens", "_starts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens, self._starts = self.stream.tokens(), self.stream.starts()


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedData:
    """What a run trains and is evaluated on.

    Args:
        train: the training rows.
        held_out: int64 ``(rows, context)``: rows of text that training never sees, evenly spaced over it, with the same
            beginning-of-sequence, end-of-sequence and fixed tokens and never with random ones. They do not depend on the seed.
        held_out_dataset: the same rows with what :class:`Rows` gives besides ids: labels, and position ids when isolated.
        tokenizer: given or trained.
        identity: ``source``, ``revision``, ``licence``; ``documents``, ``characters``, ``tokens``, ``dtype`` and ``sha256`` of
            the training stream; ``rows`` and ``tokens_per_row`` cut from it, ``unique_rows`` and ``unique_tokens`` kept;
            ``held_out``, the same of the held-out stream; ``tokenizer``: ``name``, ``vocab_size``, ``sha256``.
    """

    train: Rows
    held_out: Tensor
    held_out_dataset: Rows
    tokenizer: PreTrainedTokenizerBase
    identity: dict[str, Any]

    def probe_rows(self, samples: int, seq_len: int, bos: bool | None = None) -> Tensor:
        """The first ``seq_len`` tokens of the first held-out rows, int64 ``(samples, seq_len)``.

        Args:
            bos: with the beginning-of-sequence token in front, without it (the text begins a token earlier), or as in
                training.

        Raises:
            ConfigurationError: rows longer than those of training, or a token in front that does not exist or would be
                overwritten by the fixed one.
            InputError: fewer rows than asked for.
        """
        rows = self.held_out_dataset
        if seq_len > rows.context:
            raise ConfigurationError(f"probe rows of {seq_len} tokens are longer than those of training, {rows.context}")
        if samples > len(rows):
            raise InputError(
                f"{samples} probe rows are asked for and there are {len(rows)} held-out rows; lower watch.samples or raise "
                "data.held_out_rows"
            )
        if bos is None:
            return self.held_out[:samples, :seq_len].clone()
        token = self.tokenizer.bos_token_id
        if bos and token is None:
            raise ConfigurationError("this tokenizer has no beginning-of-sequence token; set watch.bos to false or null")
        if bos and rows.fixed is not None and rows.fixed[0] == 0:
            raise ConfigurationError("watch.bos puts a token at position 0, where data.fixed_position has put another")
        return torch.stack([rows.leading(index, seq_len, token if bos else None, token) for index in range(samples)])


def prepare_data(config: PretrainingConfig, cache: Path, progress: Progress | None = None) -> PreparedData:
    """Training and held-out rows of a configuration; encodes the corpus if no run before has.

    The tokenizer and the encoded text are kept in ``cache``, in folders named after everything that decides them, so that runs
    and cells of a sweep share them; several processes may ask at once. Memory does not grow with the corpus.

    Args:
        cache: folder; made if need be.
        progress: told of the tokens encoded.

    Raises:
        UnknownNameError, InputError: no such corpus or tokenizer, no text in it, too little of it, or no room on the disk.
        ConfigurationError: settings that this corpus or tokenizer cannot follow.
    """
    data, context = config.data, config.model.max_position_embeddings
    report: Progress = progress or (lambda stage, done, total: None)
    corpus = _resolve(data)
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
            stage = f"encoding the {split.replace('_', '-')} text"
            write_stream(
                folder,
                encode(tokenizer, corpus.documents(split)),
                bos=document_bos,
                eos=eos,
                vocab_size=vocab_size,
                limit=limit,
                told=lambda done: report(stage, done, limit or 0),
            )

        try:
            return TokenStream.open(cached_folder(cache, f"tokens-{key}", build))
        except InputError as error:
            raise InputError(f"data.corpus {data.corpus!r}, {split} documents: {error}") from error

    row_bos = bos if data.bos == "rows" else None
    content = context - (row_bos is not None)
    if content < 1:
        raise ConfigurationError(
            "rows of one token have no room for text; raise model.max_position_embeddings or set data.bos=none"
        )
    if data.fixed_position is not None and data.fixed_token >= vocab_size:
        raise ConfigurationError(f"data.fixed_token {data.fixed_token} is no token: the vocabulary has {vocab_size} ids")
    form: dict[str, Any] = {
        "context": context,
        "bos": row_bos,
        "isolated": data.packing == "isolated",
        "fixed": None if data.fixed_position is None else (data.fixed_position, data.fixed_token),
    }
    random = None
    if data.random_positions is not None:
        ids = np.array(drawable_ids(Encoder(vocab_size=vocab_size, special_ids=special_ids(tokenizer))))
        random = (*data.random_positions, ids, data.seed)

    text = stream("train", data.max_tokens)
    total = text.identity["tokens"] // content
    numbers = _kept(total, data)
    if len(numbers) < config.training.batch_size:
        raise InputError(_too_little(config, text.identity["tokens"], total, len(numbers)))
    held_out_text = stream("held_out", HELD_OUT_CHOICE * data.held_out_rows * context)
    # A probe row without its BOS reaches further than the row, by a token or two; the last row is given up for that.
    available = max(0, held_out_text.identity["tokens"] - (context + 1 - content)) // content
    if available < data.held_out_rows:
        raise InputError(
            f"too little held-out text: data.corpus {data.corpus!r} holds out {held_out_text.identity['tokens']:,} tokens, "
            f"{available} rows of {context}, and data.held_out_rows is {data.held_out_rows}; lower it, or give more text"
        )
    spaced = np.arange(data.held_out_rows, dtype=np.int64) * available // data.held_out_rows
    held_out = Rows(held_out_text, spaced, **form)
    return PreparedData(
        train=Rows(text, numbers, random=random, **form),
        held_out=torch.stack([held_out[index]["input_ids"] for index in range(len(held_out))]),
        held_out_dataset=held_out,
        tokenizer=tokenizer,
        identity={
            **dataclasses.asdict(identity),
            **text.identity,
            "rows": total,
            "tokens_per_row": content,
            "unique_rows": len(numbers),
            "unique_tokens": len(numbers) * content,
            "held_out": {**held_out_text.identity, "rows": len(held_out)},
            "tokenizer": {
                "name": data.tokenizer or "byte-level BPE trained on the training text",
                "vocab_size": vocab_size,
                "sha256": tokenizer_hash,
            },
        },
    )


def _resolve(data: DataConfig) -> Corpus:
    settings = data.model_dump(include={"subset", "revision", "held_out_split", "text_column"})
    return resolve_corpus(data.corpus, train_split=None if data.train_split == "train" else data.train_split, **settings)


def _tokenizer(data: DataConfig, corpus: Corpus, source: dict[str, Any], cache: Path) -> PreTrainedTokenizerBase:
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


def _kept(total: int, data: DataConfig) -> np.ndarray:
    """Numbers of the rows to train on, ascending; a smaller share of the same seed is part of a larger one."""
    if data.unique_fraction == 1.0:
        return np.arange(total, dtype=np.int64)
    order = np.random.default_rng((data.seed, ROWS)).permutation(total)
    return np.sort(order[: round(total * data.unique_fraction)])


def _too_little(config: PretrainingConfig, tokens: int, total: int, kept: int) -> str:
    data = config.data
    rows = (
        f"{total} rows"
        if kept == total
        else f"{total} rows, of which data.unique_fraction {data.unique_fraction:g} keeps {kept},"
    )
    remedy = "or give more text"
    if data.max_tokens is not None and tokens == data.max_tokens:
        remedy = f"or raise data.max_tokens, which is {data.max_tokens:,}"
    return (
        f"too little data for one batch: data.corpus {data.corpus!r} gives {tokens:,} training tokens, {rows} of "
        f"{config.model.max_position_embeddings} tokens, and training.batch_size is {config.training.batch_size}; lower "
        f"training.batch_size or model.max_position_embeddings, {remedy}"
    )
