"""What turns texts, pictures and sound into inputs: the tokenizer and the processor of a checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SequenceFeatureExtractor,
)

from sinklab.corpora.samples import Kind
from sinklab.errors import InputError, UnsupportedModelError, first_line
from sinklab.models.checkpoint import locate_files
from sinklab.models.embedded import PREFIX, embedded_path
from sinklab.models.gguf_file import Gguf
from sinklab.models.quiet import only_errors

FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "source.spm", "tekken.json",
)  # fmt: skip


def load_tokenizer(
    folder: Path, name: str, trust_remote_code: bool, gguf: Gguf | None = None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model directory, or of a GGUF file; ``None`` where there is none."""
    # Without its files transformers makes an empty tokenizer for some architectures, which reads every text as nothing.
    if not (any((folder / file).is_file() for file in FILES) if gguf is None else gguf.has_tokenizer):
        return None
    options = {"trust_remote_code": trust_remote_code} if gguf is None else {"gguf_file": gguf.path.name}
    with _explained(f"the tokenizer of {name}"):
        return AutoTokenizer.from_pretrained(folder, **options)


GivenTokenizer: TypeAlias = PreTrainedTokenizerBase | str | os.PathLike[str]
"""A tokenizer, or where it is: a directory, a hub id, or ``embedded:softmax``."""


def given_tokenizer(
    tokenizer: GivenTokenizer, trust_remote_code: bool = False, token: str | bool | None = None, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer, loaded if it was named.

    Raises:
        InputError: nothing of that name, or no tokenizer of transformers.
    """
    if isinstance(tokenizer, str | os.PathLike):
        name = os.fspath(tokenizer)
        folder = embedded_path(name) if name.startswith(PREFIX) else Path(name).expanduser()
        with _explained(f"the tokenizer {name}"):
            options = {"trust_remote_code": trust_remote_code, "token": token, "local_files_only": local_files_only}
            return AutoTokenizer.from_pretrained(folder if folder.exists() else name, **options)
    if not hasattr(tokenizer, "bos_token_id"):
        raise InputError(f"`tokenizer` is of {type(tokenizer).__name__}; give one of transformers, as AutoTokenizer loads it")
    return tokenizer


def tokenizer_beside(
    model: PreTrainedModel, trust_remote_code: bool = False, token: str | bool | None = None, local_files_only: bool = False
) -> PreTrainedTokenizerBase | None:
    """That of the checkpoint that a model of text in memory was loaded from, by its ``name_or_path``; ``None`` without one."""
    name = str(getattr(model, "name_or_path", "") or "")
    if not name or kind_of(model) != "text":
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        try:
            commit = getattr(model.config, "_commit_hash", None)
            folder = locate_files(name, commit, [*FILES, "config.json", "*.jinja", "*.txt"], token, local_files_only)
        except InputError:
            return None
    return load_tokenizer(folder, name, trust_remote_code)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of loading as those of sinklab: a file that was changed by hand makes transformers fail in every way there is."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedModelError(f"{what} needs a package that is not installed: {first_line(error)}") from error
    except BaseException as error:
        # tokenizers raises bare Exception for a damaged tokenizer.json, and a BaseException where its own code panics.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InputError(f"{what} cannot be loaded: {first_line(error)}") from error
        raise


Processor: TypeAlias = BaseImageProcessor | SequenceFeatureExtractor | ProcessorMixin

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint that may describe its processor."""

_READ: dict[str, Kind] = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
"""Main input of a model, and what it is made of; everything else is text."""


def kind_of(model: PreTrainedModel) -> Kind:
    """What a model reads: text, pictures or sound."""
    return _READ.get(model.main_input_name, "text")


def load_processor(folder: Path, name: str, kind: Kind, trust_remote_code: bool) -> Processor | None:
    """The processor of a model directory, of texts with pictures too; ``None`` where there is none."""
    if not any((folder / file).is_file() for file in PROCESSOR_FILES):
        return None
    auto = {"image": AutoImageProcessor, "audio": AutoFeatureExtractor}.get(kind, AutoProcessor)
    with _explained(f"the processor of {name}"), only_errors():
        return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
