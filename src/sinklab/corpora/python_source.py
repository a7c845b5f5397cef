"""Source text of the running interpreter's standard library and of installed packages: real text without a download."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from sinklab.corpora.base import Identity, Split, TextCorpus, hash_order, is_held_out
from sinklab.registry import corpora


@corpora.register("python_source")
class PythonSource(TextCorpus):
    """Python files, split by path into 95 % training and 5 % held-out files.

    The split hashes the path of a file below its package (``json/decoder.py``), so a file is on the same side on every machine
    and in every version. Passages start at a random line of a held-out file, which the embedded models have not seen.

    ``transformers`` is left out although it is installed: its model files repeat each other, and a held-out file would be a
    near copy of a training file.
    """

    packages: ClassVar[tuple[str, ...]] = (
        "torch",
        "numpy",
        "pandas",
        "networkx",
        "pyarrow",
        "huggingface_hub",
        "jinja2",
        "rich",
    )

    @property
    def identity(self) -> Identity:
        versions = " ".join(f"{name}-{importlib.metadata.version(name)}" for name in self._installed())
        return Identity(
            source="Python files of the standard library and installed packages",
            revision=f"{platform.python_implementation()}-{platform.python_version()} {versions}",
            licence="PSF-2.0 and the licences of the packages; read in place, nothing is copied",
        )

    def passages(self, seed: int) -> Iterator[str]:
        generator = random.Random(seed)
        files = self.files("held_out")
        while True:
            lines = _read(generator.choice(files)).splitlines(keepends=True)
            if lines:
                yield "".join(lines[generator.randrange(len(lines)) :])

    def documents(self, split: Split) -> Iterator[str]:
        """Every file of a split, whole, in the order of a hash of its path: the first few are a sample of all packages."""
        paths = dict(self._split(split))
        for relative in hash_order(paths):
            yield _read(paths[relative])

    def files(self, split: Split) -> list[Path]:
        """Paths of a split, in an order that does not depend on the file system."""
        return [path for _, path in sorted(self._split(split))]

    def _split(self, split: Split) -> list[tuple[str, Path]]:
        return [file for file in self._all_files if is_held_out(file[0]) == (split == "held_out")]

    @functools.cached_property
    def _all_files(self) -> list[tuple[str, Path]]:
        """Every file with its path below its package; found once, since looking takes a second."""
        standard = Path(sysconfig.get_paths()["stdlib"])
        roots = [(standard, standard)]
        for name in self._installed():
            folder = Path(str(importlib.util.find_spec(name).origin)).parent  # type: ignore[union-attr]
            roots.append((folder.parent, folder))
        return [file for base, folder in roots for file in _source_files(base, folder)]

    def _installed(self) -> list[str]:
        return [name for name in self.packages if importlib.util.find_spec(name) is not None]


def _source_files(base: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Python files of more than 200 bytes below a folder, with their path below ``base``; ``site-packages`` is not entered."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "site-packages"]
        below = Path(place).relative_to(base).as_posix()
        for name in names:
            if name.endswith(".py") and os.stat(f"{place}/{name}").st_size > 200:
                yield name if below == "." else f"{below}/{name}", Path(place, name)


def _read(path: Path) -> str:
    # Some test files of the standard library are not UTF-8 on purpose; as text to read they may carry replacement marks.
    return path.read_text(encoding="utf-8", errors="replace")
