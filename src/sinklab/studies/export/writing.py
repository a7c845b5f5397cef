"""Exports of one comparison: an entry for each engine, and their files in a folder; the one way to both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sinklab.errors import ConfigurationError, InputError
from sinklab.results.summaries.cache import Comparison, ExportEntry
from sinklab.results.table import write_text
from sinklab.studies.export.base import Engine, ExportPlan, engine_called, exported
from sinklab.studies.export.chosen import plan_of

__all__ = ["FOLDER", "advised_exports", "checked_engines", "exports_of", "write_exports"]

FOLDER = "export"
"""Folder of the files inside that of a run."""


def checked_engines(names: Sequence[str]) -> list[Engine]:
    """Engines by their names, each once, in the order in which they were named.

    Raises:
        UnknownNameError: there is none of a name.
    """
    return [engine_called(name) for name in dict.fromkeys(names)]


def exports_of(plan: ExportPlan, engines: Sequence[Engine]) -> list[ExportEntry]:
    """What every engine makes of a plan.

    Raises:
        ConfigurationError: one of them can do nothing of it.
    """
    entries = [exported(engine, plan) for engine in engines]
    for entry in entries:
        if entry["refused"]:
            raise ConfigurationError(f"{entry['engine']} cannot do {entry['policy']}: {entry['refused']}; leave it out of `to`")
    return entries


def advised_exports(summary: Comparison, engines: Sequence[Engine]) -> list[ExportEntry]:
    """What every engine makes of the recommended policy; an engine that can do nothing of it has an entry that says why."""
    try:
        plan = plan_of(summary)
    except InputError as error:  # nothing was recommended, which is known only now
        return [
            {
                "engine": engine.name, "policy": "", "checked": engine.checked, "parts": [], "refused": str(error), "file": "",
                "command": "", "text": "",
            }
            for engine in engines
        ]  # fmt: skip
    return [exported(engine, plan) for engine in engines]


def write_exports(entries: Sequence[ExportEntry], folder: Path) -> None:
    """Write the files of the entries that have one; each is there whole or not at all, and takes the place of an older one."""
    for entry in entries:
        if not entry["refused"]:
            write_text(entry["text"], folder / entry["file"])
