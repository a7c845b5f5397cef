"""Text to token ids: tokenizers trained or given, encoding in bulk, and encoded text in folders that runs share."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sinklab.errors import InputError, first_line
from sinklab.results.file import flush
from sinklab.results.folder import FolderLock
from sinklab.training.checkpoints import writing

BOS, EOS = "<|bos|>", "<|eos|>"

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")
"""Without any of these transformers makes an empty tokenizer for some architectures, which reads every text as nothing."""

CHUNK = 1 << 21
"""Characters of the documents that are encoded together: about 700,000 tokens and 300 MB."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE in GPT-2's manner with ``<|bos|>`` (id 0, put in front of a text) and ``<|eos|>`` (id 1, also padding).

    ``vocab_size`` counts these and the 256 bytes; texts with too few pairs to merge, which are read once, give fewer.
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
    """The tokenizer in a directory, or of that name on the hub; code that comes with it is never run."""
    path = Path(name).expanduser()
    if path.is_dir() and not any(next(path.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise InputError(f"data.tokenizer {name!r} is a directory without the files of a tokenizer, such as tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(path if path.is_dir() else name, trust_remote_code=False)
    except Exception as error:
        # tokenizers raises bare Exception for a damaged tokenizer.json.
        raise InputError(
            f"data.tokenizer {name!r} cannot be loaded; it is a directory or a hub id: {first_line(error)}"
        ) from error


def beginning_as_rows(tokenizer: PreTrainedTokenizerBase, bos: bool) -> PreTrainedTokenizerBase:
    """A tokenizer that begins a text as the rows of a training begin: itself, also where it is a slow one, or a copy.

    Without it a model that was trained without BOS reads, in every program, a token that it has never seen.
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


def encode(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
    """Token ids of each document, int64 ``(tokens,)``, and its characters, in order; some documents at a time are in memory.

    Special tokens that are spelled out in a text are encoded as the characters that they are. Blank documents are left out.
    """
    private = _private(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerFast) else None
    for texts in _batches(documents):
        if private is not None:
            rows = [encoding.ids for encoding in private.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            rows = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        for ids, text in zip(rows, texts, strict=True):
            yield np.array(ids, dtype=np.int64), len(text)


def _private(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the Rust tokenizer with what a caller may have set taken out."""
    private = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    private.no_padding()
    private.no_truncation()
    private.encode_special_tokens = True
    return private


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents that are not blank, grouped to about :data:`CHUNK` characters."""
    batch: list[str] = []
    size = 0
    for document in documents:
        if document.strip():
            batch.append(document)
            size += len(document)
        if size >= CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class StreamIdentity(TypedDict):
    """Which documents a stream has; ``sha256`` is that of the bytes of ``tokens.bin``."""

    documents: int
    characters: int
    tokens: int
    dtype: str
    sha256: str


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents end to end, in a folder of :func:`write_stream`; its ``identity`` has their counts, dtype and SHA-256."""

    folder: Path
    identity: StreamIdentity

    @classmethod
    def open(cls, folder: Path) -> TokenStream:
        """The stream in a folder; files that are missing, or of another length than was written, are refused."""
        try:
            identity = json.loads((folder / "identity.json").read_text(encoding="utf-8"))
            size = (folder / "tokens.bin").stat().st_size
        except (OSError, ValueError) as error:
            raise InputError(f"the encoded text in {folder} is damaged ({error}); delete the folder") from None
        expected = identity["tokens"] * np.dtype(identity["dtype"]).itemsize
        if size != expected:
            raise InputError(
                f"the encoded text in {folder} is damaged: tokens.bin has {size} of {expected} bytes; delete the folder"
            )
        return cls(folder, identity)

    def tokens(self) -> np.ndarray:
        """All token ids, ``(tokens,)``, uint16 or uint32, mapped from disk."""
        return np.memmap(self.folder / "tokens.bin", dtype=self.identity["dtype"], mode="r")


def hash_key(settings: object) -> str:
    """Sixteen hexadecimal digits that stand for JSON-like settings in the name of a folder."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def cached_folder(cache: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder ``cache/name``; if it is not there, what ``build`` writes into a folder that then takes this name.

    Processes that want the same folder wait for the first one; a build that was killed leaves nothing that is read.
    """
    folder = cache / name
    if folder.is_dir():
        return folder
    with storing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, patience=math.inf)
    with lock:
        if folder.is_dir():
            return folder
        for left_over in cache.glob(f".{name}.*.partial"):  # of a process that was killed: living ones hold the lock
            shutil.rmtree(left_over)
        with storing(cache):
            work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=cache))
        try:
            build(work)
            with storing(cache):
                for path in work.iterdir():
                    flush(path)
                work.chmod(0o755)
                work.rename(folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return folder


def storing(cache: Path) -> contextlib.AbstractContextManager[None]:
    """Errors of writing to the cache, and of nothing else, as one sentence."""
    return writing("the encoded text", cache)


def write_stream(
    folder: Path,
    documents: Iterable[tuple[np.ndarray, int]],
    *,
    bos: int | None,
    eos: int | None,
    vocab_size: int,
    limit: int | None,
    progress: Callable[[int], None],
) -> None:
    """Write documents of :func:`encode` end to end, with ids before and after each: ``tokens.bin`` (little-endian) and
    ``identity.json``.

    Ids have uint16 up to a vocabulary of 65,536, uint32 above. At the ``limit`` of tokens, in the middle of a document if need
    be, no more documents are read; ``progress`` is called with the tokens so far.
    """
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    front, back = ([] if token is None else [token] for token in (bos, eos))
    digest = hashlib.sha256()
    count = tokens = characters = 0
    with storing(folder.parent):
        file = (folder / "tokens.bin").open("wb")
    try:
        for text, length in documents:
            if len(text) and text.max() >= vocab_size:
                raise InputError(f"the tokenizer gave the id {text.max()}, beyond its vocabulary of {vocab_size} ids")
            ids = np.concatenate([np.asarray(part, dtype=dtype) for part in (front, text, back)])
            ids = ids if limit is None else ids[: limit - tokens]
            data = ids.tobytes()
            with storing(folder.parent):
                file.write(data)
            digest.update(data)
            count, tokens = count + 1, tokens + len(ids)
            # Where a token ends in the text is not known here, so a text that was cut counts by its share of tokens.
            kept = min(len(text), max(0, len(ids) - len(front)))
            characters += round(length * kept / len(text)) if len(text) else 0
            progress(tokens)
            if tokens == limit:
                break
    finally:
        with storing(folder.parent):
            file.close()
    if not tokens:
        raise InputError("the corpus is empty: none of its documents holds a token")
    counts = {"documents": count, "characters": characters, "tokens": tokens}
    identity = {**counts, "dtype": dtype.str, "sha256": digest.hexdigest()}
    with storing(folder.parent):
        (folder / "identity.json").write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
