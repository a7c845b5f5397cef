"""GGUF, the one-file format of llama.cpp: which file is meant, whether it is whole, and what its weights are packed as.

The header is read here, without torch. transformers reads config, weights and tokenizer, with the package ``gguf``, and unpacks
every packed type to the dtype asked for. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Types of metadata by their number, as struct writes them."""
TEXT, LIST = 8, 9
"""The other types."""
HALVES = ("BF16", "F16")


@dataclasses.dataclass(frozen=True)
class Gguf:
    """What the header of a file says."""

    path: Path
    quantisation: str  # what its author calls it, Q4_K_M; else the type that holds most numbers
    types: Mapping[str, int]  # of tensors, and how many there are: {"Q4_1": 210, "F32": 61}
    numbers: int  # in all tensors
    rows: int  # of the embedding of tokens; 0 without one
    has_tokenizer: bool

    @property
    def half(self) -> str | None:
        """The type of halves that a file without packed tensors holds, if it holds one."""
        packed = self.types.keys() - {"F32", *HALVES}
        return None if packed else next((half for half in HALVES if half in self.types), None)

    @functools.cached_property
    def sha256(self) -> str:
        """Digest of the file, in hexadecimal digits."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def record(self) -> dict[str, object]:
        """What ``run.json`` says of it."""
        return {"file": self.path.name, "quantisation": self.quantisation, "types": dict(self.types), "sha256": self.sha256}


def local_gguf(name: str | Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a directory without safetensors; ``None`` where it means
    none."""
    path = Path(name).expanduser()
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or any(path.glob("model.safetensors*")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise InputError(f"{path} holds {len(files)} GGUF files; name the one that is meant, such as {files[0]}")
    return files[0] if files else None


def in_repository(name: str) -> tuple[str, str] | None:
    """Repository and file of ``org/model/file.gguf``; ``None`` for another name."""
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)/((?:\w[\w.-]*/)*[\w.-]+\.gguf)", name)
    return (match[1], match[2]) if match else None


def require_package(name: str | Path) -> None:
    """Refuse a file while the package ``gguf``, which unpacks it, is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigurationError(f"{name} needs the package gguf, which is not installed: pip install 'sinklab[gguf]'")


def read_gguf(path: Path) -> Gguf:
    """The header of a file, after checking that all of its tensors are there, in one part, and can be unpacked."""
    require_package(path)
    from gguf.constants import MODEL_ARCH_NAMES, LlamaFileType

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            magic, version, size = bytes(data[:4]), int.from_bytes(data[4:8], "little"), len(data)
            readable = magic == MAGIC and version in VERSIONS
            header = _Header(data) if readable else None
    except OSError as error:
        raise InputError(f"{path} cannot be opened: {error.strerror}; change its permissions") from error
    except (struct.error, ValueError, TypeError, KeyError, ArithmeticError) as error:  # ValueError: an empty file too
        raise InputError(f"{path} is truncated or damaged: its header has no end; get the file again") from error
    if header is None:
        what = f"it begins with {magic!r}" if magic != MAGIC else f"it is of version {version}, not 2 or 3"
        raise InputError(f"{path} is no GGUF file that can be read: {what}")
    said = header.metadata
    if (parts := said.get("split.count", 0)) > 1:
        raise InputError(f"{path} is one of {parts} parts; join them with: llama-gguf-split --merge FIRST_PART OUT.gguf")
    architecture = said.get("general.architecture")
    if architecture is None:
        raise InputError(
            f"{path} names no architecture, so nothing says how to load it; where transformers can (from_pretrained with "
            "gguf_file=…), convert it with save_pretrained and give that directory"
        )
    if architecture not in MODEL_ARCH_NAMES.values():
        raise UnsupportedModelError(f"{path} is of architecture {architecture!r}, which the package gguf does not know")
    scaling = said.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" and architecture != "gpt-oss":
        raise UnsupportedModelError(
            f"{path} scales positions ({scaling}), which transformers does not read from GGUF; take the original checkpoint"
        )
    types: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    end = header.start
    for tensor in header.tensors:
        packing = _packing(tensor.type)
        if packing is None:
            package = f"gguf {importlib.metadata.version('gguf')}"
            raise UnsupportedModelError(f"{path} holds {tensor.name} as type {tensor.type}, which {package} cannot unpack")
        types[packing.name] += 1
        numbers[packing.name] += math.prod(tensor.shape)
        end = max(end, header.start + tensor.offset + math.prod(tensor.shape) // packing.block * packing.bytes)
    if end > size:
        raise InputError(f"{path} is truncated: it has {size:,} of {end:,} bytes; get the file again")
    known = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    return Gguf(
        path=path,
        quantisation=known.get(said.get("general.file_type", -1), max(numbers, key=numbers.__getitem__, default="none")),
        types=dict(types.most_common()),
        numbers=numbers.total(),
        rows=next((tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0),
        has_tokenizer={"tokenizer.ggml.model", "tokenizer.ggml.tokens"} <= said.keys(),
    )


class _Packing(NamedTuple):
    """How a type packs: its name, and the numbers and bytes of a block."""

    name: str
    block: int
    bytes: int


@functools.cache
def _packing(kind: int) -> _Packing | None:
    """Of a type by its number; ``None`` for one that the package does not know or cannot unpack."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        dequantize(np.zeros((1, size), np.uint8), GGMLQuantizationType(kind))
    except (ValueError, KeyError, NotImplementedError):
        return None
    return _Packing(GGMLQuantizationType(kind).name, block, size)


