"""Two or more audits side by side: as a table for the terminal and as one self-contained HTML page."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.errors import ConfigurationError
from sinklab.registry import spelled
from sinklab.report.head_data import head_rates
from sinklab.report.maps import Audit, read_audit
from sinklab.report.pack import round_matrix
from sinklab.report.page import render
from sinklab.report.words import (
    TITLES,
    bos_words,
    condition_name,
    is_number,
    loss_unit,
    named_rate,
    number,
    percent,
    sink_column,
    sinks_of,
    token_there,
    verdict,
)
from sinklab.results.file import check_file, write_file
from sinklab.results.intervals import just_above
from sinklab.results.naming import display_token
from sinklab.results.summaries.certificate import verdict_queries
from sinklab.studies.audit.figures import LOOKS, largest_by_layer, layer_figures, look_of, mean_by_head, share_of_sinking_heads

__all__ = ["comparison_table", "comparison_verdicts", "comparison_warning", "format_comparison", "write_comparison"]

_PERCENT = " (%)"
"""Rows whose name ends so are percentages."""

_CERTIFICATE = "certificate: "
"""Rows whose name begins so are the no-op certificate's; the page has a section of them."""
_ASKED = f"{_CERTIFICATE}sink asked about"

_SETTINGS = ("threshold", "seq_len", "samples", "bos")
"""Settings that must agree before two sink rates can be compared, besides the text."""


def comparison_table(folders: Sequence[Path]) -> pd.DataFrame:
    """What two or more audits found: one column per audit, one row per number.

    Args:
        folders: output directories of audits.

    Returns:
        A table of objects: ``float``, ``int``, ``str``, or ``None`` for what was not measured. Columns are the models' names,
        with the folder's where two are alike; rows whose name ends in ``(%)`` are percentages, others name their unit.
        :func:`format_comparison` turns it into text.

    Raises:
        ConfigurationError: fewer than two folders.
        InputError, ResultError: a folder is not the output directory of an audit.
    """
    return _table(_read(folders))


def format_comparison(table: pd.DataFrame) -> pd.DataFrame:
    """The same table as text: three significant digits, percentages with one or two decimals, an en dash for ``None``."""
    return pd.DataFrame(
        {name: [_write(row, value) for row, value in zip(table.index, table[name], strict=True)] for name in table.columns},
        index=table.index,
    )


def comparison_verdicts(folders: Sequence[Path]) -> list[str]:
    """The finding of every column of the table in a sentence, its name in front.

    Raises:
        ConfigurationError, InputError, ResultError: as :func:`comparison_table`.
    """
    return [f"{name}: {verdict(audit)}" for name, audit in _read(folders)]


def comparison_warning(folders: Sequence[Path]) -> str:
    """What keeps audits from being compared: other texts, settings, or definitions; empty if nothing does.

    Raises:
        ConfigurationError, InputError, ResultError: as :func:`comparison_table`.
    """
    return _warning(_read(folders))


def write_comparison(folders: Sequence[Path], path: Path, *, overwrite: bool = False) -> Path:
    """Write one HTML page that shows audits side by side; whole or not at all, and without a need for any network.

    Args:
        folders: output directories of audits.
        path: the page to write.
        overwrite: replace a file that is there.

    Returns:
        ``path``.

    Raises:
        ConfigurationError: fewer than two folders.
        InputError, ResultError: a folder is not the output directory of an audit, or what is at the path is not replaced
            (:func:`~sinklab.results.file.check_file`).
    """
    path = Path(path)
    check_file(path, overwrite, "path")
    audits = _read(folders)
    table = format_comparison(_table(audits))
    context = {
        "names": list(table.columns),
        "looks": [look_of(index) for index in range(LOOKS)],
        "count": len(folders),  # an encoder–decoder has a column for each part, and is one audit
        "sentences": _sentences(audits),
        "warning": _warning(audits),
        "rows": [(row, list(table.loc[row])) for row in table.index if not row.startswith(_CERTIFICATE)],
        "conditions": _conditions(audits),
        "certificates": _certificates(audits, table),
    }
    data: dict[str, Any] = {"page": "compare", "figures": layer_figures(audits), "audits": []}
    for index, (name, audit) in enumerate(audits):
        rates = audit.numbers.by_head_and_position("sink_rate", "gu2024", audit.num_positions)
        column, sinks = sink_column(audit) or 0, sinks_of(audit.summary)
        if sinks and sinks[0]["kind"] != "position":
            shown: Any = head_rates(audit, sinks[0]["heads"])
        else:
            shown = None if rates is None or column >= rates.shape[-1] else round_matrix(rates[..., column])
        data["audits"].append(
            {
                "name": name,
                **look_of(index),
                "grid": [{"layer": row.layer, "module": row.module, "label": row.label} for row in audit.numbers.grid],
                "heads": audit.numbers.num_heads,
                "position": column,
                "place": sinks[0]["name"] if sinks else "position 0",
                "rates": shown,
            }
        )
    page = render("compare.html.j2", context, data, {})
    write_file(path, lambda temporary: temporary.write_text(page, encoding="utf-8"), overwrite=overwrite, name="path")
    return path


