"""Pictures and recordings: read from files of any kind, the same for the same seed, and refused in a sentence."""

import io
import struct
import wave
import zlib
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from sinklab.corpora import resolve_corpus
from sinklab.corpora._media import open_picture
from sinklab.corpora.base import Encoder
from sinklab.errors import InputError

GREY = np.arange(64, dtype=np.uint8).reshape(8, 8)


def write_wav(path, values, rate=16_000, channels=1, width=2):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.asarray(values).tobytes())


def first(corpus, number, seed=0):
    return list(islice(resolve_corpus(str(corpus)).pictures(seed, 32), number))


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        (Image.fromarray(GREY), (63, 63, 63)),
        (Image.fromarray(GREY).convert("1"), (0, 0, 0)),
        (Image.fromarray(np.full((8, 8), 65535, dtype=np.uint16)), (255, 255, 255)),
        (Image.fromarray(np.full((8, 8), 257 * 100, dtype=np.uint16)), (100, 100, 100)),
        (Image.new("RGBA", (8, 8), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (8, 8), (255, 0, 0, 255)), (255, 0, 0)),
        (Image.new("LA", (8, 8), (40, 255)), (40, 40, 40)),
        (Image.new("RGB", (8, 8), (1, 2, 3)).quantize(4), (1, 2, 3)),
    ],
    ids=["grey", "black and white", "16 bits", "16 bits, middle", "transparent", "opaque", "grey and alpha", "palette"],
)
def test_pictures_of_every_mode_become_rgb(tmp_path, image, pixel):
    image.save(tmp_path / "one.png")
    (picture,) = first(tmp_path / "one.png", 1)
    assert (picture.image.mode, picture.image.size, picture.label) == ("RGB", (8, 8), None)
    found = picture.image.getpixel((7, 7))
    assert found == pixel or (image.mode == "1" and found in ((0, 0, 0), (255, 255, 255)))


def test_folders_are_classes_and_the_seed_is_the_order(tmp_path):
    for name in ("cat/a.png", "cat/deep/b.JPG", "dog/c.webp", "d.png", ".hidden/e.png", "dog/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x") if name.endswith("txt") else Image.new("RGB", (4, 4)).save(path)
    (tmp_path / "empty.png").touch()
    found = {picture.source: picture.label for picture in first(tmp_path, 9)}
    assert found == {"cat/a.png": "cat", "cat/deep/b.JPG": "cat", "dog/c.webp": "dog", "d.png": None}
    orders = [[picture.source for picture in first(tmp_path, 9, seed)] for seed in (0, 0, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert len(set(map(tuple, orders))) > 1
    assert resolve_corpus(str(tmp_path)).name == "image_folder"


def png(width, height):
    """A file of a few bytes that says how large a picture it holds."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def broken():
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "PNG")
    return buffer.getvalue()[:60]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no picture at all", "one.png is no picture that Pillow knows; get it again"),
        (broken(), "one.png cannot be decoded as a picture: .*; get it again, or take it out"),
    ],
)
def test_a_picture_that_cannot_be_read_is_refused(tmp_path, content, message):
    (tmp_path / "one.png").write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        first(tmp_path / "one.png", 1)
    assert "\n" not in str(error.value)


def test_photographs_are_windows_of_two_pictures():
    pictures = first("photographs", 6)
    assert [picture.source.split()[0] for picture in pictures] == ["china.jpg", "flower.jpg"] * 3
    assert {picture.image.size for picture in pictures[:2]} == {(427, 427)}
    assert all(171 <= picture.image.width == picture.image.height <= 427 for picture in pictures)
    again, other = first("photographs", 6), first("photographs", 6, seed=1)
    assert [picture.source for picture in again] == [picture.source for picture in pictures]
    assert [picture.source for picture in other[2:]] != [picture.source for picture in pictures[2:]]
    assert "CC BY" in resolve_corpus("photographs").identity.licence


def test_made_up_pictures_and_sound():
    (noise,) = first("noise", 1)
    assert noise.image.size == (32, 32)
    assert np.asarray(noise.image).std() == pytest.approx(255 / 12**0.5, rel=0.05)
    (grey,) = first("constant", 1)
    assert len(np.unique(np.asarray(grey.image))) == 1
    for name in ("noise", "constant", "chirps"):
        one, two = (next(resolve_corpus(name).recordings(0, 16_000, 4000)).wave for _ in range(2))
        assert (one == two).all()
        assert (one.shape, one.dtype) == ((4000,), np.float32)
        assert 0 < np.abs(one).max() <= 1


@pytest.mark.parametrize(("width", "dtype", "top"), [(1, np.uint8, 255), (2, "<i2", 32767), (4, "<i4", 2**31 - 1)])
def test_wav_of_every_depth(tmp_path, width, dtype, top):
    write_wav(tmp_path / "a.wav", np.full(80, top, dtype=dtype), width=width)
    (recording,) = resolve_corpus(str(tmp_path / "a.wav")).recordings(0, 16_000, 80)
    assert recording.wave == pytest.approx(np.ones(80), abs=1 / 127)


def test_three_bytes_are_one_number(tmp_path):
    numbers = np.array([[0, 0, 0x40], [0, 0, 0xC0]], dtype=np.uint8)
    write_wav(tmp_path / "a.wav", numbers, width=3)
    (recording,) = resolve_corpus(str(tmp_path / "a.wav")).recordings(0, 16_000, 2)
    assert recording.wave.tolist() == [0.5, -0.5]


def test_recordings_are_mono_windows_at_the_rate_of_the_model(tmp_path):
    (tmp_path / "yes").mkdir()
    time = np.arange(8000) / 8000
    tone = (20_000 * np.sin(2 * np.pi * 440 * time)).astype("<i2")
    write_wav(tmp_path / "yes" / "a.wav", np.stack([tone, tone], 1), rate=8000, channels=2)
    write_wav(tmp_path / "short.wav", tone[:100], rate=8000)
    found = list(resolve_corpus(str(tmp_path)).recordings(0, 16_000, 4000))
    assert [(recording.source, recording.label) for recording in found] == [
        (f"yes/a.wav {number / 4:.2f} s", "yes") for number in range(4)
    ]
    spectrum = np.abs(np.fft.rfft(found[1].wave))
    assert spectrum.argmax() == round(440 * 4000 / 16_000)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.mp3", b"ID3", r"is .mp3 sound, and wav is read: ffmpeg -i a.mp3 a.wav"),
        ("a.wav", b"RIFF", r"cannot be read as an uncompressed wav file: .*; convert it: ffmpeg"),
        ("a.wav", b"no sound at all, but text", "cannot be read as an uncompressed wav file"),
    ],
)
def test_sound_that_cannot_be_read_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(resolve_corpus(str(tmp_path)).recordings(0, 16_000, 10))


def test_a_corpus_gives_what_it_holds():
    with pytest.raises(InputError, match="'noise' holds recordings or pictures, and tokens of a text are wanted"):
        resolve_corpus("noise").sample(Encoder(9), seq_len=4, samples=1, seed=0, bos=False)
    for ask in (
        lambda: resolve_corpus("python_source").pictures(0, 8),
        lambda: resolve_corpus("photographs").recordings(0, 1, 1),
    ):
        with pytest.raises(InputError, match=r"holds no (pictures|recordings)"):
            ask()
    with pytest.raises(InputError, match=r"there is no picture file 'nope\.png'"):
        resolve_corpus("nope.png")


def test_a_camera_says_which_side_is_up(tmp_path):
    image = Image.new("RGB", (8, 4))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert open_picture(tmp_path / "turned.jpg", "turned.jpg").size == (4, 8)