class _Tensor(NamedTuple):
    """An entry of the list of tensors; ``offset`` in bytes from the end of the header."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class _Header:
    """Metadata, of lists the length alone, and tensors."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, len(MAGIC) + 4
        tensors, fields = self._take("QQ")
        self.metadata: dict[str, Any] = {self._text(): self._value(*self._take("I")) for _ in range(fields)}
        self.tensors = [self._tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        self.start = -(-self._at // alignment) * alignment

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _text(self) -> str:
        return str(self._take(f"{self._take('Q')[0]}s")[0], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind != LIST:
            return self._take(SCALARS[kind])[0]
        inner, length = self._take("IQ")
        if inner != TEXT:
            self._at += length * struct.calcsize(SCALARS[inner])
            return length
        for _ in range(length):
            (skipped,) = self._take("Q")
            self._at += skipped
        return length

    def _tensor(self) -> _Tensor:
        name, (dimensions,) = self._text(), self._take("I")
        return _Tensor(name, self._take(f"{dimensions}Q"), *self._take("IQ"))


def unpacked() -> dict[str, object]:
    """What ``from_pretrained`` needs besides the file, so that no weight stays packed."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # of transformers 5.24 and newer; those before always unpack
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """For a ``with`` block transformers parses the header of a file once, and its vocabulary fast.

    It asks for config, for weights and for tokenizer anew, and the reader of ``gguf`` takes ten seconds each time for the
    vocabulary of Gemma 3; it asks for the names of tensors once for each module. Its bar of unpacked tensors is off too.
    """
    import gguf
    import numpy as np
    from transformers import modeling_gguf_pytorch_utils as loader

    class Reader(gguf.GGUFReader):
        @property  # type: ignore[override]
        def data(self) -> np.ndarray:
            return self._mapped

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._mapped = np.asarray(mapped)  # slices of a memmap are slow to make

        def _get_str(self, offset: int) -> tuple[np.ndarray, np.ndarray]:
            length = np.frombuffer(self._mapped, "<u8", 1, offset)
            return length, np.frombuffer(self._mapped, np.uint8, int(length[0]), offset + 8)

    changed: dict[tuple[Any, str], Any] = {
        (gguf, "GGUFReader"): functools.cache(Reader),
        (gguf, "get_tensor_name_map"): functools.cache(gguf.get_tensor_name_map),
        (loader, "tqdm"): lambda tensors, **_: tensors,
    }
    before = {place: getattr(*place) for place in changed}
    try:
        for place, value in changed.items():
            setattr(*place, value)
        yield
    finally:
        for place, value in before.items():
            setattr(*place, value)