def _read(folders: Sequence[Path]) -> list[tuple[str, Audit]]:
    """Audits with names that differ; of an encoder–decoder each part by itself."""
    if len(folders) < 2:
        raise ConfigurationError(f"a comparison needs two or more output directories of audits; got {len(folders)}")
    audits = [read_audit(Path(folder)) for folder in folders]
    models = Counter(audit.model for audit in audits)
    names = [audit.model if models[audit.model] == 1 else f"{audit.model} · {audit.folder.name}" for audit in audits]
    # The same folder given twice, or two of one name in different places.
    repeated, shown = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        if repeated[name] > 1:
            shown[name] += 1
            names[index] = f"{name} ({shown[name]})"
    # The parts of an encoder–decoder have sinks of their own: each is compared as a model is.
    named = list(zip(names, audits, strict=True))
    return [(f"{name}, {part}" if part else name, view) for name, audit in named for part, view in audit.parts or [("", audit)]]


def _table(audits: Sequence[tuple[str, Audit]]) -> pd.DataFrame:
    columns = {name: _numbers(audit) for name, audit in audits}
    if any(_certificate(audit) for _, audit in audits):
        for name, audit in audits:
            if not _certificate(audit):
                columns[name][_ASKED] = "not certified"
    rows: list[str] = []
    for numbers in columns.values():
        for before, row in zip([None, *numbers], numbers, strict=False):
            if row not in rows:  # of this audit alone; it stands where it stands there
                rows.insert(rows.index(before) + 1 if before is not None else 0, row)
    return pd.DataFrame(
        {name: pd.Series([numbers.get(row) for row in rows], dtype=object) for name, numbers in columns.items()}
    ).set_axis(rows, axis=0)


def _numbers(audit: Audit) -> dict[str, object]:
    """Row to number, in the order of the table; ``None`` where it was not measured."""
    corpus, revision = _text(audit)
    return {
        **_of_model(audit),
        **_of_rates(audit),
        **_of_strongest_sink(audit),
        **_of_attention_and_activations(audit),
        **_of_conditions(audit),
        **_certified(audit),
        **{f"setting: {name}": _setting(audit, name) for name in _SETTINGS},
        "setting: corpus": corpus,
        "setting: revision of the corpus": _short(revision),
    }


def _of_model(audit: Audit) -> dict[str, object]:
    summary = audit.summary
    loss = _float(summary.get("loss"))
    return {
        "model": audit.model,
        "revision of the model": _short(str(summary["revision"])) if summary.get("revision") else None,
        "dtype": audit.run.get("dtype"),
        "operation": f"{audit.operation} ({summary['tier']})" if summary.get("tier") else audit.operation,
        **({} if loss is None else {f"loss ({loss_unit(summary)})": loss}),
        "loss (bits per byte)": _float(summary.get("bits_per_byte")),
    }


def _of_rates(audit: Audit) -> dict[str, object]:
    """The sink rates, each under its own name."""
    rates: dict[str, object] = {"sink rate at position 0, gu2024 (%)": _float(audit.summary.get("sink_rate_gu2024"))}
    for name, title in TITLES.items():
        if not name.startswith("gu2024"):
            rates[f"{title[0].lower()}{title[1:]}, {name}{_PERCENT}"] = named_rate(audit, name)
    learned = named_rate(audit, "gu2024_null")
    if learned is not None:
        rates["sink rate of the null score, gu2024_null (%)"] = learned
    return rates


