"""Constant: pictures of a single grey, or one steady tone; without differences between positions, what happens to the sink?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from sinklab.corpora.base import Identity, MediaCorpus, Picture, Recording
from sinklab.corpora.samples import Kind
from sinklab.registry import corpora


@corpora.register("constant")
class Constant(MediaCorpus):
    """Each picture is one grey, drawn uniformly; each recording one tone of 100 to 1,000 Hz.

    What a repeated token is for a text: patches differ in their positions alone.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"image", "audio"})

    @property
    def identity(self) -> Identity:
        return Identity(source="one grey a picture, one tone a recording, drawn uniformly", revision="1", licence="none")

    def pictures(self, seed: int, size: int) -> Iterator[Picture]:
        from PIL import Image

        generator = np.random.default_rng(seed)
        while True:
            grey = int(generator.integers(0, 256))
            yield Picture(Image.new("RGB", (size, size), (grey, grey, grey)), f"grey {grey}")

    def recordings(self, seed: int, rate: int, length: int) -> Iterator[Recording]:
        generator = np.random.default_rng(seed)
        while True:
            pitch = generator.uniform(100, 1000)
            sound = 0.3 * np.sin(2 * math.pi * pitch * np.arange(length) / rate)
            yield Recording(sound.astype(np.float32), f"{pitch:.0f} Hz")
