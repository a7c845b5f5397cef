"""Pictures and recordings of a corpus as samples: what the processor of a checkpoint makes of them, with their classes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.maps import grids_of, picture_names, shared_names
from sinklab.corpora.base import Corpus, Picture, Recording
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError, first_line
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import class_targets
from sinklab.models.positions import positions_of
from sinklab.models.tokenizer import PROCESSOR_FILES, Processor, kind_of, load_processor

if TYPE_CHECKING:
    from PIL.Image import Image

EDGE = 224
"""Edge of made-up pictures where neither model nor processor says how large theirs are."""

Medium = TypeVar("Medium", Picture, Recording)


def draw_pictures(loaded: LoadedModel, corpus: Corpus, *, samples: int, seed: int) -> Samples:
    """Pictures as the model reads them, with what it sees of each to look at; models of videos are refused."""
    model, config = loaded.model, loaded.model.config
    if hasattr(config, "tubelet_size") or hasattr(config, "num_frames"):
        raise UnsupportedModelError(
            f"{type(model).__name__} reads videos, and corpora hold pictures; measure it with attend(model, probes=[...])"
        )
    processor = _processor(loaded, "pictures")
    size = getattr(config, "image_size", None) or EDGE
    edge = int(size if isinstance(size, int) else max(size))
    pixels: list[Tensor] = []

    def read(picture: Picture) -> None:
        values = _processed(
            processor, picture.source, lambda: processor(images=picture.image, return_tensors="pt"), "pixel_values"
        )
        if values.ndim != 4:
            raise UnsupportedModelError(
                f"the processor of {loaded.name} makes pixel_values of shape {tuple(values.shape)}; expected four axes"
            )
        if pixels and pixels[0].shape != values.shape:
            raise InputError(
                f"the processor of {loaded.name} leaves pictures at {_size(pixels[0])} and {_size(values)}; give one size"
            )
        pixels.append(values)

    drawn = _drawn(corpus, corpus.pictures(seed, edge), samples, read, "pictures")
    arguments = {"pixel_values": torch.cat(pixels)}
    where = positions_of(model, {"pixel_values": pixels[0].to(loaded.device, loaded.dtype)})
    return Samples(
        arguments,
        "image",
        class_targets(model, [label for _, label in drawn], corpus.label),
        names=where.names,
        grid=where.grid,
        pictures=_visible(arguments["pixel_values"], processor),
        sources=tuple(source for source, _ in drawn),
    )


PROMPT = "Describe the picture."
"""What stands behind a picture, for a model that goes on with texts."""


def reads_described(model: PreTrainedModel) -> bool:
    """Whether a model goes on with texts that have pictures in them."""
    return kind_of(model) == "text" and model.can_generate() and "pixel_values" in inspect.signature(model.forward).parameters


def draw_described(loaded: LoadedModel, corpus: Corpus, *, samples: int, seed: int) -> Samples:
    """Pictures in front of :data:`PROMPT`, as the chat template or the processor of the model writes it, all of one size."""
    if loaded.processor is None and loaded.source is not None:
        loaded = dataclasses.replace(loaded, processor=load_processor(loaded.source, loaded.name, "text", False))
    processor: Any = _processor(loaded, "pictures")
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    text = f"{getattr(processor, 'image_token', '<image>')}\n{PROMPT}"
    if getattr(processor, "chat_template", None):
        text = processor.apply_chat_template(asked, add_generation_prompt=True)
    known = inspect.signature(loaded.model.forward).parameters
    made, seen, resized = list[dict[str, Tensor]](), list["Image"](), 0

    def made_of(image: Image, source: str) -> dict[str, Tensor]:
        given = _made(processor, source, lambda: processor(images=image, text=text, return_tensors="pt"))
        return {name: given[name] for name in known if isinstance(given.get(name), Tensor)}

    def read(picture: Picture) -> None:
        nonlocal resized
        image, given = picture.image, made_of(picture.image, picture.source)
        if made and any(given[name].shape != tensor.shape for name, tensor in made[0].items()):
            image, resized = image.resize(seen[0].size), resized + 1
            given = made_of(image, picture.source)
        made.append(given)
        seen.append(image)

    drawn = _drawn(corpus, corpus.pictures(seed, EDGE), samples, read, "pictures")
    arguments = {name: torch.cat([each[name] for each in made]) for name in made[0]}
    names, pixels = shared_names(picture_names(loaded.model.config, arguments)), arguments["pixel_values"]
    whole = [torch.tensor(np.array(image.resize(seen[0].size))) for image in seen]
    looked_at = _visible(pixels, processor.image_processor) if pixels.ndim == 4 else torch.stack(whole)
    return Samples(
        arguments,
        "image",
        names=names,
        grid=None if names is None else grids_of(loaded.model.config, arguments)[0],
        pictures=looked_at,
        sources=tuple(source for source, _ in drawn),
        definition=f"A sample is a picture in front of “{PROMPT}”{f', {resized} resized like the first' if resized else ''}.",
    )


def draw_recordings(loaded: LoadedModel, corpus: Corpus, *, seq_len: int, samples: int, seed: int) -> Samples:
    """Recordings as the model reads them, of ``seq_len`` frames for models that read any length; others have their own."""
    model = loaded.model
    processor = _processor(loaded, "sound")
    rate = int(getattr(processor, "sampling_rate", 16_000))
    length = _numbers(model, processor, rate, seq_len)
    name = model.main_input_name
    values: list[Tensor] = []

    def read(recording: Recording) -> None:
        made = lambda: processor(recording.wave, sampling_rate=rate, return_tensors="pt")  # noqa: E731
        values.append(_processed(processor, recording.source, made, name))

    drawn = _drawn(corpus, corpus.recordings(seed, rate, length), samples, read, f"recordings of {length / rate:.2f} s")
    return Samples(
        {name: torch.cat(values)},
        "audio",
        class_targets(model, [label for _, label in drawn], corpus.label),
        names=positions_of(model, {name: values[0].to(loaded.device, loaded.dtype)}).names,
        sources=tuple(source for source, _ in drawn),
    )


def has_own_length(loaded: LoadedModel) -> bool:
    """Whether samples of pictures or sound have as many positions as the model makes of them, whatever length is asked for."""
    if kind_of(loaded.model) != "audio" or loaded.processor is None:
        return kind_of(loaded.model) == "image"
    return len({_numbers(loaded.model, loaded.processor, 16_000, seq_len) for seq_len in (64, 128)}) == 1


def _drawn(
    corpus: Corpus, media: Iterator[Medium], samples: int, read: Callable[[Medium], None], what: str
) -> list[tuple[str, str | int | None]]:
    """Read the first ``samples`` of a corpus, one at a time; what each is called, and its class."""
    if samples < 1:
        raise ConfigurationError(f"`samples` must be at least 1, got {samples}")
    drawn = []
    for medium in islice(media, samples):
        read(medium)
        drawn.append((medium.source, medium.label))
    if len(drawn) < samples:
        advice = f"give `samples` {len(drawn)} or less" if drawn else "give longer ones or lower `seq_len`"
        raise InputError(f"corpus {corpus.label!r} holds {len(drawn)} {what}, and {samples} samples are wanted; {advice}")
    return drawn


def _processor(loaded: LoadedModel, what: str) -> Processor:
    if loaded.processor is None:
        lacks, how = "this model came without a processor, which knows", "give it: sinklab.wrap_model(model, processor=...)"
        if loaded.source:
            lacks, how = f"{loaded.name} has no {PROCESSOR_FILES[0]}, which says", "copy it from the original checkpoint"
        raise InputError(f"{lacks} how the model's {what} are made into numbers; {how}")
    return loaded.processor


def _made(processor: Processor, source: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        return make()
    except Exception as error:
        # Processors are code of many hands, and their settings come from a file.
        raise InputError(f"{type(processor).__name__} fails on {source}: {first_line(error)}") from error


def _processed(processor: Processor, source: str, make: Callable[[], dict[str, Tensor]], name: str) -> Tensor:
    """One input of the model, with a first dimension of one."""
    made = _made(processor, source, make)
    if name not in made:
        raise InputError(
            f"{type(processor).__name__} makes {', '.join(made)}, and the model reads {name}; is it another model's?"
        )
    return made[name]


def _size(pixels: Tensor) -> str:
    return " × ".join(map(str, pixels.shape[-2:]))


def _visible(pixels: Tensor, processor: Processor) -> Tensor | None:
    """What a model sees of pictures, uint8 ``(samples, height, width, 3)``: the processor's last steps undone."""
    if pixels.shape[1] not in (1, 3):
        return None
    values = pixels.float()
    if getattr(processor, "do_normalize", False):
        mean, std = (
            torch.tensor(np.atleast_1d(np.asarray(getattr(processor, name), dtype=np.float32))).view(1, -1, 1, 1)
            for name in ("image_mean", "image_std")
        )
        values = values * std + mean
    if getattr(processor, "do_rescale", False):
        values = values / float(getattr(processor, "rescale_factor", 1 / 255))
    shown = values.clamp(0, 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    return shown.expand(-1, -1, -1, 3).contiguous()


def _numbers(model: PreTrainedModel, processor: Processor, rate: int, seq_len: int) -> int:
    """How many numbers of sound a sample has."""
    whole = getattr(processor, "n_samples", None)
    if isinstance(whole, int) and model.main_input_name == "input_features":
        return whole  # Whisper reads half a minute, whatever is in it
    frames = getattr(model, "_get_feat_extract_output_lengths", None)
    if frames is None:
        seconds = getattr(processor, "max_length", 0)  # of spectrograms: frames of 10 ms, the first of 25
        return round((0.01 * seconds + 0.015) * rate) if isinstance(seconds, int) and seconds else 320 * seq_len
    if seq_len < 2:
        raise ConfigurationError(f"`seq_len` must be at least 2 frames, got {seq_len}")

    def enough(length: int) -> bool:
        return int(frames(torch.tensor(length))) >= seq_len

    high = 2
    while not enough(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
