"""The store of a run: what was computed so far, each under its settings and the source of the code that computed it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sinklab.errors import InputError
from sinklab.results.file import write_atomically
from sinklab.results.table import write_json

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """One entry: plain JSON values, and arrays by name."""

    record: Any
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Store:
    """Entries in files of a folder, each there whole or not at all.

    An entry belongs to a name and to settings; the file is ``NAME-DIGEST.json``, or ``.safetensors`` if it has arrays, with
    eight digits of the hash of the settings. It is found again only by what has computed it: ``sources`` is the release of
    sinklab, and the versions of the metrics above 1. A trained model that numbers are computed of is a setting: the hash of its
    weights.

    Args:
        folder: made with the first entry; ``None`` keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def cached(self, name: str, settings: Mapping[str, object], sources: str, compute: Callable[[], T]) -> T:
        """The record of an entry, computed and put there if it is missing.

        Args:
            compute: gives plain JSON values.

        Raises:
            InputError: an entry that cannot be read.
        """
        stored = self.get(name, settings, sources)
        if stored is not None:
            earlier: T = stored.record
            return earlier
        record = compute()
        self.put(name, settings, sources, record)
        return record

    def get(self, name: str, settings: Mapping[str, object], sources: str) -> Stored | None:
        """The entry, or ``None`` where there is none, or one that other code has computed.

        Raises:
            InputError: its file cannot be read, or is of other settings.
        """
        for path in self.paths(name, settings):
            if not path.is_file():
                continue
            try:
                header, arrays = _read(path)
                recorded, wanted = header["settings"], _plain(settings)
                if recorded != wanted:
                    raise ValueError(f"it is of settings {recorded}")
                return Stored(header["record"], arrays) if header["sources"] == sources else None
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"stored result {path} cannot be used for settings {json.dumps(_plain(settings))}: {error}; remove it to "
                    "have it computed again"
                ) from error
        return None

    def put(
        self,
        name: str,
        settings: Mapping[str, object],
        sources: str,
        record: object = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write an entry, in the place of one of the same name and settings.

        Args:
            record: plain JSON values.
            arrays: of any shape and any dtype of numbers.
        """
        if self.folder is None:
            return
        header = {"settings": _plain(settings), "sources": sources, "record": record}
        as_json, as_arrays = self.paths(name, settings)
        if arrays is None:
            write_json(header, as_json)
            return
        from safetensors.numpy import save

        content = save(
            {key: np.ascontiguousarray(value) for key, value in arrays.items()},
            {key: json.dumps(value, allow_nan=False) for key, value in header.items()},
        )
        write_atomically(as_arrays, lambda temporary: temporary.write_bytes(content))

    def paths(self, name: str, settings: Mapping[str, object]) -> tuple[Path, ...]:
        """The files in which an entry may be: without arrays, and with."""
        if self.folder is None:
            return ()
        digest = hashlib.sha256(json.dumps(_plain(settings), sort_keys=True).encode()).hexdigest()[:8]
        return tuple(self.folder / f"{name}-{digest}{suffix}" for suffix in (".json", ".safetensors"))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8")), {}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as opened:
            header = {key: json.loads(value) for key, value in opened.metadata().items()}
            return header, {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, AttributeError) as error:
        raise ValueError(str(error)) from error


def _plain(settings: Mapping[str, object]) -> object:
    """Settings as JSON gives them back, so that a tuple equals the list that it was written as."""
    return json.loads(json.dumps(settings))
