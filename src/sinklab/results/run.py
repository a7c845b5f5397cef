"""Run and Result: what a command leaves behind, and how it reports while it works; needs neither torch nor transformers."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import datetime
import functools
import json
import secrets
import shutil
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from sinklab.errors import ConfigurationError, InputError
from sinklab.results.blocks import Block, Facts, counted
from sinklab.results.file import clear_partial
from sinklab.results.folder import FolderLock, check_free, clear, from_outside, partial_folder, placed, put_in_place
from sinklab.results.progress import Progress, notebook_bars, silent

__all__ = ["COMMAND", "STORE", "Listing", "Progress", "Result", "Run", "new_run_id", "silent"]

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from sinklab.results.environment import Placed
    from sinklab.results.store import Store

STORE = "store"
"""Folder of what a run has computed so far, beside its output directory until that is there."""


COMMAND = contextvars.ContextVar("COMMAND", default="")
"""The line that makes the run again, ``command`` in ``run.json``; empty where no line can."""


def new_run_id() -> str:
    """Identity of a run: time in UTC and six random digits."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def _json(record: object) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _json_lines(table: pd.DataFrame) -> str:
    """The rows of a table, one JSON object a line, null for what is not finite; pandas would round to ten decimals."""
    from sinklab.results.table import finite

    columns = [
        [finite(value) if isinstance(value, float) else value for value in column.astype(object).where(column.notna(), None)]
        for _, column in table.items()
    ]
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
    return "".join(f"{encode(dict(zip(table.columns, row, strict=True)))}\n" for row in zip(*columns, strict=True))


Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True, eq=False)
class Listing(Generic[Record]):
    """What a command returns that looks something up and computes nothing.

    Attributes:
        record: the answer as plain JSON values.
        display: gives what a terminal shows of it: blocks, rich renderables or lines of text.
    """

    record: Record
    display: Callable[[Record], Iterable[Block | RenderableType]]

    def show(self) -> None:
        """Print on standard output what the command line prints."""
        from sinklab.results.terminal import print_blocks

        print_blocks(self.display(self.record))

    def to_json(self) -> str:
        """What ``--json`` prints."""
        return _json(self.record)


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """What a command returns: the answer, its numbers, how they were made, and where they lie.

    Attributes:
        summary: the answer as plain JSON values; ``summary.json`` of a folder. Empty where the table is the answer.
        table: the long table (:data:`sinklab.results.table.COLUMNS`).
        record: ``run.json``: kind, settings, versions, commit, hardware, seeds, wall time.
        folder: where it was written; ``None`` if it was not.
        display: gives what a terminal shows of a result, where that is more than the blocks of its summary.
        page: writes the page of a folder, for kinds that have one, and returns its path.
        listed: the answer of a command about many things, one record each: what ``--json`` prints instead of the summary.
        frame: gives the page of a folder as text that is small enough for a notebook, where the page itself may not be.
        write: writes what the folder would hold, of a result that was not written.
        shows: gives the blocks of the summary.
    """

    summary: dict[str, Any]
    table: pd.DataFrame
    record: dict[str, Any]
    folder: Path | None
    display: Callable[[Result], Iterable[Block | RenderableType]] | None = None
    page: Callable[[Path], Path] | None = None
    listed: list[Any] | None = None
    frame: Callable[[Path], str] | None = None
    write: Callable[[Path], None] | None = None
    shows: Callable[[Mapping[str, Any]], Iterable[Block]] | None = None

    def __repr__(self) -> str:
        where = "not written" if self.folder is None else f"in {self.folder}"
        return f"Result of {self.kind}, {counted(len(self.table), 'number')}, {where}; show() prints it"

    @property
    def kind(self) -> str:
        """The command that made it."""
        return str(self.record["kind"])

    def show(self) -> None:
        """Print on standard output what the command line prints."""
        from sinklab.results.terminal import print_blocks

        if self.display is not None:
            print_blocks(self.display(self))
            return
        print_blocks(self.blocks())
        if self.page is not None and self.folder is not None:
            print_blocks([Facts([("report", str(self.folder / "report.html"))])])

    def blocks(self) -> list[Block]:
        """What it shows, for renderings of other kinds (:mod:`sinklab.results.blocks`)."""
        return [] if self.shows is None else list(self.shows(self.summary))

    def to_json(self) -> str:
        """What ``--json`` prints: the summary, or the rows of the table, one a line, where there is no summary."""
        if self.listed is not None:
            return _json(self.listed)
        if not self.summary:
            return _json_lines(self.table)
        return _json(self.summary)

    def report(self) -> Path:
        """The page, made again if it is missing.

        Raises:
            InputError: results of this kind have no page, or this one was not written to a folder.
        """
        if self.page is None:
            raise InputError(f"a result of {self.kind} has no page; show() prints it")
        if self.folder is None:
            raise InputError(f"this result of {self.kind} was not written, so it has no page; give a directory with `out`")
        path = self.folder / "report.html"
        return path if path.is_file() else self.page(self.folder)

    def _repr_html_(self) -> str:
        """In a notebook: the page in a frame if there is one, else the top of the summary as a table."""
        from sinklab.results.html import framed, html

        said = str(self.summary.get("finding") or self.summary.get("text") or "")
        if self.page is not None and self.folder is not None:
            page = self.frame(self.folder) if self.frame else self.report().read_text(encoding="utf-8")
            return framed(page, finding=said)
        if self.page is not None and self.write is not None:
            with tempfile.TemporaryDirectory(prefix="sinklab-") as name:
                folder = Path(name)
                self.write(folder)
                page = self.frame(folder) if self.frame else self.page(folder).read_text(encoding="utf-8")
                return framed(page, finding=said)
        if self.shows is not None:
            return str(html(self.blocks()))
        if not self.summary:
            return _table_html(self.table)
        values = [(key, str(value)) for key, value in self.summary.items() if not isinstance(value, (dict, list))]
        return str(html([Facts(values)]))