def _of_strongest_sink(audit: Audit) -> dict[str, object]:
    summary, sinks = audit.summary, sinks_of(audit.summary)
    heads = share_of_sinking_heads(audit)
    none = "none" if isinstance(summary.get("sink_positions"), list) else None
    position, token, rate = none, none, None
    if sinks:
        top = sinks[0]
        is_position = top["kind"] == "position"
        position = top["position"] if is_position else top["name"]
        text = token_there(top) if is_position else top.get("token")
        token = display_token(text) if text else None
        rate = _float(top.get("rate"))
    return {
        "strongest sink: position": position,
        "strongest sink: token": token,
        "strongest sink: rate (%)": rate,
        "strongest sink: heads": f"{heads[0]} of {heads[1]}" if heads else None,
        "sinks": len(sinks) if none else None,  # positions, groups of them, tokens and the null score, each as one
        "sink role": summary.get("sink_role"),
    }


def _of_attention_and_activations(audit: Audit) -> dict[str, object]:
    null, gate = mean_by_head(audit, "null_mass", "null_mass"), mean_by_head(audit, "null_mass", "output_gain")
    # Of a model without a sink it is measured without position 0, which is none.
    has_no_sink = isinstance(audit.summary.get("sink_positions"), list) and not sinks_of(audit.summary)
    return {
        "null mass (%)": None if null is None else 100 * null,
        **({} if gate is None else {"gate (mean factor on a head's output)": gate}),
        "entropy (nats)": mean_by_head(audit, "entropy", "entropy"),
        "entropy without the sink (nats)": None if has_no_sink else mean_by_head(audit, "entropy", "entropy_without_sink"),
        "massive activations (most in a layer)": _largest(audit, "massive_activation", "massive_count"),
        "largest activation": _largest(audit, "massive_activation", "max_abs"),
        "largest activation / median": _largest(audit, "massive_activation", "max_to_median"),
        "first hidden norm / rest": _largest(audit, "hidden_norm", "first_to_rest_ratio"),
        "outliers: maximum infinity norm": _whole(audit, "outliers", "max_inf_norm"),
        "outliers: kurtosis": _whole(audit, "outliers", "kurtosis"),
    }


def _of_conditions(audit: Audit) -> dict[str, object]:
    """The rate at position 0 under the conditions of the audit; those with and without BOS where the model has one."""
    rows: dict[str, object] = {}
    with_bos, without_bos = _condition(audit, "with"), _condition(audit, "without")
    if words := bos_words(True, audit.summary.get("bos_name")):
        name = words.removeprefix("with ")
        known = with_bos is not None and without_bos is not None
        rows = {
            f"{name} sensitivity (percentage points)": with_bos - without_bos if known else None,  # type: ignore[operator]
            f"sink rate at position 0 with {name} (%)": with_bos,
            f"sink rate at position 0 without {name} (%)": without_bos,
        }
    made_up = ("noise", "constant") if _has_own_positions(audit) else ("random_tokens", "repeated_token")
    return rows | {
        f"sink rate at position 0, {condition_name(corpus, None, audit.summary)} (%)": _condition(audit, corpus)
        for corpus in made_up
    }


def _has_own_positions(audit: Audit) -> bool:
    """Whether the model decides how many positions a sample has, as those of pictures and of sound do."""
    return audit.summary.get("kind") in ("image", "audio")


def _certified(audit: Audit) -> dict[str, Any]:
    """Rows of an audit with a no-op certificate; none of one without."""
    certificate = _certificate(audit)
    if certificate is None:
        return {}
    heads = certificate["heads"]

    def median(of: str, among: list[dict[str, Any]]) -> float | None:
        known = [head[of] for head in among if head[of] is not None]
        return statistics.median(known) if known else None

    sinks = [head for head in heads if head["sink_weight"] > just_above(certificate["threshold"])]
    needed = f"weight needed for output {certificate['delta']:g}"
    sink = certificate["sink_position"]
    rows = {
        "heads with a sink": f"{certificate['sink_heads']} of {len(heads)}",
        "heads forced to have it": f"{certificate['forced_heads']} of {len(heads)}{verdict_queries(heads)}",
        f"{needed} (median head)": median("needed_sink_weight", heads),
        f"{needed} (median of heads with a sink)": median("needed_sink_weight", sinks),
        "weight on the sink (median head)": median("sink_weight", heads),
        "gap (median head)": median("gap", heads),
        "weights sum to one": "yes" if certificate["normalized"] else "no, so none is forced",
    }
    place = f"position {sink}" if is_number(sink) else str(certificate.get("sink") or sink)
    sink_row = {_ASKED: "the null" if sink == "null" else place}
    return sink_row | {f"{_CERTIFICATE}{row}": value for row, value in rows.items()}


def _certificate(audit: Audit) -> dict[str, Any] | None:
    """The certificate of an audit that has one and could be certified."""
    certificate = audit.summary.get("certificate")
    return certificate if isinstance(certificate, dict) and "heads" in certificate else None


