"""The no-op certificate as a section of an audit: which heads could not write little without their sink, on a few samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import pandas as pd
from torch import Tensor

from sinklab.attention.probe import Probe
from sinklab.errors import ConfigurationError, InputError, MeasurementError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.report.words import of_heads
from sinklab.results.intervals import just_above
from sinklab.results.naming import counted
from sinklab.results.run import Progress, silent
from sinklab.results.summaries.certificate import (
    LEAST_QUERIES,
    LEAST_SHARE_OF_QUERIES,
    Certificate,
    CertifiedHead,
    queries_words,
    verdict_queries,
)
from sinklab.results.summaries.shared import Refused
from sinklab.results.table import make_table
from sinklab.sinks import Sink, Sinks
from sinklab.studies.measure.probing import labelled, run_probes
from sinklab.studies.theory.no_op_certificate import NoOpCertificate

__all__ = ["certified"]

SAMPLES, QUERIES, DELTA = 4, 32, 0.2
"""Samples, queries of each, and the output norm asked about, in units of the largest norm of a visible projected value."""

_COLUMNS: dict[
    str, Literal["least_output", "least_output_without_sink", "gap", "output", "sink_weight", "needed_sink_weight"]
] = {
    "least_output": "least_output",
    "least_output_without_sink": "least_output_without_sink",
    "no_op_gap": "gap",
    "output": "output",
    "certified_sink_weight": "sink_weight",
    "needed_sink_weight": "needed_sink_weight",
}
"""Metrics of the probe, and their keys in the summary."""


def certified(
    loaded: LoadedModel,
    tokens: Tensor,
    summary: Mapping[str, Any],
    sinks: Sinks,
    *,
    run_id: str,
    seed: int,
    progress: Progress = silent,
) -> tuple[Certificate | Refused, pd.DataFrame, list[Probe]]:
    """Certify all heads on the first samples of an audit's main condition.

    A head is *forced* to have its sink if it gives it more than the threshold of the audit on average, and would have to give
    it more than that on average, by its values alone, in order to write at most :data:`DELTA`. The need is known at the
    queries where any weights write so little; a head is not called forced on fewer than half of its queries, or on fewer than
    :data:`~sinklab.results.summaries.certificate.LEAST_QUERIES`. Weights that need not sum to one force nothing.

    Args:
        tokens: int64 ``(samples, seq_len)``.
        sinks: that the audit found; without any, position 0 is asked about.
        summary: of the same audit: its threshold, operation, corpus and whether weights sum to one.

    Returns:
        What ``summary.json`` has under ``certificate`` (docs/reference.md#results), ``{"refused": why}`` where the model cannot be
        certified; rows of the long table; and the probe that made them, none if refused.
    """
    if summary.get("parts"):
        why = "an encoder–decoder has three kinds of attention with sinks of their own, and a certificate is about one sink"
        return {"refused": why}, make_table([]), []
    sink = sinks.main or Sink(kind="position", position=0)
    probe = NoOpCertificate(sink, max_queries=QUERIES, delta=DELTA)
    tokens = tokens[:SAMPLES]
    try:
        probed = run_probes(loaded.model, tokens, [probe], batch_size=1, progress=progress, stage="no-op certificate")
        table = labelled(probed.session, loaded, run_id=run_id, corpus=summary["corpus"], bos=int(summary["bos"]), seed=seed)
        heads = _heads(table, summary["threshold"], summary["normalized"])
        if not heads:
            raise InputError(
                f"no query of the samples sees its sink ({_place(sink)}) and another key; give longer samples (`seq_len`)"
            )
    except (ConfigurationError, InputError, MeasurementError, UnsupportedModelError) as error:
        return {"refused": str(error)}, make_table([]), []
    section: Certificate = {
        "sink_position": sink.place,
        "sink": _place(sink),
        "sink_found": sinks.main is not None,
        "delta": DELTA,
        "threshold": summary["threshold"],
        "samples": len(tokens),
        "normalized": summary["normalized"],
        "sink_heads": sum(head["sink_weight"] > just_above(summary["threshold"]) for head in heads),
        "forced_heads": sum(head["forced"] for head in heads),
        "heads": heads,
    }
    section["text"] = _sentence(section, summary["operation"])
    return section, table, [probe]


def _heads(table: pd.DataFrame, threshold: float, normalized: bool) -> list[CertifiedHead]:
    heads: dict[tuple[str, int], CertifiedHead] = {}
    for row in table[table["head"].notna()].itertuples():
        module, number = str(row.module), int(row.head)
        empty: dict[str, object] = {
            "module": module,
            "layer": int(row.layer),
            "head": number,
            **dict.fromkeys(_COLUMNS.values()),
            "queries": 0,
            "needed_queries": 0,
        }
        head = heads.setdefault((module, number), cast(CertifiedHead, empty))  # this row and the next ones fill it
        head[_COLUMNS[row.metric]] = float(row.value)
        head["needed_queries" if row.metric == "needed_sink_weight" else "queries"] = int(row.count)
    for head in heads.values():
        head["forced"] = normalized and _needs(head, threshold) and _enough(head)
    return sorted(heads.values(), key=lambda head: (head["layer"], head["module"], head["head"]))


def _needs(head: CertifiedHead, threshold: float) -> bool:
    """Whether a head gives its sink more than the threshold and needs to, at however few queries."""
    # Strictly more, as everywhere; None is a head that no weights make that silent, with its sink or without.
    needed = head["needed_sink_weight"]
    return needed is not None and bool(min(needed, head["sink_weight"]) > just_above(threshold))


def _enough(head: CertifiedHead) -> bool:
    """Whether its need is known at enough queries."""
    return head["needed_queries"] >= max(LEAST_QUERIES, LEAST_SHARE_OF_QUERIES * head["queries"])


def _sentence(section: Certificate, operation: str) -> str:
    where, threshold, heads = _where(section), section["threshold"], section["heads"]
    if not section["normalized"]:
        need = _need(section["delta"], heads, "a softmax head in place of one of these", f"on {where}")
        return f"No head is forced to have a sink: weights of {operation} need not sum to one. {need}"
    number, forced = section["sink_heads"], section["forced_heads"]
    if not number:
        need = _need(section["delta"], heads, "a head", "there")
        return f"No head gives {where} more than {threshold:g} of its weight on average, so none is forced to. {need}"
    sinks = [head for head in heads if head["sink_weight"] > just_above(threshold)]
    return (
        f"{of_heads(number, len(heads), 'gives', 'give')} {where} more than {threshold:g} of "
        f"{_verb(number, 'its', 'their')} weight on average; {forced or 'none'} of them {_verb(forced or 1, 'is', 'are')} "
        f"forced to{verdict_queries(sinks)}.{_too_few(sinks, threshold)} "
        f"{_need(section['delta'], sinks, 'such a head', 'there')}"
    )


def _too_few(sinks: list[CertifiedHead], threshold: float) -> str:
    """Of which heads nothing is said, since their need is known at too few queries."""
    few = [head for head in sinks if _needs(head, threshold) and not _enough(head)]
    if not few:
        return ""
    most = queries_words(max(few, key=lambda head: head["needed_queries"]))
    return (
        f" Of {counted(len(few), 'other')} it is not known: {_verb(len(few), 'it needs', 'they need')} as much, but at {most} "
        f"queries{_verb(len(few), '', ' at most')}; a verdict takes half of them, and {LEAST_QUERIES} at least."
    )


def _need(delta: float, heads: list[CertifiedHead], heads_in_words: str, where: str) -> str:
    """What some heads need on the sink in order to write little, in words."""
    little = f"write at most {delta:g} of its longest value"
    known = [head["needed_sink_weight"] for head in heads if head["needed_sink_weight"] is not None]
    if not known:
        return f"No weights at all, with the sink or without, could make such a head {little}."
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    # Each is known from below; the range is that of the heads.
    weight = f"at least {low} of its weight" if low == high else f"at least {low} to {high} of its weight (heads differ)"
    if high == "0.00":
        weight = "next to no weight"
    cannot = len(heads) - len(known)
    rest = f" {cannot} of these heads could not with any weights." if cannot else ""
    return f"By its values alone, {heads_in_words} needs {weight} {where} to {little}.{rest}"


def _verb(number: int, one: str, many: str) -> str:
    return one if number == 1 else many


def _where(section: Certificate) -> str:
    where = str(section.get("sink", f"position {section['sink_position']}"))
    return where if section.get("sink_found", True) else f"{where} (no sink was found)"


def _place(sink: Sink) -> str:
    return "the null (learned sink logit, key bias)" if sink.kind == "null" else sink.name
