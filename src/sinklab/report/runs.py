"""The runs below a folder, of every command, as an index shows them: finding, numbers, curves, and whether it is at work."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from sinklab.errors import SinklabError
from sinklab.results.folder import in_use
from sinklab.results.naming import counted
from sinklab.results.run import SETTINGS, STORE, Progress, silent
from sinklab.results.table import read_run, read_table

__all__ = ["MOST_NUMBERS", "MOST_POINTS", "IndexedRun", "finding_of", "index_run", "read_runs"]

MOST_NUMBERS = 300
"""Numbers of a whole model that an index keeps of one run, in the order of its table."""

MOST_POINTS = 120
"""Steps of a curve that an index keeps: evenly spaced ones, the first and the last among them."""

INSIDE = {STORE, "checkpoints", "model", "measured", "logs"}
"""Folders that belong to a run and hold no run of their own."""

CURVES = ("train_loss", "held_out_loss", "gu2024", "sink_loss_gap", "gradient_norm", "entropy")
"""Metrics whose course over training is drawn, in this order."""


@dataclasses.dataclass(frozen=True)
class IndexedRun:
    """One run in an index.

    Attributes:
        folder: its directory, relative to the indexed one, with ``/``; ``"."`` is that one itself.
        kind: the command that made it; ``"?"`` where no file says.
        status: ``finished``, ``running``, ``waiting``, ``diverged``, ``failed``, ``stopped``, or ``unreadable``.
        model: name of the model, of the recipe that was trained, or of the claim.
        operation: attention operation; empty where none is recorded.
        finding: what it found, in a sentence or two; of an unreadable run what is wrong with it.
        created: when it began, ISO 8601 in UTC; empty where that is not known.
        seconds: wall time; ``None`` where it is not known.
        pages: names of its pages and pictures, pages first.
        settings: every setting by its dotted name, as text.
        tokens: hash of the texts that were read; empty where none is recorded. Losses of other texts do not compare.
        numbers: numbers of the whole model at the last step, each with its unit; where a table has several seeds their
            mean, or the largest or least of them, as the metric declares. Those of a table about several models, or several
            operations, have these in their names.
        curves: metric to steps and values.
        versions: metric to the version of its definition, or versions; numbers of two do not compare.
    """

    folder: str
    kind: str
    status: str
    model: str
    operation: str
    finding: str
    created: str = ""
    seconds: float | None = None
    pages: tuple[str, ...] = ()
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    tokens: str = ""
    numbers: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    curves: dict[str, tuple[list[int], list[float]]] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def number(self, *names: str) -> float | None:
        """The first of these numbers that the run has."""
        return next((self.numbers[name][0] for name in names if name in self.numbers), None)


def read_runs(folder: Path, *, progress: Progress = silent) -> list[IndexedRun]:
    """Every run below a folder, newest first; those without a time come last.

    Hidden folders, symbolic links to folders, and what belongs to a run (its store, its model, its checkpoints) are not
    searched. A run that cannot be read is part of the list and says why.

    Args:
        folder: where to look.
        progress: called for every run.
    """
    places = list(_places(folder))
    runs = []
    for done, place in enumerate(places):
        runs.append(_read(place, folder))
        progress("runs", done + 1, len(places))
    return sorted(runs, key=lambda run: (run.created, run.folder), reverse=True)


def index_run(folder: Path) -> IndexedRun:
    """The run in a folder, as :func:`read_runs` gives it; runs below it are not looked for."""
    return _read(folder, folder)


def _places(folder: Path) -> Iterator[Path]:
    """Folders that hold a run, or the settings of one that has not ended."""
    for path, folders, files in os.walk(folder):
        if "run.json" in files or (STORE in folders and (Path(path) / STORE / SETTINGS).is_file()):
            yield Path(path)
        folders[:] = sorted(name for name in folders if name not in INSIDE and not name.startswith("."))


def _read(place: Path, root: Path) -> IndexedRun:
    name = place.relative_to(root).as_posix()
    try:
        if not (place / "run.json").is_file():
            return _unfinished(place, name)
        record = read_run(place)
        summary = read_run(place, "summary.json") if (place / "summary.json").is_file() else {}
        table = read_table(place / "table.parquet") if (place / "table.parquet").is_file() else None
    except (SinklabError, OSError) as error:
        return IndexedRun(name, "?", "unreadable", "", "", " ".join(str(error).split()))
    model, config = record.get("model"), record.get("config")
    facts: Mapping[str, object] = model if isinstance(model, dict) else {}
    names = (record.get("claim"), facts.get("name"), record.get("name"), summary.get("model"), _only(table, "model"))
    operations = (facts.get("operation"), summary.get("operation"), _only(table, "operation"))
    computed = {"model.revision": facts.get("revision"), "dtype": record.get("dtype"), "seeds": record.get("seeds")}
    settings = _flat(config) | {name: _text(value) for name, value in computed.items() if value is not None}
    pages = sorted(path.name for path in place.iterdir() if path.suffix in (".html", ".png") and not path.name.startswith("."))
    return IndexedRun(
        folder=name,
        kind=str(record.get("kind", "?")),
        status=_status(record, place),
        model=_first(names),
        operation=_first(operations),
        finding=finding_of(record, summary),
        created=_created(record),
        seconds=_seconds(record),
        pages=tuple(sorted(pages, key=lambda page: not page.endswith(".html"))),
        settings=settings,
        tokens=_text(record["token_sha256"]) if record.get("token_sha256") else "",
        numbers=_numbers(table, summary, record.get("extremes")),
        curves={} if table is None else _curves(table),
        versions={} if table is None else _versions(table),
    )


def _unfinished(place: Path, name: str) -> IndexedRun:
    """A run that keeps what it has computed, and has not come to its end."""
    plan = read_run(place / STORE, SETTINGS)
    status = "running" if in_use(place) else "stopped"
    said = "At work." if status == "running" else "Not finished; the same command with --resume goes on with it."
    return IndexedRun(name, str(plan.get("kind", "?")), status, "", "", said, settings=_flat(plan.get("settings")))


def _status(record: Mapping[str, object], place: Path) -> str:
    """``running`` only while a process holds the folder: one that was killed has left the word behind."""
    status = str(record.get("status", "finished"))
    return "stopped" if status == "running" and not in_use(place) else status


def _created(record: Mapping[str, object]) -> str:
    created = record.get("created")
    if isinstance(created, str):
        return created
    stamp = str(record.get("run_id", "")).partition("-")[0]
    try:
        return datetime.datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC).isoformat()
    except ValueError:
        return ""


def _seconds(record: Mapping[str, object]) -> float | None:
    value = record.get("wall_seconds", record.get("seconds"))
    try:
        return None if value is None else float(str(value))
    except ValueError:
        return None


def _only(table: pd.DataFrame | None, column: str) -> str:
    """What all rows have in a column; empty if there is nothing, or more than one thing."""
    values = [] if table is None else table[column].dropna().unique()
    return str(values[0]) if len(values) == 1 else ""


def _first(values: tuple[object, ...]) -> str:
    return next((str(value) for value in values if value), "")


def _flat(settings: object, prefix: str = "") -> dict[str, str]:
    """Settings by their dotted names; the parameters of a plug-in are below its own."""
    if not isinstance(settings, dict):
        return {}
    flat: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: _text(value)}
    return flat


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    """Rows that are about the whole model; of a number by position that of the first one."""
    about = table[["module", "layer", "head", "query_position", "part"]].isna().all(axis=1)
    return table[about & (table["key_position"].fillna(0) == 0) & table["value"].notna()]


def _numbers(table: pd.DataFrame | None, summary: Mapping[str, object], extremes: object) -> dict[str, tuple[float, str]]:
    """Numbers at the last step by name; what differs from the main condition of the run is part of the name."""
    numbers: dict[str, tuple[float, str]] = {}
    loss = summary.get("loss")
    if isinstance(loss, float):
        numbers["loss"] = (loss, "nats")
    rows = None if table is None else _whole(table)
    if rows is None or rows.empty:
        return numbers
    if rows["step"].notna().any():
        newest = rows.groupby("metric")["step"].transform("max")
        rows = rows[rows["step"].isna() | (rows["step"] == newest)]
    condition = _condition(rows, summary)
    sinks = rows.groupby("metric")["sink"].transform("nunique")
    rows = rows.assign(sink=rows["sink"].where(sinks > 1))
    one_of = extremes if isinstance(extremes, dict) else {}
    keys = [*_telling(rows), "sink", "metric", "corpus", "bos", "policy", "intervention", "unit"]
    for key, group in rows.groupby(keys, dropna=False, sort=False):
        *about, metric, corpus, bos, policy, intervention, unit = key
        others = [value for value in (*about, policy, intervention) if not pd.isna(value)]
        for value, main, word in ((corpus, condition[0], "{}"), (bos, condition[1], "{} BOS")):
            if not pd.isna(value) and (pd.isna(main) or value != main):
                others.append(word.format(value))
        name = " · ".join(map(str, (metric, *others)))
        value = float(group["value"].agg(one_of.get(metric, "mean")))
        if np.isfinite(value) and len(numbers) < MOST_NUMBERS:
            numbers.setdefault(name, (value, "" if pd.isna(unit) else str(unit)))
    return numbers


def _condition(rows: pd.DataFrame, summary: Mapping[str, object]) -> tuple[object, object]:
    """Corpus and BOS that a run is about: those that it says, else those of most rows."""
    said = summary.get("corpus"), summary.get("bos")
    if ((rows["corpus"] == said[0]) & (rows["bos"] == said[1])).any():
        return said
    corpus, bos = rows.groupby(["corpus", "bos"], dropna=False, sort=False).size().idxmax()
    return corpus, bos


def _telling(rows: pd.DataFrame) -> list[str]:
    """Columns that tell apart what a table is about; none where that is one model."""
    several = [name for name in ("model", "operation") if rows[name].nunique() > 1]
    # Variants of a claim are named after what they are, which says the operation too.
    return several[:1] if several and rows.groupby(several[:1], dropna=False)["operation"].nunique().max() <= 1 else several


def _versions(table: pd.DataFrame) -> dict[str, str]:
    """The version of every metric's definition, where the table says it."""
    known = table[["metric", "version"]].dropna().drop_duplicates().sort_values("version")
    return {str(name): " and ".join(map(str, of)) for name, of in known.groupby("metric", observed=True)["version"]}