def _certificates(audits: Sequence[tuple[str, Audit]], table: pd.DataFrame) -> dict[str, object] | None:
    """The section on the certificate; ``None`` where no audit was asked for one."""
    if not any("certificate" in audit.summary for _, audit in audits):
        return None
    rows = [row for row in table.index if row.startswith(_CERTIFICATE)]
    notes = []
    if without := [name for name, audit in audits if "certificate" not in audit.summary]:
        have, them = ("has", "it") if len(without) == 1 else ("have", "them")
        notes = [f"{_join(without)} {have} no certificate: audit {them} again with --certificate."]
    for name, audit in audits:
        if "certificate" not in audit.summary:
            continue
        if _certificate(audit) is None:
            entry = audit.summary["certificate"]
            refused = entry.get("refused") if isinstance(entry, dict) else None
            notes.append(f"{name} was not certified: {refused or 'no reason is recorded'}")
    return {
        "rows": [(row.removeprefix(_CERTIFICATE), list(table.loc[row])) for row in rows],
        "texts": [str(certificate["text"]) if (certificate := _certificate(audit)) else None for _, audit in audits],
        "notes": notes,
    }


def _condition(audit: Audit, kind: str) -> float | None:
    """Gu et al.'s rate at the first position under one of the audit's conditions.

    Args:
        kind: a corpus, of whose conditions the first counts; or ``"with"`` or ``"without"`` BOS, on the audit's own text.
    """
    conditions = [entry for entry in audit.summary.get("conditions") or [] if isinstance(entry, dict)]
    for entry in conditions:
        corpus, bos = entry.get("corpus"), entry.get("bos")
        own = corpus == conditions[0].get("corpus")  # which may be an artificial one
        if kind == corpus or (own and bos is not None and kind == ("with" if bos else "without")):
            return _float(entry.get("sink_rate_gu2024"))
    return None


def _largest(audit: Audit, probe: str, metric: str) -> float | None:
    largest = largest_by_layer(audit, probe, metric)
    return largest[0] if largest else None


def _whole(audit: Audit, probe: str, metric: str) -> float | None:
    value = audit.numbers.whole(probe, metric)
    return value if value is not None else _largest(audit, probe, metric)