def _table_html(table: pd.DataFrame) -> str:
    """A long table for a notebook: metric and value first, and what is the same in all rows above it."""
    from sinklab.results.html import html

    first = [name for name in ("metric", "value") if name in table]
    same = [name for name in table if name not in first and table[name].nunique(dropna=False) <= 1]
    said = [(name, str(table[name].iloc[0])) for name in same if len(table) and table[name].notna().all()]
    varying = table[[*first, *(name for name in table if name not in (*first, *same))]]
    return str(html([Facts(said)])) + str(varying._repr_html_())  # pandas has it for notebooks, untyped


def _write(
    table: pd.DataFrame,
    summary: Mapping[str, object] | None,
    about: Mapping[str, object],
    files: Callable[[Path], None] | None,
    folder: Path,
) -> None:
    """Write what the folder of a run holds besides its page."""
    from sinklab.results.table import write_json, write_table

    write_table(table, folder / "table.parquet")
    if summary is not None:
        write_json(summary, folder / "summary.json")
    write_json(about, folder / "run.json")
    if files is not None:
        files(folder)


class Run:
    """One run of a command, from the refusal of what is in its way to the folder that it leaves::

        with Run("measure", out=out, overwrite=overwrite, progress=progress) as run:
            ...
            return run.finish(table=table, display=display, loaded=loaded, model=facts)

    The folder belongs to one process from the beginning to the end of the block; another one that names it is refused. It is
    there whole or not at all. What :attr:`store` holds lies beside it while the run goes, is taken up by the next run if this
    one is killed, and is removed when the result is put in place.

    Args:
        kind: the command.
        out: output directory; without it nothing is written.
        overwrite: replace what is there.
        settings: what it was asked to do; ``config`` in ``run.json``.
        progress: called at every step; by default bars below the cell of a notebook, and nothing elsewhere.

    Attributes:
        id: identity of the run, ``run_id`` in every row of its table.
        progress: to be called with stage, steps done and steps in all.

    Raises:
        ConfigurationError: ``overwrite`` without ``out``.
        InputError: on entering the block: something is in the way, or another process is using the folder.
    """

    def __init__(
        self,
        kind: str,
        *,
        out: str | Path | None = None,
        overwrite: bool = False,
        settings: Mapping[str, object] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.kind, self.settings, self.overwrite = kind, dict(settings or {}), overwrite
        self.out = None if out is None else Path(out)
        self.id, self.progress, self._drawn = new_run_id(), progress or silent, contextlib.ExitStack()
        self._started, self._watched = time.time(), progress is not None
        self._lock: FolderLock | None = None
        if out is None and overwrite:
            raise ConfigurationError("`overwrite` is about an output directory; give one with `out`")

    def __enter__(self) -> Self:
        if self.out is not None:
            check_free(self.out, self.overwrite)
            self._lock = FolderLock(self.out)
            try:
                clear(self.out)
                check_free(self.out, self.overwrite)  # it may have been put there before we had the lock
                clear_partial(partial_folder(self.out))
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise
        if not self._watched:
            self.progress = self._drawn.enter_context(notebook_bars())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self._drawn.close()
        if self.out is None or self._lock is None:
            return
        store = partial_folder(self.out) / STORE
        stored = any(path.is_file() for path in store.rglob("*"))
        if not stored:
            shutil.rmtree(store, ignore_errors=True)
        clear(self.out)
        if error is not None and stored and from_outside(error):
            error.add_note(f"what was computed is kept in {store}: the same command goes on from there")
        self._lock.release()

    @functools.cached_property
    def store(self) -> Store:
        """What was computed so far, by this run and by those that it goes on with; without ``out`` it keeps nothing."""
        from sinklab.results.store import Store

        return Store(None if self.out is None else partial_folder(self.out) / STORE)

    def finish(
        self,
        *,
        table: pd.DataFrame,
        display: Callable[[Result], Iterable[Block | RenderableType]] | None = None,
        show: Callable[[Mapping[str, Any]], Iterable[Block]] | None = None,
        summary: Mapping[str, object] | None = None,
        config: Mapping[str, object] | None = None,
        files: Callable[[Path], None] | None = None,
        page: Callable[[Path], Path] | None = None,
        frame: Callable[[Path], str] | None = None,
        loaded: Placed | None = None,
        **record: Any,
    ) -> Result:
        """Write ``table.parquet``, ``summary.json``, ``run.json`` and what else there is, and give the result.

        Args:
            table: the long table.
            display: see :class:`Result`; one of it and ``show`` is given.
            show: gives the blocks of the summary.
            summary: the answer; without it there is no ``summary.json``.
            config: settings that were not known at the start.
            files: writes further files into the folder that it is given, in which the three are already; a result that is not
                written holds on to it, for its page in a notebook.
            page: writes the page of the folder that it is given, after them.
            frame: see :class:`Result`.
            loaded: what computed the numbers; see :func:`~sinklab.results.environment.environment`.
            record: further entries of ``run.json``.

        Raises:
            InputError: the folder was taken by somebody else meanwhile.
        """
        from sinklab.results.environment import environment
        from sinklab.results.metric import definitions_of

        about = {
            "run_id": self.id,
            "kind": self.kind,
            "command": COMMAND.get() or None,
            "config": {**self.settings, **(config or {})},
            **record,
            "definitions": record.get("definitions") or definitions_of(table),
            **environment(loaded),
            "wall_seconds": round(time.time() - self._started, 3),
        }
        result = Result(dict(summary or {}), table, about, self.out, display, page, frame=frame, shows=show)

        write = functools.partial(_write, table, summary, about, files)  # a result can be pickled
        if self.out is None or self._lock is None:
            return result if page is None else dataclasses.replace(result, write=write)
        work = partial_folder(self.out) / "result"
        with placed(self.out):
            work.mkdir(parents=True, exist_ok=True)
            write(work)
            if page is not None:
                page(work)
        try:
            check_free(self.out, self.overwrite)
        except InputError as error:  # made by somebody who does not know of the lock
            rescued = self.out.absolute().with_name(f"{self.out.absolute().name}-{self.id}")
            work.replace(rescued)
            raise InputError(f"{error}. The result of this run is in {rescued}") from None
        put_in_place(work, self.out)
        shutil.rmtree(partial_folder(self.out))
        return result
