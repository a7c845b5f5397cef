"""How well a tokenizer reads a text: characters and bytes a token, unknown tokens, characters that no token stands for."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from sinklab.corpora import kind_of_spec
from sinklab.corpora.base import Corpus, Encoder, TextCorpus
from sinklab.errors import SinklabError
from sinklab.registry import corpora
from sinklab.results.metric import Metric

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BITS_PER_BYTE = Metric(
    "bits_per_byte",
    "bits",
    "Next-token loss in bits for each byte (UTF-8) of the text that the predicted tokens stand for: what models with different "
    "tokenizers are compared by: loss times predicted tokens, over ln 2 times bytes.",
)

MOST_UNREAD = 0.05
"""Share of unread characters above which numbers are about unknown tokens more than about the text."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a tokenizer makes of the text behind some samples.

    Attributes:
        characters_per_token: of the text that the tokens stand for.
        bytes_per_token: of its UTF-8, for the tokens that have one before them, which are those that a loss is taken of.
        unknown_share: of tokens that are the unknown token, in [0, 1].
        unread_share: of characters other than white space for which no token stands, or the unknown one, in [0, 1].
    """

    characters_per_token: float
    bytes_per_token: float
    unknown_share: float
    unread_share: float

    def bits_per_byte(self, loss: float) -> float:
        """A loss in nats per token as :data:`BITS_PER_BYTE`."""
        return loss / (math.log(2) * self.bytes_per_token)

    @property
    def warning(self) -> str:
        """A sentence where too much is unread; empty otherwise."""
        if self.unread_share <= MOST_UNREAD:
            return ""
        return (
            f"The tokenizer cannot read {100 * self.unread_share:.0f} % of the characters of this text "
            f"({100 * self.unknown_share:.0f} % of its tokens are unknown ones): rates and losses are about what is left. "
            "Give a text in the language of the model."
        )


def read_samples(corpus: Corpus, encoder: Encoder, *, seq_len: int, samples: int, seed: int, bos: bool) -> Reading | None:
    """How the tokenizer read the samples that :meth:`Corpus.sample` gives for the same arguments.

    ``None`` for a corpus that is no text, a number of samples that it refuses, and a tokenizer that does not say where its
    tokens stand (a slow one).
    """
    tokenizer, (front, back) = encoder.tokenizer, encoder.frame(bos)
    framed = len(front) + len(back)
    if samples < 1:  # refused where they are drawn
        return None
    if tokenizer is None or not isinstance(corpus, TextCorpus) or not getattr(tokenizer, "is_fast", False) or seq_len <= framed:
        return None
    counts = _Counts()
    for ids, text in islice(corpus.pieces(encoder.behind(front), seq_len - framed, seed), samples):
        spans, share = _spans(tokenizer, text, front)
        counts.add(text, [token == tokenizer.unk_token_id for token in ids], spans, share, whole=bos)
    return counts.reading()


def _spans(tokenizer: PreTrainedTokenizerBase, text: str, front: tuple[int, ...]) -> tuple[list[tuple[int, int]], float]:
    """First and last character of every token behind ``front``, and the share of the text that the tokens stand for."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = [(int(start), int(stop)) for start, stop in encoded["offset_mapping"]]
    if tuple(encoded["input_ids"][: len(front)]) == front:
        spans = spans[len(front) :]
    if max((stop for _, stop in spans), default=0) >= len(text.rstrip()):
        return spans, 1.0
    # Some vocabularies drop characters and count offsets in what is left: places are shares of the text then.
    share = min(1.0, _letters(tokenizer.decode(encoded["input_ids"])) / max(_letters(text), 1))
    step = len(text) / max(len(spans), 1)
    return [(round(place * step), round((place + 1) * step)) for place in range(len(spans))], share


