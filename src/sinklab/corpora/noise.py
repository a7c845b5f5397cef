"""Noise: pictures of independent pixels, or white noise; a sink that remains does not depend on content."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

import numpy as np

from sinklab.corpora.base import Identity, MediaCorpus, Picture, Recording
from sinklab.corpora.samples import Kind
from sinklab.registry import corpora


@corpora.register("noise")
class Noise(MediaCorpus):
    """Every channel of every pixel is drawn uniformly; sound is normal, with a standard deviation of 0.1 of full scale.

    What random tokens are for a text. Pictures have the size that the model reads, so that no resizing smooths them.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"image", "audio"})

    @property
    def identity(self) -> Identity:
        return Identity(source="independent draws for every pixel or number", revision="1", licence="none")

    def pictures(self, seed: int, size: int) -> Iterator[Picture]:
        from PIL import Image

        generator = np.random.default_rng(seed)
        for number in count():
            yield Picture(Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8)), f"noise {number}")

    def recordings(self, seed: int, rate: int, length: int) -> Iterator[Recording]:
        generator = np.random.default_rng(seed)
        for number in count():
            sound = 0.1 * generator.standard_normal(length)
            yield Recording(sound.clip(-1.0, 1.0).astype(np.float32), f"noise {number}")
