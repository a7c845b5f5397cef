"""Samples: what a model is shown, ready for its forward, whether it reads text, pairs of texts, pictures or sound."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from sinklab.attention.positions import rows_of
from sinklab.errors import InputError

Kind = Literal["text", "pairs", "image", "audio"]
"""What a sample is: a text, a source text with its target text, a picture, a recording."""


ROLES = {"corner patch": "the corner patches", "register": "the registers"}
"""Beginning of the names of positions that share a role, and what they are called together."""

_SIDES = ("", "decoder_")
"""How names of arguments begin, of a model with one side or of an encoder, and of a decoder."""

MOST_TOGETHER = 0.1
"""Share of the positions up to which some of them are taken together."""


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """Arguments of a model's forward by name, one row of every tensor a sample; of pictures among texts, several of one size.

    Attributes:
        arguments: ``input_ids`` int64 ``(samples, seq_len)``; ``pixel_values`` float32 ``(samples, channels, height, width)``;
            ``input_values`` or ``input_features`` of recordings; masks that go with them.
        kind: what a sample is.
        targets: int64, what the loss is taken of: class numbers ``(samples,)`` or token ids ``(samples, positions)``,
            :data:`~sinklab.models.losses.IGNORED` where none is taken. ``None`` for next tokens, and where there is no loss.
        names: what every position of self-attention is called, where it is no token of a text: ``[CLS]``, ``register 2``,
            ``corner patch (0, 0)``, ``patch (3, 4)``, ``frame 12``; ``None`` of a token.
        grid: rows and columns of the patches, which come last among the positions; ``None`` where there are none.
        pictures: what to show of a sample, uint8 ``(samples, height, width, 3)``; ``None`` where there is nothing to look at.
        sources: what every sample is called, such as the name of its file; empty where it has no name.
        scored: what the model is shown for its loss, where that is not what its attention is measured on: the same texts with
            hidden tokens, of a masked-LM loss.
        definition: what source and target are, in a sentence, of pairs.
    """

    arguments: Mapping[str, Tensor]
    kind: Kind = "text"
    targets: Tensor | None = None
    names: tuple[str | None, ...] | None = None
    grid: tuple[int, int] | None = None
    pictures: Tensor | None = None
    sources: tuple[str, ...] = ()
    scored: Samples | None = None
    definition: str | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(tensor) for name, tensor in self.arguments.items()}
        if self.tokens is not None and "pixel_values" in lengths:
            lengths = {name: length % len(self.tokens) or len(self.tokens) for name, length in lengths.items()}
        if self.targets is not None:
            lengths["targets"] = len(self.targets)
        if len(set(lengths.values())) != 1:
            raise InputError(f"every tensor of some samples has one row a sample; here they have {lengths or 'no tensor'}")

    @classmethod
    def of_tokens(cls, tokens: Tensor) -> Samples:
        """Samples of text from token ids, int64 ``(samples, seq_len)``."""
        return cls({"input_ids": tokens})

    def __len__(self) -> int:
        return len(next(iter(self.arguments.values())) if self.tokens is None else self.tokens)

    @property
    def tokens(self) -> Tensor | None:
        """Token ids, int64 ``(samples, seq_len)``; ``None`` for samples that are no text."""
        return self.arguments.get("input_ids")

    @property
    def positions(self) -> int | None:
        """Positions of a sample in self-attention (of the encoder, where there are two sides), as far as it is known before."""
        if self.tokens is not None:
            return self.tokens.shape[1]
        return None if self.names is None else len(self.names)

    @property
    def together(self) -> dict[str, tuple[int, ...]]:
        """Positions that have a role in common, two or more of them, by what they are called together.

        Where they are more than :data:`MOST_TOGETHER` of all, attention that looks everywhere alike might make them a sink.
        """
        groups = {
            called: tuple(number for number, name in enumerate(self.names or ()) if name and name.startswith(f"{role} "))
            for role, called in ROLES.items()
        }
        return {
            called: positions
            for called, positions in groups.items()
            if 1 < len(positions) <= MOST_TOGETHER * len(self.names or ())
        }

    @property
    def sha256(self) -> str:
        """SHA-256 of the arguments, in hexadecimal; of the ids alone for text, as :func:`~sinklab.corpora.base.hash_tokens`."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.arguments.items()):
            if len(self.arguments) > 1 or name != "input_ids":
                digest.update(f"{name} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def take(self, rows: slice | Tensor) -> Samples:
        """Some of the samples, by a slice or by their numbers."""
        numbers = torch.arange(len(self))[rows]
        return dataclasses.replace(
            self,
            arguments=rows_of(self.arguments, numbers),
            targets=None if self.targets is None else self.targets[numbers.to(self.targets.device)],
            pictures=None if self.pictures is None else self.pictures[numbers],
            sources=tuple(self.sources[number] for number in numbers.tolist()) if self.sources else (),
            scored=None if self.scored is None else self.scored.take(rows),
        )

    def batches(self, size: int) -> Iterator[Samples]:
        """The samples in order, ``size`` of them at a time."""
        return (self.take(slice(start, start + size)) for start in range(0, len(self), size))

    def unpadded(self) -> Iterator[Samples]:
        """The samples without what their masks hide, those that are padded alike together; all as they are without a mask.

        Arguments whose name begins with ``decoder_`` go by ``decoder_attention_mask``, as do the targets of pairs, and all
        others by ``attention_mask``. A sample that is hidden whole is left out.
        """
        given = {side: self.arguments.get(f"{side}attention_mask") for side in _SIDES}
        masks = {side: mask.cpu().bool() for side, mask in given.items() if mask is not None and mask.ndim == 2}
        if all(bool(mask.all()) for mask in masks.values()):
            yield self
            return
        patterns, of = torch.unique(torch.cat(list(masks.values()), 1), dim=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            kept = dict(zip(masks, pattern.split([mask.shape[1] for mask in masks.values()]), strict=True))
            if not all(bool(places.any()) for places in kept.values()):
                continue
            alike = self.take((of == number).nonzero()[:, 0])
            arguments = {name: _cut(tensor, kept.get(_side(name))) for name, tensor in alike.arguments.items()}
            side = "decoder_" if self.kind == "pairs" else ""
            targets = None if alike.targets is None else _cut(alike.targets, kept.get(side))
            yield dataclasses.replace(alike, arguments=arguments, targets=targets, scored=None)

    def on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments on a device; pictures and sound in ``dtype``, which is that of the model."""
        return {
            name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            for name, tensor in self.arguments.items()
        }


def _side(name: str) -> str:
    """Which of the two sides an argument belongs to."""
    return _SIDES[name.startswith(_SIDES[1])]


def _cut(tensor: Tensor, places: Tensor | None) -> Tensor:
    """The columns of a tensor ``(samples, positions, …)`` at some places; another one as it is."""
    if places is None or tensor.ndim < 2 or tensor.shape[1] != len(places):
        return tensor
    return tensor[:, places.to(tensor.device)]
