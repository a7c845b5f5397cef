"""The processor of a checkpoint: what makes of a picture or of sound the numbers that a model reads."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from transformers import AutoFeatureExtractor, AutoImageProcessor, BaseImageProcessor, PreTrainedModel, SequenceFeatureExtractor

from sinklab.corpora.samples import Kind
from sinklab.errors import InputError, UnsupportedModelError
from sinklab.models.checkpoint import first_line
from sinklab.models.quiet import only_errors

__all__ = ["FILES", "Processor", "kind_of", "load_processor"]

Processor: TypeAlias = BaseImageProcessor | SequenceFeatureExtractor

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint that may describe its processor."""

_READ: dict[str, Kind] = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
"""Main input of a model, and what it is made of; everything else is text."""


def kind_of(model: PreTrainedModel) -> Kind:
    """What a model reads: text, pictures or sound."""
    return _READ.get(model.main_input_name, "text")


def load_processor(folder: Path, name: str, kind: Kind, trust_remote_code: bool) -> Processor | None:
    """The processor of a model directory; ``None`` for a model of text, and where there is none.

    Raises:
        InputError: it cannot be loaded.
        UnsupportedModelError: it needs a package that is not installed.
    """
    if kind not in ("image", "audio") or not any((folder / file).is_file() for file in FILES):
        return None
    auto = AutoImageProcessor if kind == "image" else AutoFeatureExtractor
    try:
        with only_errors():
            return auto.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except ImportError as error:
        raise UnsupportedModelError(
            f"the processor of {name} needs a package that is not installed: {first_line(error)}"
        ) from error
    except Exception as error:
        # A file that was changed by hand makes classes of transformers fail in every way that Python has.
        raise InputError(f"the processor of {name} cannot be loaded: {first_line(error)}") from error