def _float(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _write(row: str, value: Any) -> str:
    if value is None:
        return "–"
    if row.endswith(_PERCENT):
        return percent(value)
    if row.startswith("loss") and is_number(value):
        return number(float(value), 4)
    return number(value)


def _sentences(audits: Sequence[tuple[str, Audit]]) -> list[str]:
    """The finding of every audit, and how far the losses are apart."""
    return [*(f"{name}: {verdict(audit)}" for name, audit in audits), *_losses(audits)]


def _losses(audits: Sequence[tuple[str, Audit]]) -> list[str]:
    """Which model predicts best, where that can be said: of the same tokens per token, of the same text per byte."""
    units = [loss_unit(audit.summary) for _, audit in audits if _float(audit.summary.get("loss")) is not None]
    if len(units) < 2:
        return []
    if why := _why_unranked(audits, list(dict.fromkeys(units))):
        return [f"Losses are not ranked{why}"]
    per_token = units[0]
    tokens = {audit.run.get("token_sha256") for _, audit in audits}
    key, unit = ("loss", per_token) if len(tokens) == 1 and None not in tokens else ("bits_per_byte", "bits per byte")
    losses = {name: loss for name, audit in audits if (loss := _float(audit.summary.get(key))) is not None}
    if len(losses) < 2:
        return [f"Losses are not ranked: {per_token} of different tokenizers do not compare, and bytes were not counted."]
    best = min(losses.values())
    lowest = _join([name for name, loss in losses.items() if loss == best])
    others = [
        f"{name} {percent(100 * (loss / best - 1))} above it" if best > 0 else f"{name} {number(loss, 4)}"
        for name, loss in losses.items()
        if loss > best
    ]
    ranked = f"Lowest loss: {lowest}, {number(best, 4)} {unit}{'; ' if others else ''}{_join(others)}."
    if key != "loss":
        ranked += " Samples have equally many tokens, and not equally much text: longer tokens are read behind more context."
    if others:  # an audit keeps the mean of its losses, and nothing of their spread
        ranked += " These are means over one draw of samples, without an interval: others may give another order."
    return [ranked]


def _why_unranked(audits: Sequence[tuple[str, Audit]], units: Sequence[str]) -> str:
    """The end of a sentence where losses do not compare, whatever the tokenizers; empty where they may."""
    if len({_text(audit) for _, audit in audits}) > 1:
        return ", since the texts differ."
    if different := _different(audits, ("seq_len", "samples", "bos", "seed")):
        return f", since the audits differ in {_join(different)}: they are of other passages or contexts."
    if len(units) > 1:
        return f": {_join(units)} are losses of different tasks."
    return ""


def _different(audits: Sequence[tuple[str, Audit]], settings: Sequence[str]) -> list[str]:
    """Those of some settings in which audits that have recorded them differ."""
    recorded = {name: [_setting(audit, name) for _, audit in audits] for name in settings}
    return [name for name, values in recorded.items() if len({value for value in values if value is not None}) > 1]


def _setting(audit: Audit, name: str) -> str | None:
    """A setting as it was in effect: whether there was a BOS, where ``auto`` asks the tokenizer for one."""
    if name == "bos" and is_number(count := audit.config.get("bos_tokens_per_sample")):
        return "in front" if count else "none"
    value = audit.config.get(name)
    return None if value is None else str(value)


def _text(audit: Audit) -> tuple[str, str]:
    """Name, with how it was read if that needs settings, and revision (the hash of a file) of the text that was read."""
    corpus = audit.run.get("corpus")
    corpus = corpus if isinstance(corpus, dict) else {}
    name, settings = str(audit.config.get("corpus")), corpus.get("settings")
    if isinstance(settings, dict) and len(settings) > 1:
        # The name says which file it is; folders are those of a machine.
        how = {key: value for key, value in settings.items() if key not in ("path", "of")}
        name += f" as {spelled({**how, 'name': corpus.get('kind')})}"
    return name, str(corpus.get("revision"))


def _short(revision: str) -> str:
    """A revision without most of its hashes; one of versions, such as those of installed packages, is whole."""
    return re.sub(r"\b(sha256-[0-9a-f]{8})[0-9a-f]+", r"\1", revision)


def _warning(audits: Sequence[tuple[str, Audit]]) -> str:
    """What keeps the audits from being compared: other texts, settings, or definitions; empty if nothing does."""
    sentences = []
    texts = list(dict.fromkeys(_text(audit) for _, audit in audits))
    if len(texts) > 1:
        listed = _join([f"{name} ({_short(revision)})" for name, revision in texts])
        sentences.append(f"These audits read different texts: {listed}. Neither their rates nor their losses compare.")
    different = _different(audits, _SETTINGS)
    if "seq_len" in different and all(_has_own_positions(audit) for _, audit in audits):
        different.remove("seq_len")
        numbers = sorted({length for _, audit in audits if is_number(length := audit.config.get("seq_len"))})
        own = (
            f"These models see {_join([f'{each:,}' for each in numbers])} positions in a sample, which no setting makes alike: "
        )
        own += "where there are more, a head that looks at all alike gives each of them less."
    else:
        own = ""
    if different:
        sentences.append(f"These audits differ in {_join(different)}: their rates are not comparable as they stand.")
    if redefined := _redefined(audits):
        sentences.append(f"These audits differ in the definition of {_join(redefined)}: such numbers do not compare.")
    again = f"Audit again with the same text{', settings and version of sinklab' if redefined else ' and settings'}."
    return " ".join(filter(None, [own, *sentences, again if sentences else ""]))


def _redefined(audits: Sequence[tuple[str, Audit]]) -> list[str]:
    """Metrics of which audits have different versions, each with these."""
    versions: dict[str, dict[str, None]] = {}
    for _, audit in audits:
        entries = audit.run.get("definitions")
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and is_number(entry.get("version")):
                versions.setdefault(str(entry.get("metric")), {})[str(entry["version"])] = None
    return [f"{metric} (versions {' and '.join(sorted(of))})" for metric, of in versions.items() if len(of) > 1]


def _conditions(audits: Sequence[tuple[str, Audit]]) -> list[tuple[str, list[float | None]]]:
    """Sink rate at the first position under each condition, one list entry per audit."""
    rows: dict[str, list[float | None]] = {}
    for index, (_, audit) in enumerate(audits):
        for entry in audit.summary.get("conditions") or []:
            if isinstance(entry, dict):
                name = condition_name(entry.get("corpus"), entry.get("bos"), audit.summary)
                rows.setdefault(name, [None] * len(audits))[index] = _float(entry.get("sink_rate_gu2024"))
    return list(rows.items())


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
