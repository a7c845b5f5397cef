"""Files of pictures and of sound, read one by one as what a corpus yields."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sinklab.corpora.base import Identity, MediaCorpus, hash_files, visible_files
from sinklab.errors import InputError, first_line
from sinklab.results.blocks import counted


class Files(MediaCorpus):
    """Files with certain endings below a folder, or one file; hidden ones and empty ones are left out.

    A file in a folder below has the name of the first of these folders as its class; one that lies at the top has none.
    """

    suffixes: ClassVar[tuple[str, ...]]
    what: ClassVar[str]
    """What the files are, in words, in the plural."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise InputError(f"there is no folder or file {self.path}")
        one = {self.path.name: self.path} if self.path.suffix.lower() in self.suffixes else {}
        files = visible_files(self.path, self.suffixes) if self.path.is_dir() else one
        self._files = {name: path for name, path in files.items() if path.stat().st_size}
        if not self._files:
            raise InputError(f"{self.path} holds no {self.what}: no file with an ending such as {', '.join(self.suffixes[:4])}")

    @property
    def label(self) -> str:
        return f"{self.path.name}/" if self.path.is_dir() else self.path.name

    @property
    def identity(self) -> Identity:
        root = self.path if self.path.is_dir() else self.path.parent
        files = f" ({counted(len(self._files), 'file')})" if self.path.is_dir() else ""
        return Identity(
            source=f"{self.label}{files}", revision=f"sha256-{hash_files(root, self._files.values())}", licence="the user's own"
        )

    def shuffled(self, seed: int) -> Sequence[tuple[str, Path, str | None]]:
        """Name below the folder, path and class of every file, once each, in the order of the seed."""
        names = sorted(self._files)
        random.Random(seed).shuffle(names)
        return [(name, self._files[name], name.split("/")[0] if "/" in name else None) for name in names]


if TYPE_CHECKING:
    from PIL.Image import Image


def open_picture(source: Path | bytes, name: str) -> Image:
    """A picture as RGB; of an animation its first frame; turned as its camera says. What Pillow cannot decode is refused."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
                opened.load()
                return rgb(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError as error:
        raise InputError(f"{name} is no picture that Pillow knows; get it again, or take it out") from error
    except FileNotFoundError:
        raise InputError(f"there is no picture {name}") from None
    except Exception as error:
        # A damaged file makes decoders fail in every way that Python has.
        raise InputError(f"{name} cannot be decoded as a picture: {first_line(error)}; get it again, or take it out") from error


def rgb(image: Image) -> Image:
    """The picture in mode RGB, with eight bits a channel: transparent parts on white, 16 bits scaled and not cut off."""
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        if image.mode == "F" and values.size and values.min() >= 0.0 and values.max() <= 1.0:
            values = values * 255.0
        elif not values.size or values.max() > 255.0 or image.mode.startswith("I;16"):
            values = values / 257.0  # 65535 becomes 255
        return Image.fromarray(values.clip(0.0, 255.0).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        whole = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")
    return image.convert("RGB")


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """One channel (the mean of all), float32 ``(length,)`` in [-1, 1], and the rate in numbers a second, of a wav file."""
    if path.suffix.lower() != ".wav":
        raise InputError(
            f"{path} is {path.suffix.lower() or 'no'} sound, and wav is read: ffmpeg -i {path.name} {path.stem}.wav"
        )
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # of chunks beside the sound, and of a file cut short
            rate, sound = wavfile.read(path)
    except FileNotFoundError:
        raise InputError(f"there is no recording {path}") from None
    except Exception as error:
        raise InputError(f"{path} cannot be read as an uncompressed wav file: {error}; convert it: ffmpeg") from error
    if not sound.size or rate < 1:
        raise InputError(f"{path} holds no sound; take it out")
    of_numbers = sound.astype(np.float64)
    if sound.dtype == np.uint8:
        of_numbers = (of_numbers - 128.0) / 128.0
    elif sound.dtype.kind == "i":
        of_numbers /= 2.0 ** (8 * sound.dtype.itemsize - 1)  # of 24 bits the upper ones of 32
    return of_numbers.reshape(len(sound), -1).mean(1).astype(np.float32), rate


def resampled(wave_in: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """The same sound at another rate, float32."""
    if rate == wanted:
        return wave_in
    from scipy.signal import resample_poly

    ratio = Fraction(wanted, rate)
    return np.asarray(resample_poly(wave_in, ratio.numerator, ratio.denominator), dtype=np.float32)


def windows(sound: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Consecutive windows of ``length`` numbers; a rest that is shorter is left out."""
    return (sound[start : start + length] for start in range(0, len(sound) - length + 1, length))
