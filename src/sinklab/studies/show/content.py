"""What show() is given, as the one sample that the model reads: a text, a pair of texts, or a picture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch

from sinklab.attention.maps import picture_names, shared_names
from sinklab.corpora import PICTURES
from sinklab.corpora._media import open_picture, rgb
from sinklab.corpora.base import Identity, MediaCorpus, Picture
from sinklab.corpora.samples import Kind, Samples
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.drawing import shifted
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import is_two_sided
from sinklab.models.media import draw_described, draw_pictures, reads_described
from sinklab.models.tokenizer import kind_of

if TYPE_CHECKING:
    from PIL.Image import Image


Content: TypeAlias = "str | Path | Image | Mapping[str, torch.Tensor]"


class OnePicture(MediaCorpus):
    """A corpus of the picture that was given."""

    name: ClassVar[str] = "one_picture"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"image"})

    def __init__(self, picture: Picture) -> None:
        self.picture = picture

    @property
    def identity(self) -> Identity:
        return Identity(source=self.picture.source, revision="given", licence="the user's own")

    def pictures(self, seed: int, size: int) -> Iterator[Picture]:
        yield self.picture


def samples_of(loaded: LoadedModel, content: Content, target: str | None, seq_len: int) -> tuple[Samples, list[str]]:
    """What was given as one sample, and a sentence where a text was cut."""
    kind, two_sided = kind_of(loaded.model), is_two_sided(loaded.model)
    if kind == "audio":
        raise InputError(f"{type(loaded.model).__name__} reads sound, and show() has texts and pictures; `audit` measures it")
    if target is not None and not (two_sided and kind == "text"):
        raise ConfigurationError(f"`target` is for an encoder–decoder, and {type(loaded.model).__name__} is none")
    if isinstance(content, Mapping):
        known = inspect.signature(loaded.model.forward).parameters
        arguments = {name: content[name] for name in known if isinstance(content.get(name), torch.Tensor)}
        return Samples(arguments, names=shared_names(picture_names(loaded.model.config, arguments))), []
    if reads_described(loaded.model) and (not isinstance(content, str) or Path(content).suffix.lower() in PICTURES):
        return draw_described(loaded, OnePicture(_picture(content)), samples=1, seed=0), []
    if kind == "image":
        return draw_pictures(loaded, OnePicture(_picture(content)), samples=1, seed=0), []
    if not isinstance(content, str):
        raise InputError(f"{type(loaded.model).__name__} reads text, and was given {type(content).__name__}; give a string")
    if loaded.tokenizer is None:
        raise InputError(
            f"{type(loaded.model).__name__} comes without a tokenizer to read a text with; give one with `tokenizer`"
        )
    front, back = loaded.encoder.frame(loaded.encoder.adds_bos)
    ids, notes = _ids(loaded, content, front), []
    if two_sided and target is None:
        ids, written = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        notes.append("Source and target are the two halves of the text.")
    else:
        written = _ids(loaded, target, ()) if target is not None else []
    sides = {"text": (ids, seq_len - len(front) - len(back)), "target": (written, seq_len)}
    for side, (tokens, room) in sides.items():
        if len(tokens) > max(1, room):
            notes.append(f"Only the first {max(1, room):,} of the {len(tokens):,} tokens of the {side} were read.")
    source = torch.tensor([[*front, *ids[: max(1, seq_len - len(front) - len(back))], *back]])
    if not two_sided:
        return Samples.of_tokens(source), notes
    labels = torch.tensor([written[:seq_len]], device=loaded.device)
    arguments = {"input_ids": source, "decoder_input_ids": shifted(loaded.model, labels).cpu()}
    return Samples(arguments, kind="pairs", targets=labels.cpu()), notes


def longest(samples: Samples) -> int:
    """Positions of the longer side of a sample; 0 where they are not known."""
    sides = [samples.arguments[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in samples.arguments]
    return max(sides, default=0)


def _ids(loaded: LoadedModel, text: str, front: tuple[int, ...]) -> list[int]:
    ids = loaded.encoder.behind(front).encode(text)
    if not ids:
        raise InputError(f"the tokenizer of {loaded.name} makes no token of {text[:40]!r}; give a longer text")
    return ids


def _picture(content: str | Path | Image) -> Picture:
    from PIL import Image

    if isinstance(content, Image.Image):
        return Picture(rgb(content), "the picture")
    if not isinstance(content, str | Path):
        raise InputError(f"a picture is one of PIL or the path of a file, got {type(content).__name__}")
    path = Path(content)
    if not path.is_file():
        raise InputError(f"there is no picture {str(content)[:80]!r}; give one of PIL, or the path of a file")
    return Picture(open_picture(path, str(path)), path.name)