def _curves(table: pd.DataFrame) -> dict[str, tuple[list[int], list[float]]]:
    """The course over training of every metric of :data:`CURVES` that was measured at two steps or more."""
    rows = _whole(table)
    rows = rows[rows["step"].notna() & rows["intervention"].isna() & rows["policy"].isna()]
    curves = {}
    for metric in CURVES:
        means = rows[rows["metric"] == metric].groupby("step")["value"].mean()
        means = means[np.isfinite(means.to_numpy(np.float64))]
        if len(means) > 1:
            chosen = np.unique(np.linspace(0, len(means) - 1, min(len(means), MOST_POINTS)).round().astype(int))
            points = means.iloc[chosen]
            curves[metric] = ([int(step) for step in points.index], [float(value) for value in points])
    return curves


_SENTENCES = ("finding", "text", "recommendation", "sentence")
"""Keys of a summary under which a command says what it found, the most telling first."""


def finding_of(record: Mapping[str, object], summary: Mapping[str, object]) -> str:
    """What a run found, as the command that made it says it; empty where it says nothing in words.

    Args:
        record: ``run.json``.
        summary: ``summary.json``, or an empty mapping.
    """
    if record.get("kind") == "claim":
        reason = f" ({record['reason']})" if record.get("reason") else ""
        return f"{_capital(str(record.get('verdict')))}: {record.get('statement')}{reason}"
    if record.get("kind") == "pretrain":
        return _trained(record)
    for key in _SENTENCES:
        said = summary.get(key)
        if isinstance(said, list) and said:
            said = said[0]
        if isinstance(said, str) and said:
            return said
    # A command about several things says a sentence of each.
    lists = [value for value in summary.values() if isinstance(value, list)]
    said_of_each = [
        entry["sentence"] for entries in lists for entry in entries if isinstance(entry, dict) and "sentence" in entry
    ]
    return " ".join(map(str, said_of_each))


def _trained(record: Mapping[str, object]) -> str:
    """How a training went; of one that has not ended only its status."""
    status, result = str(record.get("status", "unfinished")), record.get("result")
    if not isinstance(result, dict):
        return f"{_capital(status)}: {record['error']}" if record.get("error") else f"{_capital(status)}."
    numbers = []
    if result.get("held_out_loss") is not None:
        numbers.append(f"{result['held_out_loss']:.3f} nats per held-out token")
    if result.get("sink_rate") is not None:
        numbers.append(f"{result['sink_rate']:.2f} % of heads and samples sink at position 0")
    divergence = record.get("divergence")
    steps = record.get("steps")
    after = counted(steps, "step") if isinstance(steps, int) else f"{steps} steps"
    ended = ": ".join([f"{_capital(status)} after {after}", *filter(None, [", ".join(numbers)])])
    why = divergence.get("reason") if isinstance(divergence, dict) else None
    said = f"{ended}. {_capital(str(why)).removesuffix('.')}." if why else f"{ended}."
    warning = record.get("warning") if result.get("sink_rate") is not None else None
    return f"{said} {warning}" if warning else said


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
