"""The tokenizer of a checkpoint."""

from __future__ import annotations

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


def load_tokenizer(folder: Path, name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model directory; ``None`` where there is none.

    Raises:
        InputError: it cannot be loaded.
        UnsupportedModelError: it needs a package that is not installed.
    """
    # Without its files transformers makes an empty tokenizer for some architectures, which reads every text as nothing.
    if not any((folder / file).is_file() for file in FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise UnsupportedModelError(
            f"the tokenizer of {name} needs a package that is not installed: {first_line(error)}"
        ) from error
    except BaseException as error:
        # tokenizers raises bare Exception for a damaged tokenizer.json, and a BaseException where its own code panics.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InputError(f"the tokenizer of {name} cannot be loaded: {first_line(error)}") from error
        raise
    return tokenizer
