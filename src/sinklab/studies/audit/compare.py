"""Two or more audits side by side: as a table for the terminal and as one self-contained HTML page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.errors import ConfigurationError
from sinklab.registry import spelled
from sinklab.report.maps import round_matrix
from sinklab.report.page import render
from sinklab.results.blocks import Grid, display_token, names, number, percent
from sinklab.results.file import write_file
from sinklab.results.html import html
from sinklab.studies.audit.found import condition_name, loss_unit
from sinklab.studies.audit.page import DEFINITIONS, Audit, View, head_rates, layer_figures, look_of, read_audit

_PERCENT = " (%)"
"""Rows whose name ends so are percentages."""

_SETTINGS = ("threshold", "seq_len", "samples", "bos")
"""Settings that must agree before two sink rates can be compared, besides the text."""

_LARGEST = {
    "massive activations (most in a layer)": ("massive_activation", "massive_count"),
    "largest activation": ("massive_activation", "max_abs"),
    "largest activation / median": ("massive_activation", "max_to_median"),
    "first hidden norm / rest": ("hidden_norm", "first_to_rest_ratio"),
    "outliers: maximum infinity norm": ("outliers", "max_inf_norm"),
    "outliers: kurtosis": ("outliers", "kurtosis"),
}
"""Row to probe and metric of which it has the whole model's number, or else the largest of its layers."""

Column = tuple[str, Audit, View]
"""Name of a model, or of a part of it; its audit; and its numbers."""


