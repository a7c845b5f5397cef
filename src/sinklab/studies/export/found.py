"""What is written for other engines: a policy part by part, what an engine makes of each, and its file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sinklab.results.blocks import Block, Facts, Heading, Say

__all__ = ["INTEGER_MARGIN", "ExportEntry", "ExportPart", "HowExported", "IntegerChoice", "show_exports"]

HowExported = Literal["expressed", "approximated", "not expressible"]
IntegerChoice = Literal["auto", "none", "int8", "int4"]
"""Integers of a cache, as they are asked for: those that were measured to cost little, or none, or these."""

INTEGER_MARGIN = 0.02
"""Nats per token by which integers may change the loss at most (the whole interval) before they are taken; as of sinks."""


@dataclass(frozen=True)
class ExportPart:
    """One part of a policy, and what an engine makes of it by which setting, or why it cannot."""

    part: str
    wanted: str
    how: HowExported
    says: str


@dataclass(frozen=True)
class ExportEntry:
    """A policy for one engine: its file and the line that uses it, empty where ``refused`` says why there is none."""

    engine: str
    policy: str
    checked: str
    parts: list[ExportPart] = field(default_factory=list)
    refused: str = ""
    file: str = ""
    command: str = ""
    text: str = ""


def show_exports(entries: Sequence[ExportEntry], folder: Path | None = None) -> Iterator[Block]:
    """Each engine with its command, and what it makes of each part.

    Args:
        folder: where the files lie.
    """
    for entry in entries:
        if entry.refused:
            yield Say(f"{entry.engine}: {entry.policy or 'no policy'} not written: {entry.refused}")
            continue
        yield Heading(f"{entry.engine}: {entry.policy}", 3)
        file = [("file", str(folder / entry.file))] if folder is not None else []
        parts = [(part.part, f"{part.wanted}: {part.how}: {part.says}") for part in entry.parts]
        yield Facts([*file, ("command", entry.command), *parts])
