"""Checkpoints that are there whole or not at all: written beside their place, listed, moved, and checked before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from sinklab.errors import InputError
from sinklab.results.file import flush
from sinklab.results.folder import system_error
from sinklab.results.table import write_json

__all__ = ["PREFIX", "STAGING", "complete", "damage", "prune", "saved_steps", "step_of", "usable", "writing"]

PREFIX = "checkpoint-"
STAGING = ".incomplete"
"""Folder beside the checkpoints in which the next one is written."""
LISTING = "complete.json"
"""Written last: names, sizes and hashes of all files of a checkpoint."""


def step_of(checkpoint: Path) -> int:
    """Step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, newest first, whatever their condition."""
    numbers = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def complete(staged: Path, target: Path, *, interim: bool = False) -> None:
    """List the files of a checkpoint written in the staging folder and move it to its place.

    Args:
        interim: written because the run was stopped; :func:`prune` removes it when there is a later one.
    """
    files = {path.relative_to(staged).as_posix(): path for path in sorted(staged.rglob("*")) if path.is_file()}
    for path in files.values():
        flush(path)
    listing = {name: {"bytes": path.stat().st_size, "sha256": _hash(path)} for name, path in files.items()}
    write_json({"interim": interim, "files": listing}, staged / LISTING)
    if target.exists():  # damaged, or from a run that was resumed from before it
        shutil.rmtree(target)
    staged.replace(target)
    flush(target.parent)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in words, or ``None`` when every file is as it was written."""
    try:
        listing = json.loads((checkpoint / LISTING).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"it has no {LISTING}, so it was not written to the end"
    except (ValueError, KeyError, TypeError):
        return f"its {LISTING} cannot be read"
    for name, facts in listing.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{name} has {path.stat().st_size} bytes and should have {facts['bytes']}"
        if _hash(path) != facts["sha256"]:
            return f"{name} is not what was written: its SHA-256 differs"
    return None


def usable(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence about every newer one that is not."""
    skipped: list[str] = []
    for step in saved_steps(folder):
        checkpoint = folder / f"{PREFIX}{step}"
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint.name} is damaged and was passed over: {problem}")
    return None, skipped


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints (``None`` keeps all), and interim ones that have had their use."""
    there = [folder / f"{PREFIX}{step}" for step in saved_steps(folder)]
    interim = [checkpoint for checkpoint in there if _is_interim(checkpoint)]
    planned = [checkpoint for checkpoint in there if checkpoint not in interim]
    for checkpoint in [*(planned[keep:] if keep is not None else []), *(one for one in interim if one != there[0])]:
        shutil.rmtree(checkpoint)


def _is_interim(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / LISTING).read_text(encoding="utf-8")).get("interim"))
    except (OSError, ValueError, AttributeError):
        return False  # damaged


@contextlib.contextmanager
def writing(what: str, folder: Path, staged: Path) -> Iterator[None]:
    """Turn a failure to write into one sentence, and leave nothing half behind.

    Raises:
        InputError: the disk is full, or the files cannot be written for another reason of the system's.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_about_writing(error):
            raise
        shutil.rmtree(staged, ignore_errors=True)
        last = next((f"; {PREFIX}{step} is whole" for step in saved_steps(folder)), "")
        number = system_error(error)
        # torch's writer knows that less was written than it gave, and not why.
        reason = os.strerror(number) if number else "a file ended before all of it was written"
        free = shutil.disk_usage(folder).free // 2**20
        raise InputError(
            f"{what} could not be written to {folder}: {reason} ({free} MiB free){last}. Make room; the run can be resumed"
        ) from error


def _is_about_writing(error: RuntimeError) -> bool:
    """Whether torch.save failed: its C++ writer raises bare RuntimeErrors."""
    return any(word in str(error) for word in ("PytorchStreamWriter", "inline_container", "iostream", "unexpected pos"))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
