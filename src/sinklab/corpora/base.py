"""What a corpus is: rows of token ids of one length, made from a seed, with an identity that says where they come from."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from sinklab.corpora.samples import Kind
from sinklab.errors import ConfigurationError, InputError, first_line

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held_out"]

HELD_OUT_PERCENT = 5
"""Share of a corpus's documents that training never sees, where the corpus itself makes no such division."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """Where the tokens come from: what is needed to get the same ones again."""

    source: str
    revision: str
    licence: str


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What a corpus needs to know of a model's vocabulary.

    Args:
        vocab_size: ids are drawn below it.
        bos_token_id: beginning-of-sequence id (BERT's ``[CLS]`` counts as one), ``None`` when the model has none.
        closing_ids: what the tokenizer puts behind a text that an encoder reads, such as ``[SEP]``; empty for decoders.
        tokenizer: a transformers tokenizer; ``None`` for a model that came without one.
        special_ids: ids that random tokens leave out.
        rows: of the model's embedding, which may have more than there are tokens; 0 where that is not known.
        front: ids that are put in front of a text, see :meth:`behind`.
    """

    vocab_size: int
    bos_token_id: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    special_ids: frozenset[int] = frozenset()
    rows: int = 0
    closing_ids: tuple[int, ...] = ()
    front: tuple[int, ...] = ()

    def frame(self, bos: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids in front of a sample and behind it: those that the tokenizer puts there, or none; ``bos`` must be a token of the
        model.

        A model that has closing tokens and no token to begin with (T5) always gets the closing ones.
        """
        if bos and self.bos_token_id is None:
            raise ConfigurationError("this model has no beginning-of-sequence token; use `bos` none")
        front = (self.bos_token_id,) if bos and self.bos_token_id is not None else ()
        return front, self.closing_ids if bos or self.bos_token_id is None else ()

    def behind(self, front: tuple[int, ...]) -> Encoder:
        """The same for texts that these ids are put in front of; one that begins with them (by a template) loses its own."""
        return dataclasses.replace(self, front=front)

    @property
    def bos_name(self) -> str:
        """What samples have with ``bos`` and not without, in words.

        ``BOS``; of an encoder its tokens, ``[CLS] and [SEP]``; empty where the tokenizer has closing tokens alone, and of a
        model that reads no text.
        """
        if self.bos_token_id is None and (self.closing_ids or not self.vocab_size):
            return ""
        if self.tokenizer is None or not self.closing_ids:
            return "BOS"
        tokens = dict.fromkeys((self.bos_token_id, *self.closing_ids))
        return " and ".join(map(str, self.tokenizer.convert_ids_to_tokens([token for token in tokens if token is not None])))

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer by itself puts the beginning-of-sequence token in front of a text."""
        if self.tokenizer is None or self.bos_token_id is None:
            return False
        return self._ids(self.tokenizer, "a")[:1] == [self.bos_token_id]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without special tokens.

        Raises:
            InputError: the model came without a tokenizer, or the tokenizer fails, or gives ids that the model does not have.
        """
        if self.tokenizer is None:
            raise InputError(
                "this model has no tokenizer, so it cannot read text; use `corpus` random_tokens or repeated_token, or give it "
                "one: in its directory, or with sinklab.wrap_model(model, tokenizer)"
            )
        ids = self._ids(self.tokenizer, text, add_special_tokens=False)
        return ids[len(self.front) :] if self.front and tuple(ids[: len(self.front)]) == self.front else ids

    def _ids(self, tokenizer: PreTrainedTokenizerBase, text: str, **options: bool) -> list[int]:
        try:
            ids = list(tokenizer(text, verbose=False, **options)["input_ids"])
        except BaseException as error:
            # A tokenizer that is damaged raises what it likes; where its compiled code panics, that is not even an Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise InputError(f"the model's tokenizer fails on a text of {len(text)} characters: {first_line(error)}") from error
        if self.rows and max(ids, default=0) >= self.rows:
            raise InputError(f"the model's tokenizer gives token {max(ids)}, and the model's embedding has {self.rows} rows")
        return ids


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """One picture of any size, RGB, as a corpus gives it; what it is called, and its class: a name, a number, or ``None``."""

    image: Image
    source: str
    label: str | int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """One channel of sound, float32 ``(length,)`` in [-1, 1], as a corpus gives it; its name, and its class likewise."""

    wave: np.ndarray
    source: str
    label: str | int | None = None


class Corpus(abc.ABC):
    """Rows of token ids. Deterministic: the same seed, encoder and lengths give the same rows.

    A corpus may hold pictures or recordings instead, or besides; ``kinds`` says what.
    """

    name: ClassVar[str]
    kinds: ClassVar[frozenset[Kind]] = frozenset({"text"})
    endless: ClassVar[bool] = False
    """Whether the training documents never end, so that whoever reads them must say how many tokens."""

    @property
    def label(self) -> str:
        """What tables and pages call it: its registered name, or the name of the file, folder or dataset that it reads."""
        return self.name

    @property
    def more(self) -> str:
        """Where a corpus gives too few rows, what would give more, in words."""
        return "give a longer text"

    @property
    @abc.abstractmethod
    def identity(self) -> Identity:
        """Source, revision and licence, for the run record."""

    @abc.abstractmethod
    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        """Endless or finite rows of exactly ``length`` ids, none of them a special token."""

    def pictures(self, seed: int, size: int) -> Iterator[Picture]:
        """Of a corpus of pictures: endless or finite, in an order that depends on the seed alone.

        Args:
            size: edge in pixels of what the model reads, for pictures that are made up.
        """
        raise InputError(f"corpus {self.label!r} holds no pictures")

    def recordings(self, seed: int, rate: int, length: int) -> Iterator[Recording]:
        """Of a corpus of sound: recordings of exactly ``length`` numbers at ``rate`` a second, endless or finite."""
        raise InputError(f"corpus {self.label!r} holds no recordings")

    def pairs(self, seed: int) -> Iterator[tuple[str, str]]:
        """Of a corpus of pairs: sources with their targets, none of them empty, in an order drawn from the seed."""
        raise InputError(f"corpus {self.label!r} holds no pairs")

    def documents(self, split: Split) -> Iterator[str]:
        """Optional: every text of a split, whole and one at a time, in a fixed order; what pre-training reads.

        The splits have no text in common. A corpus whose texts are in some order of their own should mix them (by a hash, not
        by a draw), because a run may ask for the first few only.

        Raises:
            ConfigurationError: this corpus has none.
        """
        raise ConfigurationError(
            f"corpus {self.name!r} has no documents to train on; python_source, text files, folders and datasets have"
        )

    def sample(self, encoder: Encoder, *, seq_len: int, samples: int, seed: int, bos: bool) -> Tensor:
        """The first ``samples`` rows, int64 ``(samples, seq_len)``.

        Args:
            bos: put the beginning-of-sequence token at position 0, and closing tokens at the end, where the model has them; the
                row then holds as many corpus tokens less.

        Raises:
            ConfigurationError: ``bos`` asked of a model without such a token, or lengths below 2.
            InputError: the corpus holds fewer rows than asked for.
        """
        if seq_len < 2 or samples < 1:
            raise ConfigurationError(f"`seq_len` must be at least 2 and `samples` at least 1, got {seq_len} and {samples}")
        front, back = encoder.frame(bos)
        if seq_len <= len(front) + len(back):
            raise ConfigurationError(
                f"`seq_len` {seq_len} holds {encoder.bos_name} and no token of a text; take {len(front) + len(back) + 1}"
            )
        rows: list[list[int]] = []
        for row in self.rows(encoder.behind(front), seq_len - len(front) - len(back), seed):
            rows.append([*front, *row, *back])
            if len(rows) == samples:
                return torch.tensor(rows, dtype=torch.int64)
        raise InputError(
            f"corpus {self.name!r} ({self.identity.source}) is too short: it gives {len(rows)} of {samples:,} samples of "
            f"{seq_len:,} tokens; lower `samples` or `seq_len`, or {self.more}"
        )


class MediaCorpus(Corpus):
    """A corpus of pictures or of sound, from which nobody can read tokens."""

    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        what = " or ".join(HELD[kind] for kind in sorted(self.kinds))
        raise InputError(
            f"corpus {self.label!r} holds {what}, and tokens of a text are wanted; give a text file or python_source"
        )


HELD: dict[Kind, str] = {"text": "text", "pairs": "pairs of texts", "image": "pictures", "audio": "recordings"}
"""What a corpus of each kind holds, in words."""


class TextCorpus(Corpus):
    """A corpus made of passages of text, each encoded and cut to length; passages that are too short are passed over."""

    @abc.abstractmethod
    def passages(self, seed: int) -> Iterator[str]:
        """Passages in an order that depends on the seed alone."""

    @property
    def patience(self) -> float:
        """Passages in a row that may be too short before the corpus is; infinite where its passages come to an end."""
        return PASSAGES_IN_VAIN

    def rows(self, encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
        return (ids for ids, _ in self.pieces(encoder, length, seed))

    def pieces(self, encoder: Encoder, length: int, seed: int) -> Iterator[tuple[list[int], str]]:
        """The rows, each with the beginning of the passage whose first tokens it holds, as much as was encoded."""
        passed_over = 0
        for text in self.passages(seed):
            piece = _leading_ids(encoder, text, length)
            if piece is not None:
                passed_over = 0
                yield piece
            elif (passed_over := passed_over + 1) >= self.patience:
                return


PASSAGES_IN_VAIN = 1000
"""A corpus is too short for a length after so many passages in a row that are; an endless corpus must not search for ever."""


def _leading_ids(encoder: Encoder, text: str, length: int) -> tuple[list[int], str] | None:
    """The first ``length`` ids of a text, or ``None`` if it has fewer, and what was encoded: only as much as is needed."""
    # No tokenizer in use gives more ids than bytes (and one for a leading space): most short passages need no encoding.
    if len(text) < length and len(text.encode(errors="replace")) + 1 < length:
        return None
    size = 8 * length + 64
    while True:
        ids = encoder.encode(text[:size])
        # A cut through a word can change the last id, so the ids asked for must end before it.
        if len(ids) > length or (size >= len(text) and len(ids) == length):
            return ids[:length], text[:size]
        if size >= len(text):
            return None
        size *= 4


def lines_of(text: str) -> list[str]:
    """Lines as files have them. ``str.splitlines`` also ends one at U+2028, U+0085 and form feeds, which a text may hold."""
    return io.StringIO(text, newline=None).read().split("\n")


def drawable_ids(encoder: Encoder) -> list[int]:
    """The ids of a vocabulary without its special tokens, ascending; refuses a model without one, such as of images."""
    ids = [token for token in range(encoder.vocab_size) if token not in encoder.special_ids]
    if not ids:
        raise InputError("this model has no vocabulary to draw tokens from; sinklab's corpora are token sequences")
    return ids


def is_held_out(key: str) -> bool:
    """Whether a document is held out, by the SHA-256 of its key (its name or its text): the same on every machine."""
    return int(_digest(key), 16) % 100 < HELD_OUT_PERCENT


def held_out_keys(keys: Iterable[str]) -> frozenset[str]:
    """The keys held out of a small collection: those with the smallest SHA-256, 5 % of the distinct ones and at least one."""
    ordered = hash_order(set(keys))
    return frozenset(ordered[: max(1, round(len(ordered) * HELD_OUT_PERCENT / 100))])


def hash_order(keys: Iterable[str]) -> list[str]:
    """Keys in the order of their SHA-256: mixed, and the same on every machine and whatever other keys there are."""
    return sorted(keys, key=_digest)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def visible_files(folder: Path, suffixes: Iterable[str] = ()) -> dict[str, Path]:
    """Files below a folder by their names there, sorted, hidden ones left out; those with some endings, or all."""
    named = ((entry.relative_to(folder), entry) for entry in sorted(folder.rglob("*")) if entry.is_file())
    shown = ((name, entry) for name, entry in named if not any(part.startswith(".") for part in name.parts))
    return {name.as_posix(): entry for name, entry in shown if not suffixes or entry.suffix.lower() in suffixes}


def hash_files(root: Path, files: Iterable[Path]) -> str:
    """SHA-256 over the names (below ``root``, sorted) and contents of files, in hexadecimal."""
    total = hashlib.sha256()
    for relative, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        with path.open("rb") as file:
            total.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()} {relative}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


def hash_tokens(tokens: Tensor) -> str:
    """SHA-256 of the ids as little-endian int64, in hexadecimal: the same tokens, the same hash on any machine."""
    return hashlib.sha256(tokens.to(torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()
