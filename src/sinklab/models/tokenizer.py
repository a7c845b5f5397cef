"""The tokenizer of a checkpoint: loaded, and tried on a short text before anything relies on it."""

from __future__ import annotations

import threading
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sinklab.errors import InputError, UnsupportedModelError
from sinklab.models.checkpoint import first_line

__all__ = ["load_tokenizer"]

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "tekken.json",
)

TRIED = f"def main():\n    return 0  # 1984, naïve {'a' * 32}!\n"
"""A text with letters, digits, spaces, a letter that is no ASCII, and a run that slow patterns try in every way."""

PATIENCE = 10.0
"""Seconds in which a tokenizer must have read it; they take a thousandth."""

EXPANSION = 64
"""Tokens that a tokenizer may make of a character."""

SPARE = 4096
"""Added tokens that a tokenizer may have beyond the rows of the embedding."""


def load_tokenizer(folder: Path, name: str, trust_remote_code: bool, rows: int) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model directory; ``None`` where there is none.

    Args:
        rows: of the model's embedding; 0 for a model without one.

    Raises:
        InputError: it cannot be loaded, or does not read a short text in bounded time and length.
        UnsupportedModelError: it needs a package that is not installed.
    """
    # Without its files transformers makes an empty tokenizer for some architectures, which reads every text as nothing.
    if not any((folder / file).is_file() for file in FILES):
        return None
    _require_few_added(folder / "tokenizer.json", rows)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise UnsupportedModelError(
            f"the tokenizer of {name} needs a package that is not installed: {first_line(error)}"
        ) from error
    except BaseException as error:
        # tokenizers raises bare Exception for a damaged tokenizer.json, and a BaseException where its own code panics.
        if isinstance(error, Exception) or _is_panic(error):
            raise InputError(f"the tokenizer of {name} cannot be loaded: {first_line(error)}") from error
        raise
    limit = getattr(tokenizer, "model_max_length", 0)
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise InputError(
            f"{folder / 'tokenizer_config.json'} cannot be used: model_max_length is {str(limit)[:40]!r}, no number"
        )
    _try(tokenizer, name)
    return tokenizer


def _is_panic(error: BaseException) -> bool:
    """Whether the Rust code of a tokenizer failed: its error is no Exception, and cannot be imported by name."""
    return type(error).__name__ == "PanicException"


def _require_few_added(path: Path, rows: int) -> None:
    """Refuse added tokens by the hundred thousand that the model has no embedding for: each is compiled into a pattern."""
    if not rows or not path.is_file():
        return
    added = path.read_bytes().count(b'"single_word"')
    if added > rows + SPARE:
        raise InputError(
            f"{path} adds {added:,} tokens, and the model's embedding has {rows:,} rows; is it that of another model?"
        )


def _try(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer whose code fails, hangs or explodes on a short text; one that needs more than a text passes."""
    outcome: list[int | BaseException] = []

    def read() -> None:
        try:
            outcome.append(len(tokenizer(TRIED, verbose=False)["input_ids"]))
        except BaseException as error:
            outcome.append(error)

    # Nothing can end a call into compiled code. The thread is left behind, and does not keep the process from ending.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    way_out = "get its files again, or remove them to go on with random tokens"
    if not outcome:
        raise InputError(
            f"the tokenizer of {name} does not come to an end: it has been reading {len(TRIED)} characters for {PATIENCE:g} s; "
            f"{way_out}"
        )
    (found,) = outcome
    if isinstance(found, BaseException):
        if _is_panic(found):
            raise InputError(f"the tokenizer of {name} fails on a plain text: {first_line(found)}; {way_out}") from found
        return  # documents with boxes, tables: what it is for is not known here
    if found > EXPANSION * len(TRIED):
        raise InputError(f"the tokenizer of {name} makes {found:,} tokens of {len(TRIED)} characters; {way_out}")
