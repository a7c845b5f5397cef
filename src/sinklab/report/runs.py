"""What the folder of a run says of it, whatever command made it: finding, settings, numbers, and whether it has ended."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from sinklab.results.blocks import counted
from sinklab.results.folder import in_use
from sinklab.results.table import read_run, read_table

MOST_NUMBERS = 300
"""Numbers of a whole model that are kept of one run, in the order of its table."""


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """What the files of one run say of it.

    Attributes:
        kind: the command that made it; ``"?"`` where no file says.
        status: ``finished``, ``running``, ``waiting``, ``diverged``, ``failed`` or ``stopped``.
        model: name of the model, of the recipe that was trained, or of the claim.
        finding: what it found, in a sentence or two.
        settings: every setting by its dotted name, as text.
        tokens: hash of the texts that were read; empty where none is recorded.
        numbers: numbers of the whole model at the last step, each with its unit; where a table has several seeds their
            mean, or the largest or least of them, as the metric declares. Those of a table about several models, or several
            operations, have these in their names.
    """

    kind: str
    status: str
    model: str
    finding: str
    settings: dict[str, str]
    tokens: str
    numbers: dict[str, tuple[float, str]]


def run_of(folder: Path) -> FinishedRun:
    """The run in a folder.

    Raises:
        InputError, ResultError: its files are missing, or are not what their names say.
    """
    record = read_run(folder)
    summary = read_run(folder, "summary.json") if (folder / "summary.json").is_file() else {}
    table = read_table(folder / "table.parquet") if (folder / "table.parquet").is_file() else None
    model = record.get("model")
    facts: Mapping[str, object] = model if isinstance(model, dict) else {}
    names = (record.get("claim"), facts.get("name"), record.get("name"), summary.get("model"), _only(table, "model"))
    computed = {"model.revision": facts.get("revision"), "dtype": record.get("dtype"), "seeds": record.get("seeds")}
    return FinishedRun(
        kind=str(record.get("kind", "?")),
        status=_status(record, folder),
        model=next((str(name) for name in names if name), ""),
        finding=finding_of(record, summary),
        settings=_flat(record.get("config")) | {name: _text(value) for name, value in computed.items() if value is not None},
        tokens=_text(record["token_sha256"]) if record.get("token_sha256") else "",
        numbers=_numbers(table, summary, record.get("extremes")),
    )


def _status(record: Mapping[str, object], place: Path) -> str:
    """``running`` only while a process holds the folder: one that was killed has left the word behind."""
    status = str(record.get("status", "finished"))
    return "stopped" if status == "running" and not in_use(place) else status


def _only(table: pd.DataFrame | None, column: str) -> str:
    """What all rows have in a column; empty if there is nothing, or more than one thing."""
    values = [] if table is None else table[column].dropna().unique()
    return str(values[0]) if len(values) == 1 else ""


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