@dataclasses.dataclass
class _Counts:
    """What is counted over samples."""

    tokens: int = 0
    unknown: int = 0
    predicted: int = 0
    characters: int = 0
    predicted_bytes: float = 0.0
    visible: float = 0.0
    read: float = 0.0

    def add(self, text: str, unknown: list[bool], spans: list[tuple[int, int]], share: float, *, whole: bool) -> None:
        """Count a sample, the first tokens of a text."""
        own = spans[: len(unknown)]
        end, first = max(stop for _, stop in own), 0 if whole else own[0][1]
        known = [span for is_unknown, span in zip(unknown, own, strict=True) if not is_unknown]
        covered = bytearray(end)
        for start, stop in known:
            covered[start:stop] = b"\1" * (stop - start)
        self.tokens += len(unknown)
        self.characters += end
        self.unknown += len(unknown) - len(known)
        self.predicted += len(unknown) - (not whole)
        self.predicted_bytes += len(text[first:end].encode(errors="replace"))
        # Of a character that a sample's ends cut, the bytes of the tokens that are on this side.
        self.predicted_bytes -= _bytes_of_character(text, end - 1, spans[len(unknown) :], spans)
        if not whole:
            self.predicted_bytes += _bytes_of_character(text, first - 1, spans[1:], spans)
        self.visible += _letters(text[:end])
        self.read += share * sum(covered[place] for place in range(end) if not text[place].isspace())

    def reading(self) -> Reading | None:
        """The means; ``None`` where no token is predicted."""
        if not self.predicted_bytes or not self.predicted:
            return None
        return Reading(
            self.characters / self.tokens,
            self.predicted_bytes / self.predicted,
            self.unknown / self.tokens,
            1.0 - self.read / self.visible if self.visible else 0.0,
        )


def _bytes_of_character(text: str, position: int, spans: list[tuple[int, int]], every: list[tuple[int, int]]) -> float:
    """Bytes of one character that stand for some of the tokens over it; those of a byte-level BPE have about as many each."""
    among, over = (sum(start <= position < stop for start, stop in some) for some in (spans, every))
    return len(text[position : position + 1].encode(errors="replace")) * among / over if over else 0.0


def _letters(text: str) -> int:
    return sum(not letter.isspace() for letter in text)


def corpus_record(corpus: Corpus, reading: Reading | None = None) -> dict[str, object]:
    """``corpus`` of ``run.json``: name, settings, source, revision and licence, and how the tokenizer read it."""
    record: dict[str, object] = {"name": corpus.label, "kind": corpus.name, "settings": written_corpus(corpus)}
    record |= dataclasses.asdict(corpus.identity)
    return record if reading is None else record | dataclasses.asdict(reading)


def written_corpus(corpus: Corpus) -> dict[str, object] | None:
    """Name and settings that :func:`~sinklab.corpora.resolve_corpus` reads as this corpus, without those by default.

    A file, a folder or a dataset that is read so by its path alone has the path as its name. ``None`` for a corpus that cannot
    be written: one of a class that is not registered, or that does not keep its settings as attributes.
    """
    if corpus.name not in corpora or corpora[corpus.name] is not type(corpus):
        return None
    parameters = inspect.signature(type(corpus)).parameters
    if not all(hasattr(corpus, name) for name in parameters):
        return None
    settings = corpora.settings(corpus)
    left = {key: value for key, value in settings.items() if key == "name" or value != parameters[key].default}
    if isinstance(path := left.get("path"), str) and _reads_as(path) == corpus.name:
        del left["path"]
        left["name"] = path
    return left


def _reads_as(path: str) -> str | None:
    """The corpus that reads a path or a name by itself; ``None`` where none does, as a dataset of the hub without an owner."""
    try:
        return kind_of_spec(path)
    except SinklabError:
        return None


RUN = 16
"""Tokens in a row that no two texts may have in common: files begin with the same licence, and passages of one file overlap."""


def token_runs(ids: Sequence[int], length: int = RUN) -> set[tuple[int, ...]]:
    """All runs of ``length`` tokens; of a shorter text none."""
    return {tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)}


def count_repeats(texts: Iterable[Sequence[int]], length: int = RUN) -> int:
    """How many texts have a run of ``length`` tokens that one before them has; of a shorter text all tokens."""
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    for ids in texts:
        runs = token_runs(ids, min(length, len(ids)))
        repeats += bool(runs & seen)
        seen |= runs
    return repeats
