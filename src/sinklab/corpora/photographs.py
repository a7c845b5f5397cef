"""Photographs that come with scikit-learn: windows cut from a temple and from a flower; real pictures without a download."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import ClassVar

from sinklab.corpora._media import open_picture
from sinklab.corpora.base import Identity, MediaCorpus, Picture, hash_files
from sinklab.corpora.samples import Kind
from sinklab.errors import InputError
from sinklab.registry import corpora

__all__ = ["Photographs"]

FILES = ("china.jpg", "flower.jpg")
LEAST = 0.4
"""Edge of the smallest window, as a share of the shorter edge of the photograph."""


@corpora.register("photographs")
class Photographs(MediaCorpus):
    """Square windows of two photographs (640 × 427), without classes.

    The first two pictures are the largest squares in the middle of each. The others are cut at random places, with edges of
    40 to 100 % of the shorter edge, and every second one is mirrored. Windows of one photograph are alike: they say how a model
    reads a photograph, and stand for no population of photographs. A folder of your own has more to say.

    Raises:
        InputError: scikit-learn is not installed, when pictures or the identity are asked for.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"image"})

    @property
    def identity(self) -> Identity:
        files = self._files()
        return Identity(
            source=f"{' and '.join(FILES)} of scikit-learn {importlib.metadata.version('scikit-learn')}",
            revision=f"sha256-{hash_files(files[0].parent, files)}",
            licence="CC BY 2.0, attributed in the README.txt beside them; read in place, nothing is copied",
        )

    def pictures(self, seed: int, size: int) -> Iterator[Picture]:
        from PIL import ImageOps

        generator = random.Random(seed)
        photographs = [open_picture(path, path.name) for path in self._files()]
        for number in count():
            which = number % len(FILES)
            whole = photographs[which]
            shorter = min(whole.size)
            edge = shorter if number < len(FILES) else round(shorter * generator.uniform(LEAST, 1.0))
            room = [length - edge for length in whole.size]
            left, top = [part // 2 for part in room] if number < len(FILES) else [generator.randint(0, part) for part in room]
            window = whole.crop((left, top, left + edge, top + edge))
            if number >= len(FILES) and generator.random() < 0.5:
                window = ImageOps.mirror(window)
            yield Picture(window, f"{FILES[which]} {left},{top} {edge} px")

    def _files(self) -> list[Path]:
        found = importlib.util.find_spec("sklearn")  # not imported: that takes a second, and only its files are wanted
        folder = None if found is None or found.origin is None else Path(found.origin).parent / "datasets" / "images"
        paths = [] if folder is None else [folder / name for name in FILES]
        if not paths or not all(path.is_file() for path in paths):
            raise InputError(
                "corpus 'photographs' needs scikit-learn, not installed: pip install 'sinklab[vision]', or give a folder"
            )
        return paths
