"""The no-op certificate as a section of an audit: which heads could not write little without their sink, on a few samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd

from sinklab.errors import ConfigurationError, InputError, MeasurementError, UnsupportedModelError
from sinklab.results.intervals import just_above
from sinklab.results.record import to_json
from sinklab.results.sections import Context
from sinklab.results.table import make_table
from sinklab.sinks import Sink
from sinklab.studies.measure.probing import labelled, run_probes
from sinklab.studies.theory.found import LEAST_QUERIES, LEAST_SHARE_OF_QUERIES, Certificate, CertifiedHead
from sinklab.studies.theory.no_op_certificate import NoOpCertificate

__all__ = ["certified"]

SAMPLES, QUERIES, DELTA = 4, 32, 0.2
"""Samples, queries of each, and the output norm asked about, in units of the largest norm of a visible projected value."""

_FIELDS = {
    "least_output": "least_output",
    "least_output_without_sink": "least_output_without_sink",
    "no_op_gap": "gap",
    "output": "output",
    "certified_sink_weight": "sink_weight",
    "needed_sink_weight": "needed_sink_weight",
}
"""Metrics of the probe, and their fields of a head."""


def certified(context: Context) -> tuple[dict[str, Any], pd.DataFrame]:
    """Certify all heads on the first samples of an audit's main condition.

    A head is *forced* to have its sink if it gives it more than the threshold of the audit on average, and would have to give
    it more than that on average, by its values alone, in order to write at most :data:`DELTA`. The need is known at the
    queries where any weights write so little; a head is not called forced on fewer than half of its queries, or on fewer than
    :data:`~sinklab.studies.theory.found.LEAST_QUERIES`. Weights that need not sum to one force nothing.

    Returns:
        What ``summary.json`` has under ``certificate``, ``{"refused": why}`` where the model cannot be certified; and rows of
        the long table.
    """
    summary, loaded = context.summary, context.loaded
    if summary.get("parts"):
        why = "an encoder–decoder has three kinds of attention with sinks of their own, and a certificate is about one sink"
        return {"refused": why}, make_table([])
    sink = context.sinks.main or Sink(kind="position", position=0)
    name = "the null (learned sink logit, key bias)" if sink.kind == "null" else sink.name
    probe = NoOpCertificate(sink, max_queries=QUERIES, delta=DELTA)
    tokens = context.samples.tokens[:SAMPLES]
    try:
        probed = run_probes(loaded.model, tokens, [probe], batch_size=1, progress=context.progress, stage="no-op certificate")
        table = labelled(
            probed.session, loaded, run_id=context.run_id, corpus=summary["corpus"], bos=int(context.bos), seed=context.seed
        )
        heads = _heads(table, summary["threshold"], summary["normalized"])
        if not heads:
            raise InputError(f"no query of the samples sees its sink ({name}) and another key; give longer samples (`seq_len`)")
    except (ConfigurationError, InputError, MeasurementError, UnsupportedModelError) as error:
        return {"refused": str(error)}, make_table([])
    context.probes.append(probe)
    found = Certificate(
        sink_position=sink.place,
        sink=name,
        sink_found=context.sinks.main is not None,
        delta=DELTA,
        threshold=summary["threshold"],
        samples=len(tokens),
        normalized=summary["normalized"],
        sink_heads=sum(head.sink_weight > just_above(summary["threshold"]) for head in heads),
        forced_heads=sum(head.forced for head in heads),
        heads=heads,
    )
    return to_json(found), table


def _heads(table: pd.DataFrame, threshold: float, normalized: bool) -> list[CertifiedHead]:
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    for row in table[table["head"].notna()].itertuples():
        module, number = str(row.module), int(row.head)
        head = measured.setdefault((module, number), {"module": module, "layer": int(row.layer), "head": number})
        head[_FIELDS[row.metric]] = float(row.value)
        head["needed_queries" if row.metric == "needed_sink_weight" else "queries"] = int(row.count)
    heads = [CertifiedHead(**head) for head in measured.values()]
    heads = [dataclasses.replace(head, forced=normalized and _is_forced(head, threshold)) for head in heads]
    return sorted(heads, key=lambda head: (head.layer, head.module, head.head))


def _is_forced(head: CertifiedHead, threshold: float) -> bool:
    """Whether a head gives its sink more than the threshold and needs to, known at enough queries."""
    # Strictly more, as everywhere; None is a head that no weights make that silent, with its sink or without.
    needed = head.needed_sink_weight
    enough = head.needed_queries >= max(LEAST_QUERIES, LEAST_SHARE_OF_QUERIES * head.queries)
    return enough and needed is not None and min(needed, head.sink_weight) > just_above(threshold)
