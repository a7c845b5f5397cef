"""Chirps: synthetic sound for audio models, gliding tones with overtones between pauses; no speech and no music."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import ClassVar

import numpy as np

from sinklab.corpora.base import Identity, MediaCorpus, Recording
from sinklab.corpora.samples import Kind
from sinklab.registry import corpora

__all__ = ["Chirps"]

TONE = (0.08, 0.4)
"""Seconds of a tone, from and to."""


@corpora.register("chirps")
class Chirps(MediaCorpus):
    """Tones of 0.08 to 0.4 s, each gliding between two pitches of 90 to 400 Hz, with five overtones and soft ends.

    A tone in three is a pause, and all of it lies in white noise 40 dB below. Nothing in it is speech: it is there so that an
    audio model can be looked at without a download. Numbers about a model are to be taken on recordings (``audio_folder``).
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"audio"})

    @property
    def identity(self) -> Identity:
        return Identity(source="synthetic gliding tones with pauses and noise; no speech", revision="1", licence="none")

    def recordings(self, seed: int, rate: int, length: int) -> Iterator[Recording]:
        generator = np.random.default_rng(seed)
        for number in count():
            sound = 0.003 * generator.standard_normal(length)
            start = 0
            while start < length:
                size = max(2, round(rate * generator.uniform(*TONE)))
                low, high, loud = generator.uniform(90, 400), generator.uniform(90, 400), generator.uniform(0.1, 0.4)
                if generator.random() >= 1 / 3:
                    time = np.arange(size) / size
                    phase = 2 * math.pi * np.cumsum(low * (high / low) ** time) / rate
                    tone = sum(np.sin(part * phase) / part for part in range(1, 7) if part * max(low, high) < rate / 2)
                    part = slice(start, min(start + size, length))
                    sound[part] += (0.5 * loud * np.sin(math.pi * time) * tone)[: part.stop - part.start]
                start += size
            yield Recording(sound.clip(-1.0, 1.0).astype(np.float32), f"chirps {number}")
