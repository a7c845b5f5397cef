"""Pictures from files, made RGB: of any mode and size, refused in a sentence where they are broken or beyond reason."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["LARGEST", "open_picture", "rgb"]

LARGEST = 100_000_000
"""Pixels of the largest picture that is decoded: 300 MB as RGB. A file of a few kilobytes may claim far more."""


def open_picture(source: Path | bytes, name: str) -> Image:
    """A picture as RGB; of an animation its first frame; turned as its camera says.

    Raises:
        InputError: no picture, a broken one, or one of more than :data:`LARGEST` pixels.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours, and is an error
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
                width, height = opened.size
                if width * height > LARGEST:
                    raise InputError(
                        f"{name} says that it has {width:,} × {height:,} pixels, and pictures of more than {LARGEST:,} are not "
                        "decoded; make it smaller"
                    )
                opened.load()
                return rgb(ImageOps.exif_transpose(opened))
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        what = "is no picture that Pillow knows" if isinstance(error, UnidentifiedImageError) else "has too many pixels"
        raise InputError(f"{name} {what}; get it again, or take it out") from error
    except FileNotFoundError:
        raise InputError(f"there is no picture {name}") from None
    except InputError:
        raise
    except Exception as error:
        # A damaged file makes decoders fail in every way that Python has.
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{name} cannot be decoded as a picture: {said}; get it again, or take it out") from error


def rgb(image: Image) -> Image:
    """The picture in mode RGB, with eight bits a channel: transparent parts on white, 16 bits scaled and not cut off."""
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        import numpy as np

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
