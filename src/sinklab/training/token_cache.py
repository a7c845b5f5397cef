"""Encoded text on disk, shared by all runs that read the same: written once, whole or not at all, and read without loading."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypedDict

import numpy as np

from sinklab.errors import InputError
from sinklab.results.file import flush
from sinklab.results.folder import FolderLock
from sinklab.training.checkpoints import writing
from sinklab.training.tokenizer import Piece


class StreamIdentity(TypedDict):
    """Which documents a stream has; ``sha256`` is that of the bytes of ``tokens.bin``."""

    documents: int
    characters: int
    tokens: int
    dtype: str
    sha256: str


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents end to end, in a folder of :func:`write_stream`.

    Args:
        folder: where it is.
        identity: ``documents``, ``characters``, ``tokens``, ``dtype`` and ``sha256`` of the bytes of ``tokens.bin``.
    """

    folder: Path
    identity: StreamIdentity

    @classmethod
    def open(cls, folder: Path) -> TokenStream:
        """The stream in a folder.

        Raises:
            InputError: files are missing, of another length than was written, or may not be read.
        """
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

    def starts(self) -> np.ndarray:
        """Positions at which documents begin, ascending, int64 ``(documents,)``, mapped from disk."""
        return np.load(self.folder / "starts.npy", mmap_mode="r")


def hash_key(settings: object) -> str:
    """Sixteen hexadecimal digits that stand for JSON-like settings in the name of a folder."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def cached_folder(cache: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder ``cache/name``; if it is not there, what ``build`` writes into a folder that then takes this name.

    Processes that want the same folder wait for the first one; a build that was killed leaves nothing that is read.

    Raises:
        InputError: the cache cannot be written to, or its disk is full.
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
    pieces: Iterable[Piece],
    *,
    bos: int | None,
    eos: int | None,
    vocab_size: int,
    limit: int | None,
    progress: Callable[[int], None],
) -> None:
    """Write documents end to end: ``tokens.bin`` (little-endian), ``starts.npy`` and ``identity.json``.

    Args:
        bos, eos: ids before and after every document.
        vocab_size: decides the width: uint16 up to 65,536 ids, uint32 above.
        limit: stop after so many tokens, in the middle of a document if need be; no more documents are read.
        progress: called with the tokens so far.

    Raises:
        InputError: no text at all, or no room on the disk.
    """
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    starts = array("q")
    digest = hashlib.sha256()
    tokens = characters = 0
    with storing(folder.parent):
        file = (folder / "tokens.bin").open("wb")
    try:
        for piece in pieces:
            if len(piece.ids) and piece.ids.max() >= vocab_size:
                raise InputError(f"the tokenizer gave the id {piece.ids.max()}, beyond its vocabulary of {vocab_size} ids")
            if piece.first:
                starts.append(tokens)
            front, back = [bos] if bos is not None and piece.first else [], [eos] if eos is not None and piece.last else []
            parts = (front, piece.ids, back)
            ids = np.concatenate([np.asarray(part, dtype=dtype) for part in parts])
            ids = ids if limit is None else ids[: limit - tokens]
            data = ids.tobytes()
            with storing(folder.parent):
                file.write(data)
            digest.update(data)
            tokens += len(ids)
            # Where a token ends in the text is not known here, so a text that was cut counts by its share of tokens.
            kept = min(len(piece.ids), max(0, len(ids) - len(parts[0])))
            characters += round(piece.characters * kept / len(piece.ids)) if len(piece.ids) else 0
            progress(tokens)
            if tokens == limit:
                break
    finally:
        with storing(folder.parent):
            file.close()
    if not tokens:
        raise InputError("the corpus is empty: none of its documents holds a token")
    counts = {"documents": len(starts), "characters": characters, "tokens": tokens}
    identity = {**counts, "dtype": dtype.str, "sha256": digest.hexdigest()}
    with storing(folder.parent):
        np.save(folder / "starts.npy", np.frombuffer(starts, dtype=np.int64))
        (folder / "identity.json").write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
