"""Your own pictures: a folder of them, or one picture; subfolders are classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from sinklab.corpora import PICTURES
from sinklab.corpora._media import Files, open_picture
from sinklab.corpora.base import Picture
from sinklab.corpora.samples import Kind
from sinklab.registry import corpora


@corpora.register("image_folder")
class ImageFolder(Files):
    """Every picture below a folder, once each, in the order of the seed.

    The name of the first folder below is the class: a name of the model's ``id2label`` or the number of a class. Pictures at
    the top have none, and no loss is taken of them.

    Args:
        path: the folder, or a picture.

    Raises:
        InputError: nothing there, or no picture in it; while reading, a file that cannot be decoded.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"image"})
    suffixes: ClassVar[tuple[str, ...]] = PICTURES
    what: ClassVar[str] = "pictures"

    def pictures(self, seed: int, size: int) -> Iterator[Picture]:
        for name, path, label in self.shuffled(seed):
            yield Picture(open_picture(path, str(path)), name, label)