class Comparison:
    """What two or more audits found, side by side; of an encoder–decoder each part by itself, since it has sinks of its own.

    Attributes:
        table: of objects, ``None`` for what was not measured: a column per audit, called as its model, with the folder's name
            where two are alike; a row per number, whose unit its name says: ``(%)``.
        findings: the finding of every column in a sentence, its name in front.
        warning: what keeps the audits from being compared: other texts, settings, or definitions; empty if nothing does.

    Raises:
        ConfigurationError: fewer than two folders.
        InputError, ResultError: a folder is not the output directory of an audit.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        if len(folders) < 2:
            raise ConfigurationError(f"a comparison needs two or more output directories of audits; got {len(folders)}")
        self._audits = [read_audit(Path(folder)) for folder in folders]
        self._columns: list[Column] = [
            (f"{name}, {view.part}" if view.part else name, audit, view)
            for name, audit in zip(_names(self._audits), self._audits, strict=True)
            for view in audit.views
        ]
        numbers = {name: _numbers(audit, view) for name, audit, view in self._columns}
        rows = list(dict.fromkeys(row for column in numbers.values() for row in column))
        cells = {name: pd.Series([column.get(row) for row in rows], dtype=object) for name, column in numbers.items()}
        self.table = pd.DataFrame(cells).set_axis(rows, axis=0)
        self.findings = [f"{name}: {view.found.finding}" for name, _, view in self._columns]
        self.warning = _warning(self._audits)

    def as_text(self) -> pd.DataFrame:
        """The table as text: three significant digits, percentages with one or two decimals, an en dash for ``None``."""
        cells = {name: [_write(row, value) for row, value in column.items()] for name, column in self.table.items()}
        return pd.DataFrame(cells, index=self.table.index)

    def write(self, path: Path, *, overwrite: bool = False) -> Path:
        """Write one HTML page, whole or not at all, and without a need for any network; its path is given back."""
        path, columns, table = Path(path), self._columns, self.as_text()
        headings = ["", *table.columns]
        context = {
            "names": list(table.columns),
            "looks": [look_of(index) for index in range(len(columns))],
            "count": len(self._audits),  # an encoder–decoder has a column for each part, and is one audit
            "sentences": self.findings,
            "warning": self.warning,
            "numbers": html([Grid(headings, [[row, *table.loc[row]] for row in table.index])]),
        }
        data = {
            "page": "compare",
            "figures": layer_figures([(name, view) for name, _, view in columns]),
            "audits": [_heads_of(index, *column) for index, column in enumerate(columns)],
        }
        page = render("compare.html.j2", context, data, {})
        write_file(path, lambda temporary: temporary.write_text(page, encoding="utf-8"), overwrite=overwrite, name="path")
        return path


def _names(audits: Sequence[Audit]) -> list[str]:
    """What the audits are called: by model, with the folder where that is not enough, and a number where that is not either."""
    models = Counter(audit.found.model for audit in audits)
    called = [
        audit.found.model if models[audit.found.model] == 1 else f"{audit.found.model} · {audit.folder.name}"
        for audit in audits
    ]
    return [
        name if called.count(name) == 1 else f"{name} ({called[: index + 1].count(name)})" for index, name in enumerate(called)
    ]


def _heads_of(index: int, name: str, audit: Audit, view: View) -> dict[str, Any]:
    """What the script draws the heads of a column from."""
    main, column = view.found.main, view.found.column or 0
    rates = view.numbers.by_head_and_position("sink_rate", "gu2024", audit.num_positions)
    shown: Any = None if rates is None or column >= rates.shape[-1] else round_matrix(rates[..., column])
    if main is not None and main.kind != "position":
        shown = head_rates(view.numbers, main)
    return {
        "name": name,
        **look_of(index),
        "grid": [{"layer": row.layer, "module": row.module, "label": row.label} for row in view.numbers.grid],
        "heads": view.numbers.num_heads,
        "position": column,
        "place": main.name if main is not None else "position 0",
        "rates": shown,
    }


def _numbers(audit: Audit, view: View) -> dict[str, object]:
    """Row to number, in the order of the table; ``None`` where it was not measured."""
    found, numbers = audit.found, view.numbers
    loss = found.loss if view.part in ("", "decoder") else None
    null, gate = numbers.mean_of_heads("null_mass", "null_mass"), numbers.mean_of_heads("null_mass", "output_gain")
    return {
        "model": found.model,
        "dtype": audit.run.get("dtype"),
        "operation": f"{found.operation} ({found.tier})" if found.tier else found.operation,
        f"loss ({loss_unit(found)})": loss,
        "loss (bits per byte)": found.bits_per_byte,
        **_of_sinks(view),
        "null mass (%)": None if null is None else 100 * null,
        "gate (mean factor on a head's output)": gate,
        "entropy (nats)": numbers.mean_of_heads("entropy", "entropy"),
        # Of a model without a sink it is measured without position 0, which is none.
        "entropy without the sink (nats)": numbers.mean_of_heads("entropy", "entropy_without_sink")
        if view.found.main
        else None,
        **{
            row: whole if (whole := numbers.whole(*which)) is not None else (numbers.largest_by_layer(*which) or (None,))[0]
            for row, which in _LARGEST.items()
        },
        **_of_conditions(audit, view),
        **{f"setting: {name}": _setting(audit, name) for name in _SETTINGS},
        "setting: corpus": _text(audit)[0],
    }


def _of_sinks(view: View) -> dict[str, object]:
    """The sink rates, each under its own name, and the strongest sink."""
    found, main = view.found, view.found.main
    token = None if main is None else main.token_there
    return {
        "sink rate at position 0, gu2024 (%)": found.sink_rate_gu2024,
        **{
            f"{title[0].lower()}{title[1:]}, {name}{_PERCENT}": view.rate(name)
            for name, title in DEFINITIONS.items()
            if name != "gu2024"
        },
        "strongest sink: position": "none" if main is None else main.position if main.kind == "position" else main.name,
        "strongest sink: token": "none" if main is None else None if token is None else display_token(token),
        "strongest sink: rate (%)": None if main is None else main.rate,
        "strongest sink: heads": f"{found.sink_heads:,} of {found.num_heads:,}",
        "sinks": len(found.sinks.sinks),  # positions, groups of them, tokens and the null score, each as one
        "sink role": found.sink_role,
    }


def _of_conditions(audit: Audit, view: View) -> dict[str, object]:
    """The rate at position 0 under every condition of the audit."""
    return {
        f"sink rate at position 0, {condition_name(one.corpus, one.bos, audit.found)} (%)": one.sink_rate_gu2024
        for one in view.found.conditions
    }


def _write(row: str, value: Any) -> str:
    if value is not None and row.endswith(_PERCENT):
        return percent(value)
    return number(float(value), 4) if row.startswith("loss") and value is not None else number(value)


def _setting(audit: Audit, name: str) -> str | None:
    """A setting as it was in effect: whether there was a BOS, where ``auto`` asks the tokenizer for one."""
    if name == "bos" and (count := audit.config.get("bos_tokens_per_sample")) is not None:
        return "in front" if count else "none"
    value = audit.config.get(name)
    return None if value is None else str(value)


def _text(audit: Audit) -> tuple[str, str]:
    """Name, with how it was read if that needs settings, and revision (the hash of a file) of the text that was read."""
    corpus = audit.run.get("corpus") or {}
    name, settings = str(audit.config.get("corpus")), corpus.get("settings")
    if isinstance(settings, dict) and len(settings) > 1:
        # The name says which file it is; folders are those of a machine.
        how = {key: value for key, value in settings.items() if key not in ("path", "of")}
        name += f" as {spelled({**how, 'name': corpus.get('kind')})}"
    return name, str(corpus.get("revision"))


def _short(revision: str) -> str:
    """A revision without most of its hashes; one of versions, such as those of installed packages, is whole."""
    return re.sub(r"\b(sha256-[0-9a-f]{8})[0-9a-f]+", r"\1", revision)


def _warning(audits: Sequence[Audit]) -> str:
    """What keeps the audits from being compared: other texts, settings, or definitions; empty if nothing does."""
    sentences = []
    texts = list(dict.fromkeys(map(_text, audits)))
    if len(texts) > 1:
        listed = names([f"{name} ({_short(revision)})" for name, revision in texts])
        sentences.append(f"These audits read different texts: {listed}. Neither their rates nor their losses compare.")
    settings = {name: {_setting(audit, name) for audit in audits} - {None} for name in _SETTINGS}
    if different := [name for name, values in settings.items() if len(values) > 1]:
        sentences.append(f"These audits differ in {names(different)}: their rates are not comparable as they stand.")
    versions: dict[str, set[str]] = {}
    for entry in (entry for audit in audits for entry in audit.run.get("definitions") or ()):
        versions.setdefault(str(entry["metric"]), set()).add(str(entry["version"]))
    redefined = [f"{name} (versions {' and '.join(sorted(of))})" for name, of in versions.items() if len(of) > 1]
    if redefined:
        sentences.append(f"These audits differ in the definition of {names(redefined)}: such numbers do not compare.")
    if not sentences and len({audit.run.get("token_sha256") for audit in audits}) > 1:
        sentences.append("Their tokenizers differ: losses per token do not compare, those in bits per byte do.")
    return " ".join(sentences)
