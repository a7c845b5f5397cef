"""Checkpoints that are there whole or not at all: written beside their place, moved, listed, pruned."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sinklab.errors import InputError
from sinklab.results.file import flush
from sinklab.results.folder import system_error

PREFIX = "checkpoint-"
STAGING = ".incomplete"
"""Folder beside the checkpoints in which the next one is written."""
INTERIM = "interim"
"""File in a checkpoint that was written because the run was stopped."""


def step_of(checkpoint: Path) -> int:
    """Step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, newest first."""
    numbers = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the latest step, which is whole: it got its name when all was written."""
    return next((folder / f"{PREFIX}{step}" for step in saved_steps(folder)), None)


def complete(staged: Path, target: Path, *, interim: bool = False) -> None:
    """Move a checkpoint written in the staging folder to its place, with all of its files on the disk.

    Args:
        interim: written because the run was stopped; :func:`prune` removes it when there is a later one.
    """
    if interim:
        (staged / INTERIM).touch()
    for path in staged.rglob("*"):
        if path.is_file():
            flush(path)
    if target.exists():  # from a run that was resumed from before it
        shutil.rmtree(target)
    staged.replace(target)
    flush(target.parent)


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints (``None`` keeps all), and interim ones that have had their use."""
    there = [folder / f"{PREFIX}{step}" for step in saved_steps(folder)]
    interim = [checkpoint for checkpoint in there if (checkpoint / INTERIM).exists()]
    planned = [checkpoint for checkpoint in there if checkpoint not in interim]
    for checkpoint in [*(planned[keep:] if keep is not None else []), *(one for one in interim if one != there[0])]:
        shutil.rmtree(checkpoint)


@contextlib.contextmanager
def writing(what: str, folder: Path, staged: Path | None = None) -> Iterator[None]:
    """Turn a failure to write into one sentence, and leave nothing half behind."""
    try:
        yield
    except Exception as error:
        number = system_error(error)
        # torch's writer raises bare RuntimeErrors: it knows that less was written than it gave, and not why.
        if number is None and not re.search("PytorchStreamWriter|inline_container|iostream|unexpected pos", str(error)):
            raise
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        reason = os.strerror(number) if number else "a file ended before all of it was written"
        raise InputError(f"{what} could not be written to {folder}: {reason}. Make room, or choose another folder") from error
