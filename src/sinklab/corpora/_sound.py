"""Sound from wav files, made mono at the rate of a model: uncompressed, 8 to 32 bits; everything else is refused."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from sinklab.errors import InputError

__all__ = ["LONGEST", "read_wav", "resampled", "windows"]

LONGEST = 3600 * 48_000
"""Numbers of a channel that are read of one file: an hour at 48 kHz."""


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """One channel (the mean of all), float32 ``(length,)`` in [-1, 1], and the rate in numbers a second.

    Raises:
        InputError: no wav file, a compressed, damaged or empty one, or one that is too long.
    """
    if path.suffix.lower() != ".wav":
        raise InputError(
            f"{path} is {path.suffix.lower() or 'no'} sound, and wav is read: ffmpeg -i {path.name} {path.stem}.wav"
        )
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, frames = file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()
            if frames > LONGEST:
                raise InputError(f"{path} has {frames:,} numbers a channel, and at most {LONGEST:,} are read; cut it")
            raw = file.readframes(frames)
    except FileNotFoundError:
        raise InputError(f"there is no recording {path}") from None
    except (wave.Error, EOFError, OSError) as error:
        raise InputError(
            f"{path} cannot be read as an uncompressed wav file: {error or 'it ends too soon'}; convert it: "
            f"ffmpeg -i {path.name} -c:a pcm_s16le new.wav"
        ) from error
    whole = len(raw) // (channels * width) * channels * width
    if not whole or rate < 1:
        raise InputError(f"{path} holds no sound; take it out")
    return _decoded(raw[:whole], width).reshape(-1, channels).mean(1).astype(np.float32), rate


def _decoded(raw: bytes, width: int) -> np.ndarray:
    """Little-endian numbers of 1 to 4 bytes as float64 in [-1, 1); those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float64) - 128.0) / 128.0
    padded = np.zeros((len(raw) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
    return padded.view("<i4")[:, 0].astype(np.float64) / 2.0**31


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
