"""Your own recordings: a folder of wav files, or one file; subfolders are classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from sinklab.corpora import SOUNDS
from sinklab.corpora._media import Files, read_wav, resampled, windows
from sinklab.corpora.base import Recording
from sinklab.corpora.samples import Kind
from sinklab.registry import corpora


@corpora.register("audio_folder")
class AudioFolder(Files):
    """Consecutive windows of every wav file below a folder, files in the order of the seed.

    Channels are averaged, and the rate becomes that of the model. A window has the length that the model is asked to read;
    files that are shorter are passed over. The name of the first folder below is the class, as with pictures.

    Args:
        path: the folder, or a wav file.

    Raises:
        InputError: nothing there, or no recording in it; while reading, a file that is no uncompressed wav.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset({"audio"})
    suffixes: ClassVar[tuple[str, ...]] = SOUNDS
    what: ClassVar[str] = "recordings"

    def recordings(self, seed: int, rate: int, length: int) -> Iterator[Recording]:
        for name, path, label in self.shuffled(seed):
            sound = resampled(*read_wav(path), rate)
            for number, window in enumerate(windows(sound, length)):
                yield Recording(window, f"{name} {number * length / rate:.2f} s", label)
